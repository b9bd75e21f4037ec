"""Plans from any Megatron topology to any engine are exact, for all of Megatron's layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.megatron.describe import Experts, Norms, describe
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.planning.costs import Costs
from rollway.weights.planning.plan import Receiver, plan
from rollway.weights.planning.scenario import hf_headers
from rollway.weights.planning.sources import megatron_sources
from rollway.weights.planning.vllm_layout import engine_ranks, wants
from tests.unit.planned import DTYPE, Model, carried_out, expected, some_model

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "vocab_size": 30,
    "mlp_only_layers": [1],
}
DENSE: dict[str, Any] = {**MOE, "model_type": "qwen2", "num_experts": 0}
TOPOLOGIES = [
    Topology(),
    Topology(tp=2),
    Topology(tp=4, etp=2, ep=2),
    Topology(tp=2, pp=2, ep=4, world=8),
    Topology(ep=4),
    Topology(tp=4, etp=4),
    Topology(pp=2, etp=2, world=8),
]


def model_of(config: dict[str, Any]) -> tuple[Model, dict[str, TensorHeader]]:
    headers = hf_headers(config)
    model = some_model({name: header.shape for name, header in headers.items()})
    return model, {name: replace(header, dtype=DTYPE) for name, header in headers.items()}


@settings(max_examples=30, deadline=None)
@given(
    config=st.sampled_from([MOE, DENSE, {**MOE, "num_key_value_heads": 8}]),
    topology=st.sampled_from(TOPOLOGIES),
    experts=st.sampled_from(Experts),
    norms=st.sampled_from(Norms),
    engine=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (8, 1)]),
    costs=st.sampled_from([Costs(), Costs(pack_gb_per_s=0), Costs(block_seconds=0)]),
)
def test_any_topology_to_any_engine(
    config: dict[str, Any],
    topology: Topology,
    experts: Experts,
    norms: Norms,
    engine: tuple[int, int],
    costs: Costs,
) -> None:
    model, headers = model_of(config)
    geometry = replace(ModelGeometry.from_hf_config(config), padded_vocab=32)
    names = NameMap(config["model_type"], geometry)
    described = describe(headers, names, topology, norms=norms, experts=experts)
    sources = megatron_sources(described)
    ranks = engine_ranks(config, *engine)
    wanted = wants(ranks, headers)
    result = plan(sources, [Receiver(f"r{n}") for n in range(len(ranks))], wanted, costs)
    for rank, mine in enumerate(carried_out(result, sources, model, wanted)):
        for target, values in expected(model, wanted, rank).items():
            np.testing.assert_array_equal(mine[target], values, err_msg=target)


def test_the_error_names_a_tensor_of_a_missing_stage() -> None:
    _, headers = model_of(DENSE)
    names = NameMap("qwen2", ModelGeometry.from_hf_config(DENSE))
    sources = megatron_sources(describe(headers, names, Topology(pp=2)))
    wanted = wants(engine_ranks(DENSE), headers)
    with pytest.raises(UsageError, match=r"No source holds model\.layers\.1\."):
        plan(sources[:1], [Receiver("r")], wanted)
