"""Read what another program wrote: plain files of limited size, strict JSON, safetensors, pickles.

A checkpoint or a list of tensors may come from anywhere. A FIFO in place of a file would
block the reader, a device would fill the memory, and deeply nested JSON would raise an error that
no caller expects. The functions here raise `OSError` or `ValueError`, which the callers turn into
errors for the user; `read_weight_file` raises `UsageError` itself, `read_pickle` `WeightsError`.
"""

from __future__ import annotations

import errno
import functools
import io
import json
import math
import os
import pickle
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.errors import UsageError, WeightsError
from rollway.weights.layout import ELEMENT_BYTES

MAX_NAME = 4096  # Characters in the name of a tensor
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 53
HALF_WRITTEN = "Wait until its writer is done; if the writer died, write it again."
_MAX_FILE_NAME = 255
_MAX_HEADER = 100_000_000  # Bytes; safetensors has the same limit
_ELEMENT_BITS = {
    **{name: 8 * size for name, size in ELEMENT_BYTES.items()},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64},
}
"""Every dtype that safetensors reads; Rollway's own transports carry only some of them."""


@contextmanager
def open_plain(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a plain file for reading and yield its descriptor; refuse everything else at once."""
    # O_NONBLOCK: opening a FIFO would wait for a writer before its type can be checked.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "It is not a plain file", str(path))
        yield handle
    finally:
        os.close(handle)


def read_plain(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Read a plain file of at most `most` bytes."""
    with (
        open_plain(path, follow=follow) as handle,
        os.fdopen(handle, "rb", closefd=False) as file,
    ):
        size = os.fstat(handle).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"It has {size} bytes, more than {most}", str(path))
        return file.read(size)


def parse_json(raw: str | bytes, *, unique: bool = True) -> Any:
    """Parse JSON text. With `unique`, refuse an object that has a key twice."""
    try:
        return json.loads(raw, object_pairs_hook=_check_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_file_name(name: object) -> str:
    """Return `name` if it is a plain file name and not a path."""
    if not isinstance(name, str) or not is_file_name(name):
        raise ValueError(f"{_show(name)} is not a plain file name")
    return name


def is_file_name(name: str, prefix: str = "") -> bool:
    """Return whether `name` is a plain file name, not a path, and begins with `prefix`."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()  # no NUL, no line end, no half of a surrogate pair
        and len(name.encode()) <= _MAX_FILE_NAME
        and name.startswith(prefix)
    )


def check_tensor_name(name: object) -> str:
    """Return `name` if it can be the name of a tensor."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{_show(name)} cannot be the name of a tensor")
    return name


def check_shape(shape: object) -> tuple[int, ...]:
    """Return `shape` as a tuple if a tensor can have it."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise ValueError(f"{_show(shape)} is not a shape of at most {MAX_DIMS} dimensions")
    spread = 1  # zeros are left out: strides are products of the other dimensions alone
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            raise ValueError(f"{_show(size)} is not a size of a dimension")
        spread *= max(size, 1)
    if spread > MAX_ELEMENTS:
        raise ValueError(f"a tensor cannot have the shape {_show(shape)}")
    return tuple(shape)


@contextmanager
def explain(what: str, fix: str) -> Iterator[None]:
    """Turn errors of reading into a `UsageError` that says `what` is wrong, and the reason."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} ({reason(error)}).", fix) from error


def reason(error: OSError | ValueError) -> str:
    """Return why a file could not be read, as a short text for a message."""
    return (getattr(error, "strerror", None) or str(error))[:300]


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"it has {_show(twice)} twice")
    return fields


def _show(value: object) -> str:
    """Return `value` as short printable text for a message."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # an integer of more than 4,300 digits has no text
        text = type(value).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."


# --- safetensors files -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its dtype and shape, and where its bytes are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # Offset of its first byte in the file
    size: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def read_weight_file(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name.

    Raises `UsageError` if the file is not exactly as long as its tensors, or its header is wrong.
    """
    with explain(f"{file} is not a whole weight file", HALF_WRITTEN):
        with open_plain(file) as handle:
            size = os.fstat(handle).st_size
            header = _read_header(handle, size)
        tensors = _read_tensors(file, header, size)
        _check_contiguous(tensors, 8 + len(header), size)
    return tensors


