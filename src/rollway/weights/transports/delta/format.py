"""The bytes of one tensor's change: a header, where elements changed, and to which bits.

Elements are compared as integers: a NaN equals itself, and -0.0 differs from 0.0. Only packed bytes
leave a GPU. The header carries the digests of the tensor before and after the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.device_copies import copy_to_host
from rollway.weights.digest.changes import Changes, Pair, is_majority
from rollway.weights.digest.checksums import (
    DTYPES,
    Checksum,
    describe,
    digests,
    dtype_name,
    integers,
    raw_bytes,
)
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import Count
from rollway.weights.transports.delta.packing import (
    Compression,
    Packed,
    Places,
    Values,
    open_pool,
    pack,
    pack_changes,
    start_packing,
)
from rollway.weights.transports.delta.store import Buffer
from rollway.weights.untrusted import check_shape

_MAGIC = b"RWD1"
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 1 << 16
MAX_OVERHEAD = _PREFIX_BYTES + _MAX_HEADER_BYTES + 1
"""How many bytes a packed change may exceed its tensor by; a longer one is sent whole."""

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Change = tuple[str, Tensor | None, Tensor, str | None]
"""A name, the old tensor if there is one, the new tensor, and the old digest if it is known."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a change, so that a receiver can check it before it touches a tensor."""

    name: Annotated[str, msgspec.Meta(max_length=4096)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    version: Count
    base: Count | None
    """The version that the change applies to; None for a whole tensor."""
    before: Digest | None
    digest: Digest
    places: Places
    values: Values
    count: Count
    """The number of changed elements."""
    places_bytes: Count
    values_bytes: Count
    planes: Count | None = None
    """How many bytes of each value are there, the lower ones; None for all, as in versions of older
    publishers."""
    compression: Compression = "zstd"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def value_planes(self) -> int:
        return self.element_bytes if self.planes is None else self.planes


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor's change, ready to be written."""

    header: Header
    places: Buffer = b""
    values: Buffer = b""
    word_sum: int | None = None
    """The word sum of the new tensor, where the comparison computed it on the way."""

    def parts(self) -> list[Buffer]:
        """Return the bytes in parts, so that large ones are not copied."""
        header = msgspec.msgpack.encode(self.header)
        if len(header) > _MAX_HEADER_BYTES:
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
    compression: Compression = "zstd",
) -> Encoded:
    """Pack the change from `old` to `new`, or all of `new` if there is no `old`.

    `before` is the digest of `old`; passing a known one saves a read of every byte."""
    change = (name, old, new, before)
    return encode_all([change], version=version, base=base, compression=compression)[0]


def encode_all(
    changes: Sequence[Change],
    *,
    version: int = 1,
    base: int = 0,
    compression: Compression = "zstd",
) -> list[Encoded]:
    """Encode the changes of several tensors on one device.

    A GPU handles many tensors per launch: waiting for each would take longer than comparing it."""
    with open_pool() as pool:
        return start_encoding(changes, pool, version, base, compression)()


def start_encoding(
    changes: Sequence[Change],
    pool: ThreadPoolExecutor,
    version: int,
    base: int,
    compression: Compression,
) -> Callable[..., list[Encoded]]:
    """Do the same, but return a function that waits until the changes are compressed.

    Meanwhile the device can compare other tensors. If old and new tensors change before the
    function is called, it needs copies of the new ones by name, for those that are sent whole."""
    for name, old, new, _ in changes:
        check_same_kind(name, old, new)
    as_bits = [(integers(old), integers(new)) for _, old, new, _ in changes if old is not None]
    if _is_on_gpu(as_bits):
        wait = start_packing(as_bits, pool, compression)
    else:
        wait = [pack(*pair, compression) for pair in as_bits].copy
    befores = _complete_digests([(known, old) for _, old, _, known in changes])

    def finish(copies: Mapping[str, Tensor] | None = None) -> list[Encoded]:
        packed = iter(wait())
        rows: list[_Row] = []
        for (name, old, new, _), before in zip(changes, befores, strict=True):
            change = None if old is None else next(packed)
            source = new if copies is None else copies[name]
            rows.append((name, source, None if _is_longer(change, new) else change, before))
        return _encode_rows(rows, version, base)

    return finish


_Row = tuple[str, Tensor, Packed | None, str]
"""A name, the new tensor, its change (None if the tensor is sent whole), and the old digest."""


def _encode_rows(rows: Sequence[_Row], version: int, base: int) -> list[Encoded]:
    known: list[tuple[str | None, Tensor | None]] = []
    for _, tensor, change, before in rows:
        if change is not None and change.places == "none":
            known.append((before, None))  # an unchanged tensor keeps its digest
        else:
            checksum = change.checksum if change is not None else None
            known.append((checksum.digest if checksum is not None else None, tensor))
    whole = iter(copy_to_host([raw_bytes(tensor) for _, tensor, change, _ in rows if not change]))
    encoded = []
    for (name, tensor, change, before), after in zip(rows, _complete_digests(known), strict=True):
        packed = change or _pack_whole(next(whole), tensor)
        encoded.append(_describe(name, tensor, version, base, packed, before, after))
    return encoded


