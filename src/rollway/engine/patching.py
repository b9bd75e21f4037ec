"""Apply a delta to the parameters that serve, where it changes something.

    background   changed elements ─► the device ─► their places in the parameters, their new bits
    pause        write the bits ─► compare the sums of all parameters with the published ones

A load plan says which elements of a checkpoint's tensor become which elements of a parameter. The
same plan translates the position of a changed element. Nothing else of the version is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollway.engine import memory
from rollway.engine.fingerprint import Proof, list_non_finite
from rollway.engine.incoming import Incoming
from rollway.engine.loading import LoadPlan, PlannedCopy, Region
from rollway.errors import WeightsError
from rollway.weights.digest.checksums import DTYPES, integers
from rollway.weights.transports.base import ChangedElements, ChangedStep, Changes, Reader

MOST_CHANGED = 8
"""With more than one changed element in so many, whole tensors take less memory."""
_PLACE_BYTES = 8
_SCRATCH_BYTES = 48
"""What a device needs for each changed element that it unpacks."""
_UNPACKED = 1 << 24
"""How many elements it unpacks together, if no tensor has more."""
_SERVED = "_rollway_serving"


class NoPatch(Exception):
    """Why a version cannot be applied as a patch; it is then received whole."""


@dataclass(frozen=True, slots=True)
class Served:
    """The weights that a worker serves, and the fingerprints of its parameters with them."""

    identity: str
    fingerprints: Mapping[str, int]


def get_served(worker: Any) -> Served | None:
    """Return what the worker is known to serve."""
    served: Served | None = getattr(worker, _SERVED, None)
    return served


def set_served(worker: Any, served: Served | None) -> None:
    """Note what the worker serves; None before its parameters change."""
    setattr(worker, _SERVED, served)


Written = tuple[torch.Tensor, torch.Tensor]
"""Places in a parameter, and the bits that belong there."""
Axis = tuple[int, int, int]
"""The number of elements, and the distance between two of them in the tensor and in the
parameter."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Where the elements of a checkpoint's tensor are in a parameter."""

    parameter: str
    source: int
    """The first element that is copied."""
    target: int
    """Where it is copied to."""
    axes: tuple[Axis, ...]
    """Longest distance in the tensor first."""
    is_whole: bool
    """Whether all elements are copied, one after the other."""

    @classmethod
    def of(cls, copy: PlannedCopy, elements: int) -> Translation:
        """Return the translation of a copy from a tensor with so many elements; raise NoPatch if a
        position in the tensor does not say where in the view it is."""
        assert copy.source is not None
        axes = _find_axes(copy.source, copy.destination)
        if axes is None:
            raise NoPatch(f"positions in {copy.tensor} cannot be translated")
        is_whole = axes == ((elements, 1, 1),)
        source, target = copy.source.offset, copy.destination.offset
        return cls(copy.parameter, source, target, axes, is_whole)

    def translate(self, positions: torch.Tensor, bits: torch.Tensor) -> Written:
        """Return the places of the elements that this rank holds, and their bits."""
        if self.is_whole:
            return positions + self.target, bits
        rest = positions - self.source
        inside = rest >= 0
        places = torch.full_like(rest, self.target)
        for size, distance, to in self.axes:
            index = rest // distance
            inside &= index < size
            places += index * to
            rest -= index * distance
        chosen = torch.nonzero(inside & (rest == 0)).view(-1)
        return places.index_select(0, chosen), bits.index_select(0, chosen)


def _find_axes(source: Region, target: Region) -> tuple[Axis, ...] | None:
    """Return the axes of a copy, joined where both sides continue without a gap."""
    axes = [
        axis for axis in zip(source.shape, source.stride, target.stride, strict=True) if axis[0] > 1
    ]
    axes.sort(key=lambda axis: axis[1], reverse=True)
    joined: list[Axis] = []
    reach = 0  # the farthest element of the axes so far, which must be nearer than the next one
    for size, distance, to in reversed(axes):
        if distance <= reach:
            return None
        reach += (size - 1) * distance
        if joined:
            inner, step, inner_to = joined[-1]
            if (distance, to) == (inner * step, inner * inner_to):
                joined[-1] = (inner * size, step, inner_to)
                continue
        joined.append((size, distance, to))
    return tuple(reversed(joined))


