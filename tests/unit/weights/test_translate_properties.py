"""For any model and topology, to Megatron's ranks and back is the identity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.weights.layout import Shape
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel, pieces
from tests.unit.weights.megatron_models import (
    Experts,
    Norms,
    describe_as,
    headers,
    hf_shapes,
    numbered,
)
from tests.unit.weights.megatron_shards import from_hf, to_hf


@dataclass(frozen=True)
class Case:
    shapes: dict[str, Shape]
    model: MegatronModel


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw sizes that the parallel groups divide; query groups may be split by ranks or not."""
    tp, pp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2]))
    ep, etp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    moe, mixtral = draw(st.booleans()), draw(st.booleans())
    if not moe:
        ep = etp = 1
    vocab = draw(st.integers(1, 40))
    geometry = ModelGeometry(
        layers=pp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 6)),
        heads=groups * per_group,
        query_groups=groups,
        head_dim=tp * draw(st.integers(1, 2)),
        vocab=vocab,
        experts=ep * draw(st.integers(1, 2)) if moe else 0,
        tied_embeddings=draw(st.booleans()),
    )
    experts = draw(st.sampled_from(list(Experts)))
    shapes = hf_shapes(
        geometry,
        tp * draw(st.integers(1, 3)),
        etp * draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        expert_bias=experts is not Experts.LEGACY and draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        shared_ffn=0 if mixtral else tp * draw(st.integers(0, 2)),
        dense_layers=draw(st.integers(0, 1)),
        mixtral=mixtral,
    )
    world = math.lcm(tp, ep * etp) * pp * draw(st.integers(1, 2))
    model = describe_as(
        headers(shapes),
        NameMap("mixtral" if mixtral else "qwen3_moe", geometry),
        Topology(tp, pp, ep, etp, world),
        padded_vocab=(-(-vocab // tp) + draw(st.integers(0, 2))) * tp,
        norms=draw(st.sampled_from(list(Norms))),
        experts=experts,
    )
    return Case(shapes, model)


@given(cases())
@settings(max_examples=150)
def test_to_megatron_and_back_is_the_identity(case: Case) -> None:
    truth = numbered(case.shapes)
    back = dict(to_hf(case.model, from_hf(truth, case.model)))
    assert back.keys() == truth.keys()
    assert all(torch.equal(back[name], truth[name]) for name in truth)


@given(cases())
@settings(max_examples=50)
def test_every_tensor_is_published_by_one_of_its_holders(case: Case) -> None:
    claims: dict[str, int] = dict.fromkeys(case.shapes, 0)
    model = case.model
    for layout in model.ranks.values():
        for name, shard in layout.shards.items():
            if layout.owns(name):
                for piece in pieces(shard, layout.names[name], model.geometry):
                    claims[piece.name] += piece.box.elements
    assert claims == {name: math.prod(shape) for name, shape in case.shapes.items()}
