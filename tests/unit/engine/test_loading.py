"""A load plan copies exactly what vLLM's loader copies, and recording it changes nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.engine.fingerprint import Proof
from rollway.engine.loading import BatchedCopy, LoadPlan, Region, record_plan
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Slices
from tests.unit.engine.vllm_models import (
    CONFIGS,
    Tensors,
    create_model,
    headers_of,
    use_ranks,
    write_model,
)

WHOLE = Slices()


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plan_loads_what_vllms_loader_loads(kind: str, tp: int, tmp_path: Path) -> None:
    """Tied embeddings, biases, experts, a padded vocabulary, and with four ranks replicated keys
    and values."""
    tensors = write_model(kind, tmp_path)
    for rank in range(tp):
        with use_ranks(tp, rank):
            loaded, _ = create_model(tmp_path)
            planned, _ = create_model(tmp_path)
            before = state_of(planned)
            plan = record_plan(planned, headers_of(tensors), Proof(planned).target_of, {})
            assert_same(state_of(planned), before)
            loaded.load_weights(iter(tensors.items()))
        assert plan.refusal == "" and not plan.reloaded
        BatchedCopy(plan, planned, tensors, WHOLE).run()
        assert_same(state_of(planned), state_of(loaded))


def test_layers_that_are_left_out_are_not_written(tmp_path: Path) -> None:
    tensors = write_model("qwen3", tmp_path)
    layer = "model.layers.1.mlp.gate_up_proj"
    with use_ranks():
        model, _ = create_model(tmp_path)
        before = state_of(model)
        plan = record_plan(model, headers_of(tensors), Proof(model).target_of, {layer: "changed"})
    BatchedCopy(plan, model, tensors, WHOLE).run()
    after = state_of(model)
    names = [name for name, _ in model.named_parameters()]
    same = [name for name in names if torch.equal(before[name], after[name])]
    assert same == [f"{layer}.weight"] and dict(plan.reloaded) == {layer: "changed"}
    assert plan.reason == f"vLLM reloads {layer}: changed"


def test_a_rank_that_receives_its_parts_alone_copies_from_them(tmp_path: Path) -> None:
    tensors = write_model("qwen3", tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    boxes: dict[str, Box | None] = {}
    for name, (rows, *columns) in shapes.items():
        if "gate_proj" in name or "up_proj" in name:  # the second half of the rows
            boxes[name] = Box((rows // 2, 0), (rows, columns[0]))
        elif "down_proj" in name:  # the second half of the columns
            boxes[name] = Box((0, columns[0] // 2), (rows, columns[0]))
    with use_ranks(2, 1):
        loaded, _ = create_model(tmp_path)
        planned, _ = create_model(tmp_path)
        plan = record_plan(planned, headers_of(tensors), Proof(planned).target_of, {})
        loaded.load_weights(iter(tensors.items()))
    received = {
        name: tensor[box.slices].contiguous() if (box := boxes.get(name)) else tensor
        for name, tensor in tensors.items()
    }
    slices = Slices(boxes, shapes, dict.fromkeys(boxes, ""))
    BatchedCopy(plan, planned, received, slices).run()
    assert_same(state_of(planned), state_of(loaded))


def test_adapters_wrap_layers_that_a_plan_still_finds(tmp_path: Path) -> None:
    from vllm.config import LoRAConfig, set_current_vllm_config
    from vllm.lora.model_manager import LoRAModelManager

    tensors = write_model("qwen3", tmp_path)
    with use_ranks():
        loaded, _ = create_model(tmp_path)
        loaded.load_weights(iter(tensors.items()))
        plain, config = create_model(tmp_path)
        lora = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32)
        config.lora_config = lora
        with set_current_vllm_config(config):
            model = LoRAModelManager(plain, 4, 64, 250, lora, torch.device("cpu"), config).model
        plan = record_plan(model, headers_of(tensors), Proof(model).target_of, {})
    assert plan.refusal == "" and not plan.reloaded
    BatchedCopy(plan, model, tensors, WHOLE).run()
    wrapped = [name for name, _ in model.named_parameters() if ".base_layer." in name]
    names = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}
    assert wrapped
    assert_same({name: p.detach() for name, p in names.items()}, dict(loaded.named_parameters()))


class Toy(torch.nn.Module):
    """A model with one parameter, and a loader that a test writes."""

    def __init__(self, loader: Any, shape: tuple[int, ...] = (4, 6)) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.weight = torch.nn.Parameter(torch.randn(shape), requires_grad=False)
        self.layer.register_buffer("table", torch.randn(3))
        self.scratch = [torch.randn(3)]
        self._loader = loader

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self._loader(self, self.layer.weight, tensor)


TOY = {"layer.weight": TensorHeader("F32", (4, 6), "")}


def record_toy(model: Toy, headers: dict[str, TensorHeader] = TOY) -> LoadPlan:
    before = state_of(model)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    parameters = [id(tensor) for tensor in model.parameters()]
    plan = record_plan(model, headers, lambda name: "layer.weight", {})
    assert_same(state_of(model), before)
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == addresses
    assert [id(tensor) for tensor in model.parameters()] == parameters
    return plan


def write_doubled(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor * 2)


def change_input(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    tensor.mul_(2)
    parameter.data.copy_(tensor)


def add_in_place(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
    parameter.data.add_(1)


def write_a_part(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data[:3].copy_(tensor[:3])


def write_twice(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
    parameter.data[:1].copy_(tensor[1:2])


def fill_with_ones(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
    parameter.data[:1].fill_(1)


def clear_afterwards(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
    parameter.data.zero_()


def broadcast(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor[:1])


def reinterpret(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor.view(torch.int32))


def write_diagonal(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
    parameter.data.diagonal().copy_(tensor.diagonal())


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (write_doubled, "computes values"),
        (change_input, "changes layer.weight"),
        (add_in_place, "uses aten.add_"),
        (write_a_part, "18 of its 24 elements"),
        (write_twice, "claimed twice"),
        (fill_with_ones, "uses aten.fill_"),
        (clear_afterwards, "claimed twice"),
        (broadcast, "reinterprets"),
        (reinterpret, "reinterprets"),
        (write_diagonal, "form no block"),
    ],
)
def test_a_loader_that_does_more_than_copy_has_no_plan(loader: Any, reason: str) -> None:
    plan = record_toy(Toy(loader))
    assert not plan.copies and list(plan.reloaded) == ["layer"]
    assert reason in plan.reason


def test_a_loader_that_needs_values_has_no_plan() -> None:
    plan = record_toy(Toy(lambda model, parameter, tensor: parameter.fill_(tensor.sum().item())))
    assert not plan.copies and "needs the values of tensors" in plan.refusal


def test_a_loader_that_replaces_parameters_has_no_plan() -> None:
    def replace_memory(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        parameter.data = torch.zeros(4, 6)

    def replace_parameter(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        model.layer.weight = torch.nn.Parameter(torch.zeros(4, 6))

    for loader in (replace_memory, replace_parameter):
        assert record_toy(Toy(loader)).refusal == "vLLM's loader replaces parameters"


def test_a_write_to_anything_else_is_not_executed() -> None:
    def write_elsewhere(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)
        model.scratch[0].zero_()

    model = Toy(write_elsewhere)
    before = model.scratch[0].clone()
    plan = record_toy(model)
    assert torch.equal(model.scratch[0], before) and "no parameter" in plan.reason
    assert not plan.copies


def test_a_loader_may_use_memory_of_its_own() -> None:
    def compute_an_index(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        order = torch.zeros(2, dtype=torch.int64)
        order[1] = 2
        for row in order.tolist():
            parameter.data[row : row + 2].copy_(tensor[row : row + 2])

    assert len(record_toy(Toy(compute_an_index)).copies) == 2


def test_other_threads_write_as_always_while_a_plan_is_recorded() -> None:
    """The engine generates on its own thread meanwhile."""

    def generate(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: model.scratch[0].fill_(7))
        thread.start()
        thread.join()
        parameter.data.copy_(tensor)

    model = Toy(generate)
    assert record_toy(model).copies and model.scratch[0].eq(7).all()


def test_padding_is_part_of_the_plan() -> None:
    def pad(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        parameter.data[:3].copy_(tensor[:3])
        parameter[3:].data.fill_(0)

    model, tensor = Toy(pad), torch.randn(4, 6)
    plan = record_toy(model)
    BatchedCopy(plan, model, {"layer.weight": tensor}, WHOLE).run()
    assert torch.equal(model.layer.weight[:3], tensor[:3])
    assert not model.layer.weight[
        3:
    ].any()  # also after vLLM's dummy load format, which pads with noise


@st.composite
def fused_parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, ...]]]:
    """A shape, and blocks that tile it: (start, stop of rows, columns cut in two, transposed)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    cuts = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=3))})
    blocks = []
    for start, stop in pairwise(cuts):
        middle = draw(st.integers(0, shape[-1]))
        blocks += [(start, stop, 0, middle), (start, stop, middle, shape[-1])]
    return shape, [(*block, draw(st.booleans())) for block in blocks]


