"""Ranks describe what they hold: joined, all ranks give every element of the model once.

torch's fake process group stands in for the others: it sends nothing, and sharding needs nothing
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollway.errors import UsageError
from rollway.weights.layout import Box, check_covered
from rollway.weights.sources import (
    HeldTensor,
    dtensor_box,
    find_fused,
    from_module,
    hold_whole,
    name_as_checkpoint,
)
from tests.unit.weights.fake_ranks import use_fake_rank


class Tiny(nn.Module):
    """Two layers, a norm, a saved buffer and an unsaved one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)))


def _held_by_all(world: int, shard: Callable[[nn.Module], nn.Module]) -> list[list[HeldTensor]]:
    everyone = []
    for rank in range(world):
        with use_fake_rank(rank, world):
            everyone.append(from_module(shard(Tiny())))
    return everyone


def _check_whole(everyone: list[list[HeldTensor]]) -> None:
    """Check that the published boxes make up the model, and that no element comes twice."""
    for name, truth in Tiny().state_dict().items():
        owned = [held for rank in everyone for held in rank if held.shard.name == name]
        owned = [held for held in owned if held.owned_here]
        check_covered(name, tuple(truth.shape), [held.shard.box for held in owned])
        joined = torch.full_like(truth, -1.0)
        for held in owned:
            (piece,) = held.pieces
            assert held.shard.dtype == "F32" and piece.box == held.shard.box
            slices = [slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True)]
            joined[tuple(slices)] = held.tensor
        assert torch.equal(joined, truth)
    assert {held.shard.name for rank in everyone for held in rank} == set(Tiny().state_dict())


def test_a_plain_module_is_published_by_one_of_its_replicas() -> None:
    _check_whole([from_module(Tiny())])
    everyone = [from_module(Tiny(), replica=(rank, 3)) for rank in range(3)]
    _check_whole(everyone)
    assert all(any(held.owned_here for held in rank) for rank in everyone)


def test_tensors_are_not_copied() -> None:
    model = Tiny()
    held = {held.shard.name: held.tensor for held in from_module(model)}
    assert held["up.weight"].data_ptr() == model.up.weight.data_ptr()
    assert not held["up.weight"].requires_grad


def test_wrapped_and_tied_weights_have_one_plain_name() -> None:
    tied = nn.Module()
    tied.embed, tied.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    tied.head.weight = tied.embed.weight
    wrapped = nn.Module()
    wrapped.module = tied
    assert [held.shard.name for held in from_module(wrapped)] == ["embed.weight"]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_fsdp_with_rows_that_its_ranks_do_not_divide(world: int) -> None:
    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))

    everyone = _held_by_all(world, shard)
    _check_whole(everyone)
    assert all(type(held.tensor) is torch.Tensor for rank in everyone for held in rank)


def test_hybrid_sharding_publishes_one_replica() -> None:
    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicas", "shards"))
        return fully_shard(model, mesh=mesh)

    _check_whole(_held_by_all(6, shard))


