"""Learn from vLLM's own loader which bytes of a checkpoint it copies to which bytes of a model.

    model.load_weights(meta tensors) ─► every write is caught, none is executed ─► LoadPlan
    a version's tensors + LoadPlan ─► one batched copy into the parameters that serve

The loader runs on the serving model, with tensors that have a shape but no data. A dispatch mode
of this thread alone sees each operator. A copy from a view of a checkpoint's tensor becomes a part
of the plan; zeros for padding are noted; any other write means that the layer has no plan, and vLLM
reloads it. Nothing is ever written to the model here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollway.engine.fingerprint import Proof
from rollway.engine.layers import PACKED, explain_no_plan, list_changed_layers
from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES
from rollway.weights.layout import Box, Shape, Slices, check_covered

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a tensor: where they begin, and how they are spaced."""

    offset: int
    shape: Shape
    stride: Shape

    @classmethod
    def of(cls, view: torch.Tensor, first: int = 0) -> Region:
        """Return where a view is; `first` is the offset at which its tensor begins."""
        return cls(view.storage_offset() - first, tuple(view.shape), view.stride())

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of a contiguous tensor."""
        first = tensor.storage_offset()
        return tensor.detach().as_strided(self.shape, self.stride, first + self.offset)

    def as_box(self, shape: Shape) -> Box | None:
        """Return the block of a contiguous tensor of this shape that the elements form."""
        is_contiguous = self.stride == _compute_strides(self.shape)
        if is_contiguous and math.prod(self.shape) == math.prod(shape):
            return Box.whole(shape)
        strides = _compute_strides(shape)
        start = [int(at) for at in np.unravel_index(self.offset, shape)]
        stop = [at + 1 for at in start]
        for size, stride in zip(self.shape, self.stride, strict=True):
            if size == 1:
                continue
            axes = (a for a, s in enumerate(strides) if s == stride and shape[a] > 1)
            axis = next(axes, None)
            if axis is None or stop[axis] != start[axis] + 1:
                return None
            stop[axis] = start[axis] + size
        box = Box(tuple(start), tuple(stop))
        return box if box.intersect(Box.whole(shape)) == box or not shape else None

    def within(self, whole: Shape, part: Box) -> Region:
        """Return where these elements of a tensor are in a contiguous part of it."""
        box = self.as_box(whole)
        if box is None or box.intersect(part) != box:
            raise RuntimeError(f"the parts that came are not those that vLLM's loader cuts: {part}")
        block = torch.empty(part.shape, device="meta")[box.relative_to(part.start).slices]
        sizes = [size for size in self.shape if size > 1]
        strides = [s for s, size in zip(self.stride, self.shape, strict=True) if size > 1]
        if sizes != [size for size in block.shape if size > 1] or strides != sorted(strides)[::-1]:
            raise RuntimeError("vLLM's loader flattens or transposes a tensor of which parts came")
        return Region.of(block.view(self.shape))


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Elements of a checkpoint's tensor, and the elements of a parameter that they become."""

    parameter: str
    destination: Region
    tensor: str = ""
    source: Region | None = None
    """None where the loader fills a parameter with zeros."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a checkpoint's tensors become the parameters of one rank."""

    copies: tuple[PlannedCopy, ...] = ()
    reloaded: Mapping[str, str] = field(default_factory=dict)
    """Layers that only vLLM can load, with the reason."""
    refusal: str = ""
    """Why vLLM must reload the whole model; "" if the plan can be used."""

    @property
    def reason(self) -> str:
        """Why vLLM reloads anything."""
        if self.refusal or not self.reloaded:
            return self.refusal
        layer, why = next(iter(self.reloaded.items()))
        more = f" and {len(self.reloaded) - 1} more layers" if len(self.reloaded) > 1 else ""
        return f"vLLM reloads {layer}{more}: {why}"

    def find_targets(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that the plan writes."""
        live = dict[str, torch.Tensor](model.named_parameters()) | dict(model.named_buffers())
        return {copy.parameter: live[copy.parameter] for copy in self.copies}


def find_plan(worker: Any, headers: Mapping[str, TensorHeader]) -> LoadPlan:
    """Return how tensors with these headers are copied into the serving parameters. Recording a
    plan takes a while, so a worker keeps it until other tensors come."""
    key = {name: (header.dtype, header.shape) for name, header in headers.items()}
    if getattr(worker, "_rollway_plan", (None,))[0] != key:
        worker._rollway_plan = key, _plan_in_place(worker, headers)
    plan: LoadPlan = worker._rollway_plan[1]
    return plan


def _plan_in_place(worker: Any, headers: Mapping[str, TensorHeader]) -> LoadPlan:
    if refusal := explain_no_plan(worker):
        return LoadPlan(refusal=refusal)
    model = worker.model_runner.get_model()
    changed = list_changed_layers(model)
    packed = [name for name, reason in changed.items() if reason == PACKED]
    if packed:
        # On CPU nearly all layers are packed, and vLLM reloads them faster together.
        return LoadPlan(refusal=f"{packed[0]}: {PACKED}")
    plan = record_plan(model, headers, Proof(model).target_of, changed)
    return plan if plan.copies else LoadPlan(refusal=plan.reason or "vLLM's loader copies nothing")


def record_plan(
    model: Any,
    headers: Mapping[str, TensorHeader],
    target_of: Callable[[str], str | None],
    changed: Mapping[str, str],
) -> LoadPlan:
    """Return the plan by which vLLM loads tensors with these headers into the model.

    `target_of` names the parameter of a tensor. `changed` are layers that cannot be planned, with
    the reason; their tensors are not shown to the loader."""
    before = _Snapshot(model)
    names = [name for name in headers if _get_layer(target_of(name) or "") not in changed]
    recorder = _Recorder(model, {name: headers[name] for name in names})
    failure = ""
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(recorder.inputs.items()))
    except Exception as error:  # noqa: BLE001 (whatever a loader raises, it has no plan)
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    if before.restore():
        return LoadPlan(refusal="vLLM's loader replaces parameters")
    if failure:
        return LoadPlan(refusal=f"vLLM's loader needs the values of tensors ({failure})")
    return recorder.make_plan(changed)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Catches every write of this thread to something that existed before."""

    def __init__(self, model: torch.nn.Module, headers: Mapping[str, TensorHeader]) -> None:
        super().__init__()
        self._live = dict[str, torch.Tensor](model.named_parameters()) | dict(model.named_buffers())
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in self._live.items():
            self._by_storage.setdefault(_get_storage(tensor), []).append(name)
        self.inputs = {
            name: torch.empty(header.shape, dtype=DTYPES[header.dtype], device="meta")
            for name, header in headers.items()
        }
        """What the loader is given."""
        self._names = {_get_storage(tensor): name for name, tensor in self.inputs.items()}
        self._fresh: dict[int, torch.Tensor] = {}
        """What the loader created. Kept, so that no address is used twice."""
        self._copies: list[PlannedCopy] = []
        self._refused: dict[str, str] = {}
        """By parameter."""
        self._changed_inputs: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = list(_list_written_tensors(func, args, kwargs))
        protected = [t for t in written if not t.is_meta and _get_storage(t) not in self._fresh]
        if protected:
            for target in protected:
                self._record(func, target, args)
            return written[0]
        for tensor in written:
            name = self._names.get(_get_storage(tensor))
            if name is not None:
                self._changed_inputs.add(name)
        result = func(*args, **kwargs)
        known = {_get_storage(tensor) for tensor in _list_tensors((args, kwargs))}
        for tensor in _list_tensors(result):
            if _get_storage(tensor) not in known:
                self._fresh[_get_storage(tensor)] = tensor
        return result

    def _record(self, func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> None:
        if target.numel() == 0:
            return
        name, region = self._place(target)
        if _is_zero_fill(func, args):
            self._copies.append(PlannedCopy(name, region))
            return
        if func is not _ATEN.copy_.default:
            self._refused[name] = f"its loader uses {func}"
            return
        source: torch.Tensor = args[1]
        tensor = self._names.get(_get_storage(source))
        if tensor is None:
            self._refused[name] = "its loader computes values"
        elif source.shape != target.shape or source.dtype != self.inputs[tensor].dtype:
            self._refused[name] = f"its loader reinterprets {tensor}"
        else:
            self._copies.append(PlannedCopy(name, region, tensor, Region.of(source)))

    def _place(self, target: torch.Tensor) -> tuple[str, Region]:
        """Return the parameter or buffer that a view belongs to, and which elements it has."""
        for name in self._by_storage.get(_get_storage(target), []):
            live = self._live[name]
            region = Region.of(target, live.storage_offset())
            if 0 <= region.offset < live.numel() and target.dtype == live.dtype:
                return name, region
        raise RuntimeError("it would change a tensor that is no parameter")

    def make_plan(self, changed: Mapping[str, str]) -> LoadPlan:
        """Return the plan of all parameters that are written completely and exactly once."""
        refused = dict(self._refused)
        written: dict[str, list[Region]] = {}
        for copy in self._copies:
            written.setdefault(copy.parameter, []).append(copy.destination)
            if copy.tensor in self._changed_inputs:
                refused[copy.parameter] = f"its loader changes {copy.tensor}"
        for name, regions in written.items():
            if fault := _find_fault(tuple(self._live[name].shape), regions):
                refused.setdefault(name, fault)
        layers = {_get_layer(name): why for name, why in refused.items()} | dict(changed)
        return LoadPlan(
            copies=tuple(c for c in self._copies if _get_layer(c.parameter) not in layers),
            reloaded=layers,
        )


def _find_fault(shape: Shape, regions: list[Region]) -> str:
    """Return why regions do not fill a parameter exactly once; "" if they do."""
    boxes = [box for region in regions if (box := region.as_box(shape)) is not None]
    if len(boxes) < len(regions):
        return "its loader writes elements that form no block"
    try:
        check_covered("it", shape, boxes)
    except UsageError as error:
        return f"its loader does not fill it exactly once: {error}"
    return ""


def _is_zero_fill(func: Any, args: tuple[Any, ...]) -> bool:
    return func is _ATEN.zero_.default or (func is _ATEN.fill_.Scalar and args[1] == 0)


def _list_written_tensors(func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _list_tensors(value)


def _list_tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _get_storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same memory have in common, also on `meta`."""
    return int(tensor.untyped_storage()._cdata)


def _get_layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


@functools.cache
def _compute_strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    return tuple(torch.empty(shape, device="meta").stride())


class _Snapshot:
    """The parameters of a model and their memory, which a loader could replace without any
    operator."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = [
            (tensors, key, tensor, tensor.data)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for key, tensor in tensors.items()
            if tensor is not None
        ]

    def restore(self) -> bool:
        """Put everything back; return whether anything was replaced."""
        replaced = False
        for tensors, key, tensor, data in self._kept:
            if tensors.get(key) is not tensor:
                tensors[key] = tensor
                replaced = True
            same_memory = tensor.is_meta or tensor.data_ptr() == data.data_ptr()
            if not same_memory or tensor.shape != data.shape:
                tensor.data = data
                replaced = True
        return replaced


class BatchedCopy:
    """All copies of a plan for one version, prepared so that running them takes no decisions."""

    def __init__(
        self,
        plan: LoadPlan,
        model: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        slices: Slices,
    ) -> None:
        targets = plan.find_targets(model)
        self._batches: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._single: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._zeros: list[torch.Tensor] = []
        for copy in plan.copies:
            target = copy.destination.view(targets[copy.parameter])
            if copy.source is None:
                self._zeros.append(target)
            else:
                tensor, box = tensors[copy.tensor], slices.boxes.get(copy.tensor)
                source = copy.source
                if box is not None:
                    source = source.within(slices.shapes[copy.tensor], box)
                self._add(target, source.view(tensor))

    def _add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # One kernel copies a whole list only if both sides are dense; one exception would make it
        # copy all of them one by one.
        dense = target.is_contiguous() and source.is_contiguous()
        if dense and target.dtype == source.dtype:
            targets, sources = self._batches.setdefault((target.dtype, source.device), ([], []))
            targets.append(target)
            sources.append(source)
        else:
            self._single.append((target, source))

    def warm_up(self) -> None:
        """Run the copy's kernels once on other memory: CUDA loads a kernel when it is first used,
        which must not happen during the pause."""
        for targets, sources in self._batches.values():
            scratch = torch.empty(8, dtype=targets[0].dtype, device=targets[0].device)
            source = torch.zeros(8, dtype=sources[0].dtype, device=sources[0].device)
            torch._foreach_copy_([scratch], [source], non_blocking=True)
            torch._foreach_zero_([scratch])

    def run(self) -> None:
        """Copy; on a GPU this only starts the copies."""
        for targets, sources in self._batches.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in self._single:
            target.copy_(source, non_blocking=True)
        if self._zeros:
            torch._foreach_zero_(self._zeros)
