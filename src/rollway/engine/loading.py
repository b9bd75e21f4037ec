"""Learn from vLLM's own loader which bytes of a checkpoint it copies to which bytes of a model.

    model.load_weights(meta tensors) ─► every write is caught, none is executed ─► LoadPlan
    a version's tensors + LoadPlan ─► one batched copy into the parameters that serve

The loader runs on the serving model, with tensors that have a shape but no data. A dispatch mode
of this thread alone sees each operator. A copy from a view of a checkpoint's tensor becomes a part
of the plan; zeros for padding are noted; any other write means that the layer has no plan, and vLLM
reloads it. Nothing is ever written to the model here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES
from rollway.weights.layout import Box, Shape, check_covered

_MAX_ERRORS = 8
"""Layers whose loader may raise before the whole model is reloaded instead."""
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
        if math.prod(self.shape) == math.prod(shape) and self.stride == _compute_strides(
            self.shape
        ):
            return Box.whole(shape)
        strides = _compute_strides(shape)
        start, rest = [], self.offset
        for stride in strides:
            start.append(rest // stride)
            rest %= stride
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

    def within(self, whole: Shape, part: Box) -> Region | None:
        """Return where these elements of a tensor are in a contiguous part of it."""
        box = self.as_box(whole)
        if box is None or box.intersect(part) != box:
            return None
        strides, part_strides = _compute_strides(whole), _compute_strides(part.shape)
        by_stride = {
            s: p for s, p, size in zip(strides, part_strides, whole, strict=True) if size > 1
        }
        at = box.relative_to(part.start).start
        offset = sum(i * stride for i, stride in zip(at, part_strides, strict=True))
        if any(
            size > 1 and s not in by_stride for size, s in zip(self.shape, self.stride, strict=True)
        ):
            return None  # it was flattened
        return Region(offset, self.shape, tuple(by_stride.get(s, s) for s in self.stride))


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Elements of a checkpoint's tensor, and the elements of a parameter that they become."""

    parameter: str
    destination: Region
    tensor: str
    source: Region


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a checkpoint's tensors become the parameters of one rank."""

    copies: tuple[PlannedCopy, ...] = ()
    padding: tuple[tuple[str, Region], ...] = ()
    """Parameter and elements that the loader fills with zeros."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """The shapes of the parameters that the plan writes."""
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
    refused = dict(changed)
    for _ in range(_MAX_ERRORS):
        names = [n for n in headers if _get_layer(target_of(n) or "") not in refused]
        recorder = _Recorder(model, {n: headers[n] for n in names})
        failure = recorder.run(model)
        if before.restore():
            return LoadPlan(refusal="vLLM's loader replaces parameters")
        if failure is None:
            return recorder.make_plan(refused)
        name, error = failure
        layer = _get_layer(target_of(name) or "")
        if not layer or layer in refused:
            return LoadPlan(refusal=f"vLLM's loader needs the values of tensors ({error})")
        refused[layer] = f"its loader needs the values of {name} ({error})"
    return LoadPlan(refusal="vLLM's loader needs the values of many tensors")


def get_plan(
    worker: Any, headers: Mapping[str, TensorHeader], record: Callable[[], LoadPlan]
) -> LoadPlan:
    """Return the worker's plan for tensors with these headers; `record` it at the first call."""
    plans: dict[Any, LoadPlan] = worker.__dict__.setdefault("_rollway_plans", {})
    key = tuple(sorted((name, h.dtype, h.shape) for name, h in headers.items()))
    if key not in plans:
        plans.clear()  # another set of tensors: the old one does not come back
        plans[key] = record()
    return plans[key]


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Catches every write of this thread to something that existed before."""

    def __init__(self, model: torch.nn.Module, headers: Mapping[str, TensorHeader]) -> None:
        super().__init__()
        self._live: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._shapes: dict[str, Shape] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._live.setdefault(_get_storage(tensor), []).append((name, tensor))
            self._shapes[name] = tuple(tensor.shape)
        self._parameters = {name for name, _ in model.named_parameters()}
        self._inputs = {
            name: torch.empty(header.shape, dtype=DTYPES[header.dtype], device="meta")
            for name, header in headers.items()
        }
        self._names = {_get_storage(tensor): name for name, tensor in self._inputs.items()}
        self._fresh: dict[int, torch.Tensor] = {}
        """What the loader created. Kept, so that no address is used twice."""
        self._copies: list[PlannedCopy] = []
        self._padding: list[tuple[str, Region]] = []
        self._refused: dict[str, str] = {}
        """By parameter."""
        self._changed_inputs: set[str] = set()
        self._current = ""

    def run(self, model: Any) -> tuple[str, str] | None:
        """Run the loader. Return the tensor at which it raised, with the error; None if it did
        not."""
        try:
            with torch.no_grad(), self:
                model.load_weights(self._yield_inputs())
        except Exception as error:  # noqa: BLE001 (whatever a loader raises, it has no plan)
            return self._current, f"{type(error).__name__}: {str(error)[:200]}"
        return None

    def _yield_inputs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._inputs.items():
            self._current = name
            yield name, tensor

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
        known = {
            _get_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _get_storage(tensor) not in known:
                self._fresh[_get_storage(tensor)] = tensor
        return result

    def _record(self, func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> None:
        if target.numel() == 0:
            return
        name, region = self._place(target)
        if not name:
            raise RuntimeError(f"{func} would change a tensor that is no parameter")
        if _is_zero_fill(func, args):
            self._padding.append((name, region))
        elif func is not _ATEN.copy_.default:
            self._refused[name] = f"its loader uses {func}"
        else:
            self._record_copy(name, region, target, args[1])

    def _record_copy(
        self, name: str, region: Region, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        tensor = self._names.get(_get_storage(source))
        if tensor is None:
            self._refused[name] = "its loader computes values"
        elif source.shape != target.shape or source.dtype != self._inputs[tensor].dtype:
            self._refused[name] = f"its loader reinterprets {tensor}"
        else:
            self._copies.append(PlannedCopy(name, region, tensor, Region.of(source)))

    def _place(self, target: torch.Tensor) -> tuple[str, Region]:
        """Return the parameter or buffer that a view belongs to, and which elements it has."""
        for name, live in self._live.get(_get_storage(target), []):
            region = Region.of(target, live.storage_offset())
            if 0 <= region.offset < live.numel() and target.dtype == live.dtype:
                return name, region
        return "", Region.of(target)

    def make_plan(self, refused_layers: Mapping[str, str]) -> LoadPlan:
        """Return the plan of all parameters that are written completely and exactly once."""
        refused = dict(self._refused)
        regions: dict[str, list[Region]] = {}
        for copy in self._copies:
            regions.setdefault(copy.parameter, []).append(copy.destination)
            if copy.tensor in self._changed_inputs:
                refused[copy.parameter] = f"its loader changes {copy.tensor}"
        zeros: dict[str, list[Region]] = {}
        for name, region in self._padding:
            zeros.setdefault(name, []).append(region)
        for name in regions.keys() | zeros.keys():
            fault = _find_fault(self._shapes[name], regions.get(name, []), zeros.get(name, []))
            if fault:
                refused.setdefault(name, fault)
        layers = {_get_layer(name): why for name, why in refused.items()} | dict(refused_layers)
        untouched = self._parameters - regions.keys()
        layers |= {
            _get_layer(name): "its loader writes only a part of it"
            for name in untouched
            if name in zeros and _get_layer(name) not in layers
        }
        return LoadPlan(
            copies=tuple(c for c in self._copies if _get_layer(c.parameter) not in layers),
            padding=tuple(p for p in self._padding if _get_layer(p[0]) not in layers),
            shapes={n: self._shapes[n] for n in regions if _get_layer(n) not in layers},
            reloaded=layers,
        )


def _find_fault(shape: Shape, copied: list[Region], zeroed: list[Region]) -> str:
    """Return why copies and zeros do not fill a parameter exactly once; "" if they do."""
    whole = Box.whole(shape)
    boxes = [region.as_box(shape) for region in copied]
    padding = [region.as_box(shape) for region in zeroed]
    blocks = [box for box in (*boxes, *padding) if box is not None]
    if len(blocks) < len(boxes) + len(padding):
        return "its loader writes elements that form no block"
    if whole in padding:
        return "its loader clears it as a whole"  # before or after the copies is not known here
    try:
        check_covered("it", shape, blocks)
    except UsageError as error:
        return f"its loader does not fill it exactly once: {error}"
    return ""


def _is_zero_fill(func: Any, args: tuple[Any, ...]) -> bool:
    if func is _ATEN.zero_.default:
        return True
    if func not in (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor):
        return False
    value = args[1]
    if isinstance(value, torch.Tensor):
        return not value.is_meta and value.numel() == 1 and value.item() == 0
    return bool(value == 0)


def _list_written_tensors(func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _get_storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same memory have in common, also on `meta`."""
    return int(tensor.untyped_storage()._cdata)


def _get_layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _compute_strides(shape: Iterable[int]) -> Shape:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


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