def encode_changes(
    name: str, tensor: Tensor, changes: Changes, checksum: Checksum,
    *, version: int, base: int, before: str, compression: Compression,
) -> Encoded:  # fmt: skip
    """Encode known changes of a tensor in CPU memory, which has them and the checksum already."""
    packed = _pack_whole(raw_bytes(tensor), tensor)
    if not is_majority(changes[0].numel(), tensor.numel()):  # a sample had shown fewer
        change = pack_changes(changes, tensor.numel(), compression)
        packed = packed if _is_longer(change, tensor) else change
    packed = replace(packed, checksum=checksum)
    return _describe(name, tensor, version, base, packed, before, checksum.digest)


def check_same_kind(name: str, old: Tensor | None, new: Tensor) -> None:
    """Raise unless a tensor has the kind that it had before."""
    dtype_name(new)
    if old is not None and _kind(old) != _kind(new):
        raise UsageError(
            f"{name} was {describe(old)} and is {describe(new)}; only values may change.",
            "Publish a tensor of another kind under a new name.",
        )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.device


def _is_longer(change: Packed | None, tensor: Tensor) -> bool:
    """Return whether the whole tensor is shorter than its change."""
    if change is None or change.places == "none":
        return False
    return bool(len(change.place_bytes) + len(change.value_bytes) >= tensor.nbytes)


def _is_on_gpu(pairs: Sequence[Pair]) -> bool:
    return bool(pairs) and bool(pairs[0][0].is_cuda)


def _complete_digests(rows: Sequence[tuple[str | None, Tensor | None]]) -> list[str]:
    """Return known digests, compute those of the tensors, and leave the others empty."""
    unknown = [tensor for known, tensor in rows if tensor is not None and not known]
    computed = iter(digests(unknown))
    return [known or (next(computed) if tensor is not None else "") for known, tensor in rows]


def _pack_whole(raw: Tensor, tensor: Tensor) -> Packed:
    plain = memoryview(raw.numpy())
    return Packed("whole", tensor.numel(), b"", "new", tensor.element_size(), plain, "none")


def _describe(
    name: str, new: Tensor, version: int, base: int, change: Packed, before: str, after: str
) -> Encoded:
    is_whole = change.places == "whole"
    header = Header(
        name=name,
        dtype=dtype_name(new),
        shape=tuple(new.shape),
        version=version,
        base=None if is_whole else base,
        before=None if is_whole else before,
        digest=after,
        places=change.places,
        values=change.values,
        count=change.count,
        places_bytes=len(change.place_bytes),
        values_bytes=len(change.value_bytes),
        planes=change.planes,
        compression=change.compression,
    )
    checksum = change.checksum
    word_sum = checksum.word_sum if checksum is not None else None
    return Encoded(header, change.place_bytes, change.value_bytes, word_sum)


def decode(data: Buffer) -> Encoded:
    """Read what `to_bytes` wrote. The caller knows the tensor, and checks the payload."""
    view = memoryview(data)
    length = int.from_bytes(view[4:_PREFIX_BYTES], "little")
    if bytes(view[:4]) != _MAGIC or length > min(_MAX_HEADER_BYTES, len(view) - _PREFIX_BYTES):
        raise make_damage_error("These bytes are not a packed change of a tensor.")
    payload = view[_PREFIX_BYTES + length :]
    try:
        header = msgspec.msgpack.decode(view[_PREFIX_BYTES : _PREFIX_BYTES + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_damage_error(f"The header of a change cannot be read ({error}).") from error
    _check_header(header, len(payload))
    return Encoded(header, payload[: header.places_bytes], payload[header.places_bytes :])


def make_damage_error(message: str) -> WeightsError:
    """Return an error that asks to read a change again."""
    return WeightsError(message, "It was damaged in transit, or is being written; read it again.")


def needs_snapshot(message: str) -> WeightsError:
    """Return an error of a version that cannot be reached by deltas."""
    hint = "Start from a snapshot: hold no version, and apply the chain to the requested one."
    return WeightsError(message, hint)


def _check_header(header: Header, payload_bytes: int) -> None:
    """Raise unless the header's numbers are consistent with each other and with the payload."""
    is_whole = header.places == "whole"
    counts = {
        "none": header.count == 0,
        "whole": header.count == header.elements,
        "all": 0 < header.count == header.elements,
    }
    try:
        check_shape(header.shape)
    except ValueError:
        is_consistent = False
    else:
        is_consistent = (
            header.dtype in DTYPES
            and counts.get(header.places, 0 < header.count <= header.elements)
            and header.places_bytes + header.values_bytes == payload_bytes
            and (header.base is None) == (header.before is None) == is_whole
            and (not is_whole or header.values_bytes == header.elements * header.element_bytes)
            and (header.places == "none" or 0 < header.value_planes <= header.element_bytes)
        )
    if not is_consistent:
        raise make_damage_error("The header of a change contradicts itself.")
