"""How the tensors of a version are packed into messages. Sender and receivers must agree on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rollway.weights.offer import Entry
from rollway.weights.transports.entries import align

_ALIGNMENT = 256
_LARGE = 1 << 20
"""A tensor of this many bytes is sent alone, straight from its own memory."""


def split_into_messages(entries: Iterable[Entry], bucket_bytes: int) -> Iterator[list[Entry]]:
    """Yield the tensors of each message: a large tensor alone, small ones up to a bucket."""
    large = min(_LARGE, bucket_bytes)
    message: list[Entry] = []
    size = 0
    for entry in entries:
        if message and (
            entry.nbytes >= large or size + align(entry.nbytes, _ALIGNMENT) > bucket_bytes
        ):
            yield message
            message, size = [], 0
        if entry.nbytes >= large:
            yield [entry]
        else:
            message.append(entry)
            size += align(entry.nbytes, _ALIGNMENT)
    if message:
        yield message


def place(message: Sequence[Entry]) -> tuple[list[int], int]:
    """Return where the tensors of a message start, and its size."""
    starts: list[int] = []
    end = 0
    for entry in message:
        starts.append(align(end, _ALIGNMENT))
        end = starts[-1] + entry.nbytes
    return starts, end


class DoubleBuffer:
    """Two buffers, used in turn: one is filled while the other is in use."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def get(self, number: int, nbytes: int) -> Tensor:
        """Return that many bytes for the message of this number."""
        buffer = self._buffers[number % 2]
        if buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=buffer.device)
            self._buffers[number % 2] = buffer
        return buffer[:nbytes]