class Patch:
    """The changed elements of a version, at their places in the parameters of one rank."""

    def __init__(self, plan: LoadPlan, model: torch.nn.Module, elements: Mapping[str, int]) -> None:
        """Translate the plan; `elements` is the number of elements of each tensor."""
        if plan.refusal or plan.reloaded:
            raise NoPatch(plan.reason)
        targets = plan.find_targets(model)
        self._live = {name: integers(tensor) for name, tensor in targets.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in targets.items()}
        self._translations: dict[str, list[Translation]] = {}
        for copy in plan.copies:
            if copy.source is not None:  # zeros stay
                translation = Translation.of(copy, elements[copy.tensor])
                self._translations.setdefault(copy.tensor, []).append(translation)
        self._staged: dict[str, Written] = {}
        """By parameter; each place once."""

    @property
    def count(self) -> int:
        return sum(places.numel() for places, _ in self._staged.values())

    def add(self, step: ChangedStep, device: torch.device) -> None:
        """Stage what changed from one version to the next, after the steps before."""
        # In order, to be found again. The first step, mostly the only one, need not be sorted.
        self._staged = {name: _sort(*written) for name, written in self._staged.items()}
        parts: dict[str, list[Written]] = {}
        for tensor, elements in step.move(device):
            for translation in self._translations.get(tensor, []):
                written = self._translate(translation, elements)
                parts.setdefault(translation.parameter, []).append(written)
        for name, pieces in parts.items():
            places, bits = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
            if name in self._staged:
                places, bits = overlay(self._staged[name], (places, bits))
            self._staged[name] = places, bits

    def _translate(self, translation: Translation, elements: ChangedElements) -> Written:
        name = translation.parameter
        places, bits = translation.translate(elements.positions, elements.bits)
        if elements.relative:
            old = self._live[name].index_select(0, places)
            earlier, earlier_bits = self._staged.get(name, (places[:0], bits[:0]))
            if earlier.numel():
                at, is_known = _find(places, earlier)
                old = torch.where(is_known, earlier_bits.index_select(0, at), old)
            bits = old + bits
        return places, bits

    def warm_up(self) -> None:
        """Run the write's kernel once on other memory: CUDA loads a kernel when it is first
        used, which must not happen during the pause."""
        for dtype, device in {(bits.dtype, bits.device) for _, bits in self._staged.values()}:
            scratch = torch.zeros(8, dtype=dtype, device=device)
            scratch.scatter_(0, torch.arange(8, device=device), scratch.clone())

    def list_non_finite(self) -> list[str]:
        """Return the parameters that would get NaN or infinity."""
        return list_non_finite(
            {name: bits.view(self._dtypes[name]) for name, (_, bits) in self._staged.items()}
        )

    def run(self) -> None:
        """Write; on a GPU this only starts the writes."""
        for name, (places, bits) in self._staged.items():
            self._live[name].scatter_(0, places, bits)


def _find(places: torch.Tensor, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where places are among others, which are in order and not none; and which are."""
    at = torch.searchsorted(among, places).clamp_(max=among.numel() - 1)
    return at, among.index_select(0, at) == places


def _sort(places: torch.Tensor, bits: torch.Tensor) -> Written:
    places, order = places.sort()
    return places, bits.index_select(0, order)


def overlay(earlier: Written, later: Written) -> Written:
    """Return both, the later bits where both have some; the earlier places are in order."""
    if not earlier[0].numel():
        return later
    at, is_known = _find(later[0], earlier[0])
    is_kept = torch.ones_like(earlier[0], dtype=torch.bool)
    is_kept[at[is_known]] = False
    places, bits = (torch.cat([a[is_kept], b]) for a, b in zip(earlier, later, strict=True))
    return places, bits


def prepare_patch(incoming: Incoming, plan: LoadPlan, device: torch.device) -> tuple[Patch, Proof]:
    """Stage the changes since the served version; raise NoPatch where whole tensors are needed.

    The proof expects the published sums of all tensors."""
    served = get_served(incoming.worker)
    if type(incoming.reader).changes is Reader.changes:
        raise NoPatch("")  # this transport sends whole tensors
    if served is None:
        raise NoPatch("it is not known which version is served")
    if incoming.draft is not None or incoming.scales is not None:
        raise NoPatch("a draft model or scales of a KV cache change too")
    elements = {n: torch.Size(h.shape).numel() for n, h in incoming.headers.items()}
    patch = Patch(plan, incoming.model, elements)
    most = sum(elements.values()) // MOST_CHANGED
    changes = incoming.reader.changes(incoming.offer, served.identity, most)
    assert changes is not None
    if changes.refusal:
        raise NoPatch(changes.refusal)
    proof = Proof(incoming.model, incoming.reader.sums(incoming.offer))
    no_data = (
        (name, torch.empty(header.shape, dtype=DTYPES[header.dtype], device="meta"))
        for name, header in incoming.headers.items()
    )
    for name, _ in proof.collect(no_data):
        if name not in proof.by_sum and proof.target_of(name) is not None:
            raise NoPatch(f"{name} cannot be verified by a published sum")
    proof.finish_collecting()
    # Steps count from the old bits. Sums tell whether somebody changed these since the last swap.
    if proof.measure(incoming.model) != served.fingerprints:
        raise NoPatch("the served parameters are not as they were after the last swap")
    _refuse_without_memory(changes, device)
    for step in changes.steps:
        incoming.check_wanted()
        try:
            patch.add(step, device)
        except WeightsError as error:
            raise NoPatch(error.message) from error
    patch.warm_up()
    return patch, proof


def _refuse_without_memory(changes: Changes, device: torch.device) -> None:
    needed = sum(change.count * (_PLACE_BYTES + change.element_bytes) for change in changes)
    counts = [change.count for change in changes]
    needed += min(sum(counts), max(_UNPACKED, *counts, 0)) * _SCRATCH_BYTES
    free = memory.read_device_memory(device, needed)
    if not free.holds(needed):
        raise NoPatch(f"a patch needs {needed / 1e9:.2f} GB, but {free}")
