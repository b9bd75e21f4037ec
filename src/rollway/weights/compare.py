"""How two checkpoints differ: which tensors, in how many elements, and by how much.

Bytes are compared as they are read, so equal checkpoints need neither memory nor arithmetic; only
a chunk that differs is looked at element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollway.extras import require
from rollway.weights.checkpoint import read_headers
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.weight_file import Stored, stored_tensors

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's name; it has none for BF16, which is the upper half of an F32."""


@dataclass(slots=True)
class Difference:
    """One tensor that is not the same in both."""

    name: str
    elements: int
    """How many differ, by their bytes."""
    of: int
    max_abs: float | None
    """None when the elements are not floats that can be subtracted."""


@dataclass(slots=True)
class Comparison:
    tensors: int = 0
    """In both, with the same dtype and shape."""
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    """Only in the first."""
    extra: list[str] = field(default_factory=list)
    """Only in the second."""
    reshaped: dict[str, list[str]] = field(default_factory=dict)
    """Tensors whose dtype or shape is another."""
    different: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.reshaped or self.different)

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self)}


def compare(first: Path, second: Path) -> Comparison:
    """Compare two checkpoint directories, byte by byte."""
    mine, theirs = _stored(first), _stored(second)
    found = Comparison(
        missing=sorted(mine.keys() - theirs.keys()), extra=sorted(theirs.keys() - mine.keys())
    )
    for name in sorted(mine.keys() & theirs.keys()):
        one, other = mine[name], theirs[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.reshaped[name] = [str(one), str(other)]
            continue
        found.tensors += 1
        found.bytes += one.size
        difference = _difference(name, one, other)
        if difference is not None:
            found.different.append(difference)
    return found


def _stored(directory: Path) -> dict[str, Stored]:
    """By name; the headers are checked on the way."""
    files = sorted({header.file for header in read_headers(directory).values()})
    return {
        name: stored for file in files for name, stored in stored_tensors(directory / file).items()
    }


def _difference(name: str, one: Stored, other: Stored) -> Difference | None:
    size = ELEMENT_BYTES.get(one.dtype, 1)
    count, largest = 0, 0.0
    for mine, theirs in _unequal_chunks(one, other):
        elements, distance = _count(mine, theirs, one.dtype, size)
        count += elements
        largest = max(largest, distance)
    if not count:
        return None
    return Difference(name, count, one.size // size, largest if one.dtype in _FLOATS else None)


def _unequal_chunks(one: Stored, other: Stored) -> Iterator[tuple[bytes, bytes]]:
    for mine, theirs in zip(one.chunks(), other.chunks(), strict=True):
        if mine != theirs:
            yield mine, theirs


def _count(mine: bytes, theirs: bytes, dtype: str, size: int) -> tuple[int, float]:
    """How many elements differ, and by how much at most (0 where one is not a number)."""
    require("numpy")
    import numpy as np

    one, other = (np.frombuffer(data, np.uint8).reshape(-1, size) for data in (mine, theirs))
    rows = np.flatnonzero((one != other).any(axis=1))
    if dtype not in _FLOATS:
        return len(rows), 0.0
    a, b = (np.ascontiguousarray(part[rows]).view(_FLOATS[dtype])[:, 0] for part in (one, other))
    if dtype == "BF16":
        a, b = ((part.astype(np.uint32) << 16).view(np.float32) for part in (a, b))
    with np.errstate(all="ignore"):
        distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    distance = distance[np.isfinite(distance)]
    return len(rows), float(distance.max()) if len(distance) else 0.0
