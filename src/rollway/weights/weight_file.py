"""Read the header of a safetensors file, and the bytes of its tensors."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.untrusted import (
    check_shape,
    check_tensor_name,
    open_plain,
    parse_json,
    reason,
)

CHUNK = 16 << 20
HALF_WRITTEN = "Wait until its writer is done; if the writer died, write it again."
_MAX_HEADER = 100_000_000  # Bytes; safetensors has the same limit
_ELEMENT_BITS = {
    **{name: 8 * size for name, size in ELEMENT_BYTES.items()},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64},
}
"""Every dtype that safetensors reads; Rollway's own transports carry only some of them."""


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

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in chunks that end at the end of an element."""
        with open_plain(self.file) as handle, os.fdopen(handle, "rb", closefd=False) as file:
            file.seek(self.start)
            left = self.size
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise UsageError(
                        f"{self.file} ends in the middle of a tensor.", "Write the file again."
                    )
                left -= len(chunk)
                yield chunk


def read_weight_file(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name.

    Raises `UsageError` if the file is not exactly as long as its tensors, or its header is wrong.
    """
    try:
        with open_plain(file) as handle:
            size = os.fstat(handle).st_size
            header = _read_header(handle, size)
        tensors = _read_tensors(file, header, size)
        _check_contiguous(tensors, 8 + len(header), size)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} is not a whole weight file ({reason(error)}).", HALF_WRITTEN
        ) from error
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
