"""What changed in a tensor, packed: where, and to which bits.

    old ─┐                                 ┌─ places: gaps │ bitmap │ all of them
         ├─ compare words ─> positions ────┤                                       ─> zstd
    new ─┘                                 └─ values: the new bits │ steps from the old ones

Elements are compared as integers, so a NaN equals itself and -0.0 is not 0.0. From a GPU only what
is packed comes to the host. A header carries the digests of the tensor before and after, and
`apply` leaves a tensor either with exactly the new bytes or as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.changes import ESCAPE, pick
from rollway.weights.digest.bits import (
    DTYPES,
    describe,
    digest,
    digests,
    dtype_name,
    integers,
    raw_bytes,
)
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.packing import Packed, Places, pack, pack_all
from rollway.weights.untrusted import check_shape

Buffer = bytes | bytearray | memoryview
_MAGIC = b"RWD1"
_PREFIX_BYTES = 8
_MOST_HEADER_BYTES = 1 << 16
MOST_OVERHEAD = _PREFIX_BYTES + _MOST_HEADER_BYTES + 1
"""Bytes that a packed change may be longer than the tensor; it is sent whole when it is not
shorter."""
_DAMAGED = "It was damaged on its way, or is still being written; read it again."

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Given = tuple[str, Tensor | None, Tensor, str | None]
"""A name, the old tensor if there is one, the new one, and the digest of the old if it is known."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver knows before it touches a tensor."""

    name: Annotated[str, msgspec.Meta(max_length=4096)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    version: Count
    base: Count | None
    """The version this applies to; None when it stands alone."""
    before: Digest | None
    digest: Digest
    places: Places
    values: Literal["new", "steps"]
    count: Count
    """Of changed elements."""
    places_bytes: Count
    values_bytes: Count

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor's change, ready to be written."""

    header: Header
    places: Buffer = b""
    values: Buffer = b""

    def parts(self) -> list[Buffer]:
        """The bytes, in pieces, so that large ones are not copied."""
        header = msgspec.msgpack.encode(self.header)
        if len(header) > _MOST_HEADER_BYTES:
            raise UsageError(f"The name or shape of {self.header.name[:80]!r} is too long.")
        return [_MAGIC + len(header).to_bytes(4, "little") + header, self.places, self.values]

    def to_bytes(self) -> bytes:
        return b"".join(self.parts())


def encode(
    name: str,
    old: Tensor | None,
    new: Tensor,
    *,
    version: int = 1,
    base: int = 0,
    before: str | None = None,
) -> Encoded:
    """Pack what turns `old` into `new`, or the whole of `new` when there is no `old`.

    `before` is the digest of `old`, where the caller knows it: that saves a look at every byte."""
    return encode_all([(name, old, new, before)], version=version, base=base)[0]


def encode_all(given: Sequence[Given], *, version: int = 1, base: int = 0) -> list[Encoded]:
    """What `encode` makes of each of some tensors of one device. A GPU is asked for many of them
    at a time: to wait for each would take longer than to compare it."""
    for name, old, new, _ in given:
        _check_kinds(name, old, new)
    packed = _packed([(old, new) for _, old, new, _ in given])
    befores = _digests(
        [None if each is None else old for (_, old, _, _), each in zip(given, packed, strict=True)],
        [before for *_, before in given],
    )
    unchanged = [each is not None and each.places == "none" for each in packed]
    afters = _digests(
        [None if same else new for (_, _, new, _), same in zip(given, unchanged, strict=True)],
        [each.digest if each else None for each in packed],
    )
    return [
        _whole(name, new, version, after)
        if each is None
        else _changed(name, new, version, base, each, before, after)
        for (name, _, new, _), each, before, after in zip(
            given, packed, befores, afters, strict=True
        )
    ]


def _check_kinds(name: str, old: Tensor | None, new: Tensor) -> None:
    dtype_name(new)
    if old is not None and (old.dtype, old.shape, old.device) != (new.dtype, new.shape, new.device):
        raise UsageError(
            f"{name} was {describe(old)} and is {describe(new)}; only values may change.",
            "Publish a tensor that is of another kind as a new one.",
        )


def _packed(pairs: Sequence[tuple[Tensor | None, Tensor]]) -> list[Packed | None]:
    """Of each, what changed; None where the whole of it is shorter, or nothing came before."""
    as_bits = [(integers(old), integers(new)) for old, new in pairs if old is not None]
    made = iter(pack_all(as_bits) if _on_gpu(as_bits) else [pack(*each) for each in as_bits])
    found: list[Packed | None] = []
    for old, new in pairs:
        each = None if old is None else next(made)
        if each is not None and len(each.where) + len(each.what) >= max(new.nbytes, 1):
            each = None
        found.append(each)
    return found


def _on_gpu(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return bool(pairs) and bool(pairs[0][0].is_cuda)


def _digests(tensors: Sequence[Tensor | None], known: Sequence[str | None]) -> list[str]:
    """Those that are known, and those of the tensors that are there; of others nothing."""
    missing = [i for i, each in enumerate(tensors) if each is not None and not known[i]]
    found = [each or "" for each in known]
    made = digests([each for i in missing if (each := tensors[i]) is not None])
    for i, each in zip(missing, made, strict=True):
        found[i] = each
    return found


def _changed(
    name: str, new: Tensor, version: int, base: int, packed: Packed, before: str, after: str
) -> Encoded:
    header = Header(
        name=name,
        dtype=dtype_name(new),
        shape=tuple(new.shape),
        version=version,
        base=base,
        before=before,
        digest=before if packed.places == "none" else after,
        places=packed.places,
        values=packed.values,
        count=packed.count,
        places_bytes=len(packed.where),
        values_bytes=len(packed.what),
    )
    return Encoded(header, packed.where, packed.what)


def decode(data: Buffer) -> Encoded:
    """Read what `to_bytes` wrote; the payload is looked at by `apply`, which knows the tensor."""
    view = memoryview(data)
    length = int.from_bytes(view[4:_PREFIX_BYTES], "little")
    if bytes(view[:4]) != _MAGIC or length > min(_MOST_HEADER_BYTES, len(view) - _PREFIX_BYTES):
        raise WeightsError("These bytes are not a packed change of a tensor.", _DAMAGED)
    payload = view[_PREFIX_BYTES + length :]
    try:
        header = msgspec.msgpack.decode(view[_PREFIX_BYTES : _PREFIX_BYTES + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"The header of a change cannot be read ({error}).", _DAMAGED) from error
    _check_header(header, len(payload))
    return Encoded(header, payload[: header.places_bytes], payload[header.places_bytes :])


def apply(encoded: Encoded, tensor: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Bring `tensor` to the new version, in place or as a copy in `out`; `tensor` may be `out`.

    Returns the flat positions that were written, None when those are all. When the result is not
    what the header says, what was written is taken back and the error tells whose fault it is: the
    base was another one, or the change is damaged."""
    header = encoded.header
    target = tensor if out is None else out
    for each in (tensor, target):
        if (dtype_name(each), tuple(each.shape)) != (header.dtype, header.shape):
            raise WeightsError(
                f"A change of {header.name} is for {header.dtype}{list(header.shape)}, "
                f"the tensor is {describe(each)}."
            )
    if not target.is_contiguous():
        packed = target.contiguous()
        written = apply(encoded, tensor, packed)
        target.detach().copy_(packed)
        return written
    if header.places == "whole":
        _take_whole(encoded, target)
        return None
    if target is not tensor:
        target.detach().copy_(tensor)
    return _take_changes(encoded, tensor, integers(target))


def elements(tensor: Tensor, positions: Tensor) -> Tensor:
    """The bits of some elements, by flat position."""
    return pick(integers(tensor), positions)


def write_elements(tensor: Tensor, positions: Tensor, bits: Tensor) -> None:
    """Put them back; the tensor is contiguous."""
    _write(integers(tensor), positions, bits)


def empty(header: Header) -> Tensor:
    """A tensor that a whole one fits in, on the CPU."""
    return torch.empty(header.shape, dtype=DTYPES[header.dtype])


def _unpack_places(header: Header, data: Buffer, device: torch.device) -> Tensor | None:
    """Flat positions, in order; None when they are all."""
    if header.places == "all":
        return None
    if header.places == "none":
        return torch.empty(0, dtype=torch.int64, device=device)
    if header.places == "gaps":
        stream = _decompress(header, data, header.count + header.elements // ESCAPE).to(device)
        ends = stream != ESCAPE
        positions = (stream.long() + ends).cumsum(0)[ends] - 1
    else:
        bits = _decompress(header, data, (header.elements + 7) // 8).to(device)
        lanes = torch.arange(8, dtype=torch.uint8, device=device)
        positions = torch.nonzero((bits.view(-1, 1) >> lanes & 1).view(-1)).view(-1)
    if positions.numel() != header.count or int(positions[-1]) >= header.elements:
        raise WeightsError(f"The positions in a change of {header.name} are wrong.", _DAMAGED)
    return positions


def _unpack_values(encoded: Encoded, old: Tensor) -> Tensor:
    header = encoded.header
    lanes = _decompress(header, encoded.values, header.count * header.element_bytes)
    if lanes.numel() != header.count * header.element_bytes:
        raise WeightsError(f"Values of {header.name} are missing.", _DAMAGED)
    lanes = lanes.to(old.device).view(header.element_bytes, header.count).t().contiguous()
    values = lanes.view(-1).view(old.dtype)
    return values if header.values == "new" else old + _unzigzag(values)


def _unzigzag(values: Tensor) -> Tensor:
    return ((values >> 1) & torch.iinfo(values.dtype).max) ^ -(values & 1)


def _whole(name: str, tensor: Tensor, version: int, known: str) -> Encoded:
    header = Header(
        name=name,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        version=version,
        base=None,
        before=None,
        digest=known,
        places="whole",
        values="new",
        count=tensor.numel(),
        places_bytes=0,
        values_bytes=tensor.nbytes,
    )
    return Encoded(header, b"", memoryview(raw_bytes(tensor).cpu().numpy()))


def _take_whole(encoded: Encoded, target: Tensor) -> None:
    raw = _from_buffer(encoded.values)
    if digest(raw) != encoded.header.digest:
        raise WeightsError(f"{encoded.header.name} does not match its checksum.", _DAMAGED)
    raw_bytes(target).copy_(raw)


def _take_changes(encoded: Encoded, base: Tensor, bits: Tensor) -> Tensor | None:
    header = encoded.header
    positions = _unpack_places(header, encoded.places, bits.device)
    old = bits.clone() if positions is None else pick(bits, positions)
    if header.places != "none":
        _write(bits, positions, _unpack_values(encoded, old))
    right = False
    try:
        right = digest(bits) == header.digest
    finally:
        if not right:
            _write(bits, positions, old)
    if right:
        return positions
    if digest(base) != header.before:
        raise WeightsError(
            f"{header.name} is not of version {header.base}, which the change is made for.",
            "Apply the versions in order, or start from a snapshot.",
        )
    raise WeightsError(f"{header.name} does not match its checksum after the change.", _DAMAGED)


def _write(bits: Tensor, positions: Tensor | None, values: Tensor) -> None:
    if positions is None:
        bits.copy_(values)
    else:
        bits.scatter_(0, positions, values)


def _check_header(header: Header, payload_bytes: int) -> None:
    """See that its numbers fit each other and the bytes that follow."""
    whole = header.places == "whole"
    counts = {
        "none": header.count == 0,
        "whole": header.count == header.elements,
        "all": 0 < header.count == header.elements,
    }
    good = (
        header.dtype in DTYPES
        and _can_be(header.shape)
        and counts.get(header.places, 0 < header.count <= header.elements)
        and header.places_bytes + header.values_bytes == payload_bytes
        and (header.base is None) == (header.before is None) == whole
        and (not whole or header.values_bytes == header.elements * header.element_bytes)
    )
    if not good:
        raise WeightsError("The header of a change contradicts itself.", _DAMAGED)


def _can_be(shape: tuple[int, ...]) -> bool:
    try:
        check_shape(shape)
    except ValueError:
        return False
    return True


def _decompress(header: Header, data: Buffer, at_most: int) -> Tensor:
    """Never more bytes than the tensor can need, whatever the stream claims."""
    import zstandard

    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= at_most:
            raise WeightsError(f"A change of {header.name} has a wrong size inside.", _DAMAGED)
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise WeightsError(
            f"A change of {header.name} cannot be decompressed ({error}).", _DAMAGED
        ) from error
    return _from_buffer(plain)


def _from_buffer(data: Buffer) -> Tensor:
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    writable = data if not memoryview(data).readonly else bytearray(data)  # torch wants to own it
    return torch.frombuffer(writable, dtype=torch.uint8)
