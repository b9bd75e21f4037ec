"""Read the pickles that other trainers put on the wire, without letting them run code.

verl and prime-rl pickle the lists of their tensors. Such a list may name torch's dtypes and
`torch.Size`, and otherwise consists of plain values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import DTYPES

_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()
} | {("torch", "Size"): torch.Size}


class _PlainUnpickler(pickle._Unpickler):
    """An unpickler that accepts only the allowed names.

    It extends the implementation in Python: a few bytes can make the one in C allocate
    gigabytes."""

    def __init__(self, raw: bytes, sender: str, more: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._sender, self._allowed = sender, {**_ALLOWED, **more}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise WeightsError(
                f"A message of {self._sender}'s names {module}.{name}, which is not allowed."
            )
        return self._allowed[module, name]


def read_pickle(raw: bytes, sender: str, more: Mapping[tuple[str, str], Any] | None = None) -> Any:
    """Return the plain values, shapes and dtypes of a pickle.

    `more` adds allowed objects, by module and name."""
    try:
        return _PlainUnpickler(raw, sender, more or {}).load()
    except WeightsError:
        raise
    except Exception as error:  # an invalid pickle fails in many ways
        raise WeightsError(f"A message of {sender}'s cannot be read: {error}.") from error
