"""Where the bytes of each tensor lie in the safetensors files of a directory, and reading them.

Headers were checked by `rollway.weights.checkpoint` before; here they are followed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollway.errors import UsageError

CHUNK = 16 << 20


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
    """The tensors of one file, by name."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header would be longer than the file")
            fields = json.loads(opened.read(length))
        fields.pop("__metadata__", None)
        return {
            name: Stored(
                file,
                field["dtype"],
                tuple(field["shape"]),
                8 + length + field["data_offsets"][0],
                field["data_offsets"][1] - field["data_offsets"][0],
            )
            for name, field in fields.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(f"{file} is not a safetensors file ({error}).") from error
