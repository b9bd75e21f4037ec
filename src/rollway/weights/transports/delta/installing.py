"""Write changes into tensors: verified, and undone if they are wrong.

`apply` leaves a tensor with exactly the new bytes, or as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.changes import pick
from rollway.weights.digest.checksums import (
    DTYPES,
    describe,
    digest,
    dtype_name,
    integers,
    raw_bytes,
)
from rollway.weights.transports.delta.format import Encoded, Header, make_damage_error
from rollway.weights.transports.delta.unpacking import add_bits, decompress, unpack

_FEW_CHANGED = 0.02
"""Up to this share of changed elements, writing only them is faster than copying the tensor."""
State = dict[str, Tensor]


class Contents(Protocol):
    """What a manifest says of a version's tensors."""

    @property
    def version(self) -> int: ...
    @property
    def digests(self) -> Mapping[str, str]: ...


def apply(encoded: Encoded, tensor: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Apply a change to `tensor`, in place or into a copy in `out`.

    Returns the flat positions that were written, or None if that is all of them. If the result
    does not match the header's digest, the old values are restored, and the error says whether
    the base was wrong or the change is damaged."""
    header = encoded.header
    target = tensor if out is None else out
    for candidate in (tensor, target):
        _check_kind(header, candidate)
    if not target.is_contiguous():
        contiguous = target.contiguous()
        written = apply(encoded, tensor, contiguous)
        target.detach().copy_(contiguous)
        return written
    if header.places == "whole":
        _apply_whole(encoded, target)
        return None
    if target is not tensor:
        target.detach().copy_(tensor)
    return _apply_change(encoded, tensor, integers(target))[0]


def patch(encoded: Encoded, tensor: Tensor) -> Callable[[], object]:
    """Apply a change in place to a contiguous tensor; return a function that undoes it.

    The cost is that of the changed elements, and of one look at all for the digest."""
    _check_kind(encoded.header, tensor)
    bits = integers(tensor)
    if encoded.header.places == "whole":
        before = bits.clone()
        _apply_whole(encoded, tensor)
        return lambda: bits.copy_(before)
    positions, old = _apply_change(encoded, tensor, bits)
    return lambda: _write(bits, positions, old)


def _check_kind(header: Header, tensor: Tensor) -> None:
    if (dtype_name(tensor), tuple(tensor.shape)) != (header.dtype, header.shape):
        raise WeightsError(
            f"A change of {header.name} is for {header.dtype}{list(header.shape)}, "
            f"the tensor is {describe(tensor)}."
        )


def read_elements(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return the bits of the elements at flat positions."""
    return _pick(integers(tensor), positions)


def write_elements(tensor: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Write the bits of the elements at flat positions of a contiguous tensor."""
    _write(integers(tensor), positions, bits)


def empty(header: Header) -> Tensor:
    """Return an uninitialised CPU tensor for a whole change."""
    return torch.empty(header.shape, dtype=DTYPES[header.dtype])


def _apply_whole(encoded: Encoded, target: Tensor) -> None:
    raw_bytes(target).copy_(decompress(encoded).values)


def _apply_change(encoded: Encoded, base: Tensor, bits: Tensor) -> tuple[Tensor | None, Tensor]:
    """Write the changed elements; return their positions, and the bits that they had."""
    header = encoded.header
    positions, values, relative = unpack(decompress(encoded), bits.device)
    old = bits.clone() if positions is None else _pick(bits, positions)
    if header.places != "none":
        _write(bits, positions, add_bits(old, values) if relative else values)
    is_right = False
    try:
        is_right = digest(bits) == header.digest
    finally:  # also when the digest itself failed, as for lack of memory
        if not is_right:
            _write(bits, positions, old)
    if is_right:
        return positions, old
    if digest(base) != header.before:
        raise WeightsError(
            f"{header.name} is not of version {header.base}, which the change applies to.",
            "Apply the versions in order, or start from a snapshot.",
        )
    raise make_damage_error(f"{header.name} does not match its checksum after the change.")


def _write(bits: Tensor, positions: Tensor | None, values: Tensor) -> None:
    if positions is None:
        bits.copy_(values)
    elif bits.device.type == "cpu":
        # numpy, because torch's threads wait for each other when cores are busy.
        bits.numpy()[positions.numpy()] = values.numpy()
    else:
        bits.scatter_(0, positions, values)


def _pick(bits: Tensor, positions: Tensor) -> Tensor:
    if bits.device.type == "cpu":
        return torch.from_numpy(bits.numpy().take(positions.numpy()))
    return pick(bits, positions)


@dataclass(slots=True)
class StagedVersion:
    """New weights that are verified and not served yet."""

    state: State
    tensors: State = field(default_factory=dict)
    """The new value of each tensor that changed."""
    _positions: dict[str, list[Tensor] | None] = field(default_factory=dict)
    """The elements that changed, by step; None if all of them may have."""
    _sparse: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Positions and bits of the tensors in which few elements changed."""

    def apply(self, encoded: Encoded) -> None:
        """Apply the change of one tensor to its staged copy."""
        name = encoded.header.name
        before = self.tensors.get(name, self.state.get(name))
        if before is None:
            if encoded.header.places != "whole":
                raise needs_snapshot(f"There is no {name} to apply a change to.")
            before = empty(encoded.header)
        if name not in self.tensors:
            self.tensors[name] = torch.empty_like(before, memory_format=torch.contiguous_format)
        written = apply(encoded, before, self.tensors[name])
        positions = self._positions.setdefault(name, [])
        if written is None or positions is None:
            self._positions[name] = None
        else:
            positions.append(written)

    def finish(self, version: Contents) -> None:
        """Verify the tensors that no step changed, and prepare `install`."""
        check_unchanged(self.state, version, self.tensors)
        for name, positions in self._positions.items():
            tensor = self.tensors[name]
            if positions is not None and sum(map(len, positions)) <= _FEW_CHANGED * tensor.numel():
                self._sparse[name] = [(at, read_elements(tensor, at)) for at in positions]

    def install(self) -> None:
        """Write the changes into the held tensors; only this needs a pause."""
        for name, tensor in self.tensors.items():
            live = self.state.get(name)
            if live is None:
                self.state[name] = tensor
            elif name in self._sparse and live.is_contiguous():
                for positions, bits in self._sparse[name]:
                    write_elements(live, positions, bits)
            else:
                live.detach().copy_(tensor)


def check_unchanged(state: State, version: Contents, changed: Container[str]) -> None:
    """Verify the tensors that no step changed."""
    for name, expected in version.digests.items():
        if name in changed:
            continue
        if name not in state:
            raise needs_snapshot(f"{name} of version {version.version} is in none of its objects.")
        if digest(state[name]) != expected:
            raise needs_snapshot(
                f"{name} does not match its checksum in version {version.version}: "
                "the held tensor is not of the version it is recorded as."
            )


def needs_snapshot(message: str) -> WeightsError:
    hint = "Start from a snapshot: hold no version, and apply the chain to the requested one."
    return WeightsError(message, hint)
