"""Where the bytes of each tensor lie in a safetensors file, by its header, and reading them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES

CHUNK = 16 << 20
HALF_WRITTEN = "It is still being written, or its writer died."


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its first byte in the file."""
    size: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, a few at a time; a chunk ends where an element does."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise UsageError(f"{self.file} ends in the middle of a tensor.")
                left -= len(chunk)
                yield chunk


def stored_tensors(file: Path) -> dict[str, Stored]:
    """The tensors of one file, by name; refused unless the file is exactly as long as they are."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > size:
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            fields = json.loads(opened.read(length))
        fields.pop("__metadata__", None)
        found = {name: _stored(file, 8 + length, field) for name, field in fields.items()}
        for name, one in found.items():
            wanted = math.prod(one.shape) * ELEMENT_BYTES.get(one.dtype, 0)
            if wanted and one.size != wanted:
                raise ValueError(f"{name} has {one.size} bytes instead of {wanted}")
        end = max((one.start + one.size for one in found.values()), default=8 + length)
        if end != size:
            raise ValueError(f"it has {size} bytes instead of {end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(f"{file} is not a whole weight file ({error}).", HALF_WRITTEN) from error
    return found


def _stored(file: Path, data: int, field: Any) -> Stored:
    start, stop = field["data_offsets"]
    return Stored(file, field["dtype"], tuple(field["shape"]), data + start, stop - start)
