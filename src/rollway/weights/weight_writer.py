"""Write safetensors files from tensors as they come: their bytes are copied once, into the file.

    [ size │ header, padded with spaces │ tensor │ tensor │ … │ tensors of odd sizes ]

The header names all tensors, so it is written last, into the space that was left for it. Tensors
must follow each other without gaps and begin at a multiple of their element size. So those that do
not end at a multiple of eight bytes come last, in the order of their element sizes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.device_copies import HostCopier, copy_to_host
from rollway.weights.digest.checksums import dtype_name, start_word_sum, word_sum

HEADER_BYTES = 256 << 10
"""Space for the size and the header of a file; another file begins where it does not suffice."""
_LONGEST_NUMBERS = 96  # what an entry of the header has beside its name and its shape, at most
_WORD = 8


class WeightFileWriter:
    """Writes one file. Bytes are in the file when `close` has returned."""

    def __init__(self, path: Path, copier: HostCopier) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._copier = copier
        self._header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = 64
        self._end = 0
        self._odd: list[tuple[str, Tensor]] = []
        self.nbytes = 0
        """The bytes of all tensors so far."""
        self.sums: dict[str, int | Tensor] = {}
        """The word sum of each tensor; those of a GPU are still there."""

    def has_room(self, name: str, tensor: Tensor, most: int) -> bool:
        """Tell whether the tensor fits the header, and the file then has no more than `most`
        bytes."""
        header = self._header_bytes + _measure_entry(name, tensor)
        return not self.sums or (header < HEADER_BYTES and self.nbytes + tensor.nbytes <= most)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; the caller may change it afterwards."""
        self._header_bytes += _measure_entry(name, tensor)
        self.nbytes += tensor.nbytes
        self.sums[name] = start_word_sum(tensor) if tensor.is_cuda else word_sum(tensor)
        if tensor.nbytes % _WORD:
            (host,) = copy_to_host([tensor.detach()])
            self._odd.append((name, host if tensor.is_cuda else host.clone()))
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Write the rest and the header."""
        try:
            for name, tensor in sorted(self._odd, key=lambda item: -item[1].element_size()):
                self._write(name, tensor)
            self._copier.finish()
            room = HEADER_BYTES - _WORD
            header = json.dumps(self._header, separators=(",", ":")).encode().ljust(room)
            if len(header) > room:  # one tensor with a very long name
                raise UsageError(f"The names in {self._path.name} are too long for its header.")
            self._write_at(0, np.frombuffer(room.to_bytes(8, "little") + header, np.uint8))
        finally:
            os.close(self._file)

    def abandon(self) -> None:
        """Close a file that is not complete."""
        self._copier.close()
        os.close(self._file)

    def _write(self, name: str, tensor: Tensor) -> None:
        start = self._end
        self._end += tensor.nbytes
        self._header[name] = {
            "dtype": dtype_name(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, self._end],
        }
        self._copier.send(tensor, lambda at, data: self._write_at(HEADER_BYTES + start + at, data))

    def _write_at(self, at: int, data: NDArray[np.uint8]) -> None:
        view: memoryview = data.data
        while len(view):
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written


def _measure_entry(name: str, tensor: Tensor) -> int:
    return len(json.dumps(name)) + 22 * len(tensor.shape) + _LONGEST_NUMBERS