def _read_header(handle: int, size: int) -> bytes:
    prefix = os.pread(handle, 8, 0)
    if len(prefix) < 8:
        raise ValueError(f"it has {size} bytes and no header")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, _MAX_HEADER):
        raise ValueError(
            f"its header would have {length} bytes; the file has {size}, a header at most "
            f"{_MAX_HEADER}"
        )
    header = os.pread(handle, length, 8)
    if len(header) < length:
        raise ValueError("it became shorter while it was read")
    return header


def _read_tensors(file: Path, header: bytes, size: int) -> dict[str, StoredTensor]:
    fields = parse_json(header)
    if not isinstance(fields, dict):
        raise ValueError("its header is not a JSON object")
    metadata = fields.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not a mapping of strings")
    return {
        check_tensor_name(name): _read_entry(file, 8 + len(header), size, name, field)
        for name, field in fields.items()
    }


def _read_entry(file: Path, data: int, file_size: int, name: str, field: Any) -> StoredTensor:
    """Return one tensor of a header if its offsets, dtype and shape fit each other and the file."""
    if not isinstance(field, dict) or not {"dtype", "shape", "data_offsets"} <= field.keys():
        raise ValueError(f"{name} has no dtype, shape or data_offsets")
    dtype, offsets = field["dtype"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BITS:
        raise ValueError(f"{name} has an unknown dtype")
    shape = check_shape(field["shape"])
    if not isinstance(offsets, list) or [type(at) for at in offsets] != [int, int]:
        raise ValueError(f"{name} has data_offsets that are not two whole numbers")
    start, stop = offsets
    if not 0 <= start <= stop <= file_size - data:
        raise ValueError(f"{name} is outside the file, or ends before it begins")
    bits = math.prod(shape) * _ELEMENT_BITS[dtype]
    if 8 * (stop - start) != bits:
        raise ValueError(f"{name} has {stop - start} bytes instead of {bits / 8:g}")
    return StoredTensor(file, dtype, shape, data + start, stop - start)


def _check_contiguous(tensors: dict[str, StoredTensor], data: int, size: int) -> None:
    """Raise unless every byte belongs to exactly one tensor.

    safetensors never writes gaps or overlaps, and other readers disagree about their meaning."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != end:
            raise ValueError(f"{name} overlaps another tensor, or follows a gap")
        end += tensor.size
    if end != size:
        raise ValueError(f"it has {size} bytes instead of {end}")


# --- pickles -----------------------------------------------------------------------------------


class _PlainUnpickler(pickle._Unpickler):
    """An unpickler that accepts only the allowed names.

    It extends the implementation in Python: a few bytes can make the one in C allocate
    gigabytes."""

    def __init__(self, raw: bytes, sender: str, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._sender, self._allowed = sender, allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise WeightsError(
                f"A message of {self._sender}'s names {module}.{name}, which is not allowed."
            )
        return self._allowed[module, name]


def read_pickle(raw: bytes, sender: str, more: Mapping[tuple[str, str], Any] | None = None) -> Any:
    """Return the plain values, shapes and dtypes of a pickle, without letting it run code.

    verl and prime-rl pickle the lists of their tensors. Such a list may name torch's dtypes and
    `torch.Size`, and otherwise consists of plain values. `more` adds allowed objects, by module
    and name."""
    try:
        return _PlainUnpickler(raw, sender, {**_list_torch_names(), **(more or {})}).load()
    except WeightsError:
        raise
    except Exception as error:  # an invalid pickle fails in many ways
        raise WeightsError(f"A message of {sender}'s cannot be read: {error}.") from error


@functools.cache
def _list_torch_names() -> dict[tuple[str, str], Any]:
    # Imported here, because only messages of trainers need torch.
    import torch

    from rollway.weights.digest.checksums import DTYPES

    dtypes = {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()}
    return {**dtypes, ("torch", "Size"): torch.Size}