def test_fsdp_over_tensor_parallel_is_read_as_blocks() -> None:
    """Both shard the rows of `up`: a strided shard."""

    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for part, axis in ((model.up, 0), (model.down, 1)):
            for name, weight in list(part.named_parameters()):
                own = distribute_tensor(weight, mesh["tp"], [Shard(axis)], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(own))
            fully_shard(part, mesh=mesh["dp"])
        return model

    everyone = []
    for rank in range(4):
        with use_fake_rank(rank, 4):
            model = shard(Tiny())
            held = [h for h in from_module(model) if h.shard.name.startswith(("up", "down"))]
            assert any(hasattr(p, "split_factor") for p in model.up.weight.placements)
            everyone.append(held)
    truth = Tiny().state_dict()
    for name in ("up.weight", "up.bias", "down.weight"):
        joined = torch.full_like(truth[name], -1.0)
        boxes = []
        for held in (h for rank in everyone for h in rank if h.shard.name == name):
            if held.owned_here:
                box = held.shard.box
                boxes.append(box)
                joined[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = (
                    held.tensor
                )
        check_covered(name, tuple(truth[name].shape), boxes)
        assert torch.equal(joined, truth[name])


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("is_flattened", [False, True])
def test_norms_outside_a_tensor_parallel_plan_are_published_once(
    sizes: tuple[int, int], is_flattened: bool
) -> None:
    """FSDP shards them over its own dimension, on every tensor parallel rank alike."""

    def shard(model: nn.Module) -> nn.Module:
        names = ("dp", "cp", "tp")
        mesh = init_device_mesh("cpu", (sizes[0], 1, sizes[1]), mesh_dim_names=names)
        data = mesh["dp", "cp"]._flatten("dp_cp") if is_flattened else mesh["dp"]
        for part, axis in ((model.up, 0), (model.down, 1)):
            own = distribute_tensor(part.weight, mesh["tp"], [Shard(axis)], src_data_rank=None)
            part.weight = nn.Parameter(own)
        return fully_shard(model, mesh=data)

    _check_whole(_held_by_all(sizes[0] * sizes[1], shard))


def test_stages_of_a_pipeline_publish_all_that_they_have() -> None:
    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = mesh.get_local_rank("pp")
        for name in ("up", "norm") if stage else ("down", "saved", "cache"):
            delattr(model, name)
        return fully_shard(model, mesh=mesh["dp"])

    everyone = _held_by_all(4, shard)
    parameters = [[held for held in rank if held.shard.name != "saved"] for rank in everyone]
    claimed = [held.shard for rank in parameters for held in rank if held.owned_here]
    for name, truth in Tiny().named_parameters():
        boxes = [shard.box for shard in claimed if shard.name == name]
        check_covered(name, tuple(truth.shape), boxes)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_boxes_equal_those_of_torch(
    shape: tuple[int, int], sizes: list[int], data: st.DataObject
) -> None:
    kinds = st.sampled_from([Shard(0), Shard(1), Replicate()])
    placements = [data.draw(kinds) for _ in sizes]
    coordinate = [data.draw(st.integers(0, size - 1)) for size in sizes]
    box = dtensor_box(shape, tuple(sizes), tuple(coordinate), placements)
    local, offset = _compute_local_shape_and_global_offset(shape, sizes, coordinate, placements)
    assert box.shape == tuple(local)
    if box.elements:
        assert box.start == tuple(offset)


def test_shards_of_several_blocks_are_refused() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    with pytest.raises(UsageError, match="not one block"):
        dtensor_box((12, 2), (2, 2), (0, 0), placements)
    assert dtensor_box((8,), (2, 2), (1, 0), [_StridedShard(0, split_factor=2), Shard(0)]) == (
        Box((2,), (4,))
    )
    with pytest.raises(UsageError, match="not done yet"):
        dtensor_box((12, 2), (2,), (0,), [Partial()])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_experts_have_the_names_of_their_checkpoint(axis: int, world: int) -> None:
    """transformers 5 keeps those of a layer in one parameter; ranks may cut it along any axis."""
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=12, moe_intermediate_size=6, num_hidden_layers=1, num_experts=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=6,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    experts = model.model.layers[0].mlp.experts
    gates, ups = experts.gate_up_proj.detach().chunk(2, dim=1)
    truth = {"gate_proj": gates, "up_proj": ups, "down_proj": experts.down_proj.detach()}
    joined = {name: torch.full_like(tensor, -1.0) for name, tensor in truth.items()}
    boxes: dict[str, list[Box]] = {}
    for rank in range(world):
        with use_fake_rank(rank, world):
            mesh, copy = init_device_mesh("cpu", (world,)), deepcopy(model)
            inner = copy.model.layers[0].mlp.experts
            for name, parameter in list(inner.named_parameters()):
                own = distribute_tensor(parameter, mesh, [Shard(axis)], src_data_rank=None)
                inner.register_parameter(name, nn.Parameter(own))
            for held in from_module(copy):
                prefix, _, rest = held.shard.name.partition(".experts.")
                if not rest:
                    continue
                number, kind, _ = rest.split(".")
                assert prefix == "model.layers.0.mlp"
                boxes.setdefault(held.shard.name, []).append(held.shard.box)
                joined[kind][int(number)][held.shard.box.slices] = held.tensor
                storage = held.tensor.untyped_storage().data_ptr()
                assert storage in {
                    p.to_local().untyped_storage().data_ptr() for p in inner.parameters()
                }
    assert len(boxes) == 4 * 3
    for name, own in boxes.items():
        check_covered(name, (12, 6) if "down_proj" in name else (6, 12), own)
    assert all(torch.equal(joined[name], truth[name]) for name in truth)


def test_only_experts_that_transformers_joined_are_split() -> None:
    fused = find_fused(Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=0, vocab_size=8)))
    assert fused.keys() == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert find_fused(Tiny()) == {}
    for name, shape in (
        ("model.norm.weight", (4,)),
        ("model.layers.0.mlp.gate_up_proj", (4, 6, 2)),
    ):
        item = hold_whole(name, torch.zeros(shape), owned_here=True)
        assert list(name_as_checkpoint(item, fused)) == [item]


def test_a_subclass_whose_memory_is_unknown_is_refused() -> None:
    class Quantised(torch.Tensor):
        pass

    model = Tiny()
    model.saved = torch.zeros(3).as_subclass(Quantised)
    with pytest.raises(UsageError, match="saved is a Quantised"):
        from_module(model)


def test_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: DTensor, **_: object) -> torch.Tensor:
        raise AssertionError("full_tensor() gathers")

    monkeypatch.setattr(DTensor, "full_tensor", forbidden)
    with use_fake_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        whole = torch.arange(6.0).view(3, 2)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        (held,) = from_module(model)
    assert held.shard.box == Box((2, 0), (3, 2))
    assert torch.equal(held.tensor, whole[2:])