@given(fused_parameters())
@settings(max_examples=60)
def test_any_tiling_of_a_parameter_is_planned_exactly(
    tiling: tuple[tuple[int, ...], list[tuple[Any, ...]]],
) -> None:
    shape, blocks = tiling

    def load(model: Toy, parameter: Any, tensor: torch.Tensor) -> None:
        flipped = tensor.transpose(0, -1)
        for start, stop, left, right, transposed in blocks:
            target = parameter.data[start:stop].narrow(-1, left, right - left)
            if transposed:
                source = flipped[left:right].narrow(-1, start, stop - start)
                target.transpose(0, -1).copy_(source)
            else:
                target.copy_(tensor[start:stop].narrow(-1, left, right - left))

    model, tensor = Toy(load, shape), torch.randn(shape)
    expected = copy.deepcopy(model)
    load(expected, expected.layer.weight, tensor)
    plan = record_toy(model, {"layer.weight": TensorHeader("F32", shape, "")})
    BatchedCopy(plan, model, {"layer.weight": tensor}, WHOLE).run()
    assert torch.equal(model.layer.weight, expected.layer.weight)
    assert torch.equal(model.layer.weight, tensor)


@given(st.data())
@settings(max_examples=60)
def test_a_region_is_found_again_within_a_part(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    outer = [sorted(data.draw(st.tuples(st.integers(0, s - 1), st.integers(1, s)))) for s in shape]
    part = Box(tuple(a for a, _ in outer), tuple(max(b, a + 1) for a, b in outer))
    inner = [
        sorted(data.draw(st.tuples(st.integers(a, b - 1), st.integers(a + 1, b))))
        for a, b in zip(part.start, part.stop, strict=True)
    ]
    box = Box(tuple(a for a, _ in inner), tuple(max(b, a + 1) for a, b in inner))
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    view = whole[box.slices]
    region = Region.of(view).within(shape, part)
    assert torch.equal(region.view(whole[part.slices].contiguous()), view)
