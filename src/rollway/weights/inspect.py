"""Look into weight directories: list their tensors, and compare two checkpoints.

This is behind `rollway weights inspect` and `rollway weights diff`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import UsageError, require
from rollway.weights.checkpoint import read_tensors
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.untrusted import (
    StoredTensor,
    explain,
    parse_json,
    read_plain,
    read_weight_file,
)

_RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
_MAX_POSITION = 64 << 20
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$|(?<=bias)\d+$")
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's dtype names. numpy has no BF16; it is the upper half of an F32."""


@dataclass(slots=True)
class Group:
    """Tensors that have the same dtype and shape, and the same name except for numbers."""

    name: str  # The common name, with `*` for layer and expert numbers
    dtype: str
    shape: tuple[int, ...]
    tensors: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Inventory:
    """The tensors of a checkpoint, or of one rank of a trainer."""

    title: str
    tensors: dict[str, StoredTensor]
    position: dict[str, Any] = field(default_factory=dict)
    """The rank's position in its parallel groups, from the JSON file beside its tensors."""

    @property
    def bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    def groups(self) -> list[Group]:
        groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        for name, tensor in self.tensors.items():
            key = _NUMBER.sub("*", name), tensor.dtype, tensor.shape
            group = groups.setdefault(key, Group(*key))
            group.tensors += 1
            group.bytes += tensor.size
        return list(groups.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "position": self.position,
            "tensors": len(self.tensors),
            "bytes": self.bytes,
            "dtypes": sorted({tensor.dtype for tensor in self.tensors.values()}),
            "groups": [{**asdict(group), "shape": list(group.shape)} for group in self.groups()],
        }


@dataclass(slots=True)
class Difference:
    """A tensor whose bytes differ between two checkpoints."""

    name: str
    elements: int  # How many elements have different bytes
    of: int  # How many elements the tensor has
    max_abs: float | None  # The largest difference; None if the elements are not floats


@dataclass(slots=True)
class Comparison:
    """The result of `compare`."""

    tensors: int = 0  # Tensors with equal dtype and shape in both checkpoints
    bytes: int = 0
    missing: list[str] = field(default_factory=list)  # Tensors only in the first checkpoint
    extra: list[str] = field(default_factory=list)  # Tensors only in the second checkpoint
    reshaped: dict[str, list[str]] = field(default_factory=dict)
    """Tensors with another dtype or shape."""
    different: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.reshaped or self.different)

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self)}


def list_inventories(directory: Path) -> list[Inventory]:
    """Return one inventory for a checkpoint, or one per rank for files of a trainer's ranks."""
    if not directory.is_dir():
        raise UsageError(f"There is no directory {directory}.", "Check the path.")
    files = [path for path in directory.iterdir() if _RANK_FILE.fullmatch(path.name)]
    ranks = {int(path.stem.removeprefix("rank")): path for path in files}
    if len(files) != len(ranks):  # rank1 and rank01
        raise UsageError(f"{directory} has two files of one rank.", "Keep one for each rank.")
    if ranks:
        return [_read_rank(rank, ranks[rank]) for rank in sorted(ranks)]
    return [Inventory(directory.name, read_tensors(directory))]


def compare(first: Path, second: Path) -> Comparison:
    """Compare two checkpoint directories byte by byte.

    Bytes are compared while they are read, so equal checkpoints need no arithmetic and little
    memory; only chunks that differ are compared by element."""
    mine, theirs = read_tensors(first), read_tensors(second)
    comparison = Comparison(
        missing=sorted(mine.keys() - theirs.keys()), extra=sorted(theirs.keys() - mine.keys())
    )
    for name in sorted(mine.keys() & theirs.keys()):
        old, new = mine[name], theirs[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            comparison.reshaped[name] = [str(old), str(new)]
            continue
        comparison.tensors += 1
        comparison.bytes += old.size
        difference = _compare_tensors(name, old, new)
        if difference is not None:
            comparison.different.append(difference)
    return comparison


def _read_rank(rank: int, path: Path) -> Inventory:
    sidecar = path.with_suffix(".json")
    position: dict[str, Any] = {}
    if sidecar.is_file():
        with explain(f"{sidecar} does not describe rank {rank}", "Let the trainer write it again."):
            position = _find_position(parse_json(read_plain(sidecar, _MAX_POSITION)), rank)
    return Inventory(f"rank {rank}", read_weight_file(path), position)


def _find_position(fields: Any, rank: int) -> dict[str, Any]:
    """Return a rank's position from its own file, or from a file that describes all ranks."""
    if isinstance(fields, dict) and isinstance(fields.get("ranks"), dict):
        fields = fields["ranks"].get(str(rank))
    position = fields.get("position") if isinstance(fields, dict) else None
    if not isinstance(position, dict):
        raise ValueError("it has no position")
    ranks = {
        name: number
        for name, number in position.items()
        if not name.endswith("_size") and name != "first_layer"  # the rest are rank numbers
    }
    if not all(name.isidentifier() and type(n) is int for name, n in ranks.items()):
        raise ValueError("its position is not made of whole numbers")
    return ranks


def _compare_tensors(name: str, old: StoredTensor, new: StoredTensor) -> Difference | None:
    size = ELEMENT_BYTES.get(old.dtype, 1)
    count, largest = 0, 0.0
    for mine, theirs in zip(old.chunks(), new.chunks(), strict=True):
        if mine != theirs:
            elements, distance = _compare_chunks(mine, theirs, old.dtype, size)
            count += elements
            largest = max(largest, distance)
    if not count:
        return None
    return Difference(name, count, old.size // size, largest if old.dtype in _FLOATS else None)


def _compare_chunks(mine: bytes, theirs: bytes, dtype: str, size: int) -> tuple[int, float]:
    """Return how many elements differ, and the largest finite difference."""
    require("numpy")
    import numpy as np

    old, new = (np.frombuffer(data, np.uint8).reshape(-1, size) for data in (mine, theirs))
    rows = np.flatnonzero((old != new).any(axis=1))
    if dtype not in _FLOATS:
        return len(rows), 0.0
    a, b = (np.ascontiguousarray(part[rows]).view(_FLOATS[dtype])[:, 0] for part in (old, new))
    if dtype == "BF16":
        a, b = ((part.astype(np.uint32) << 16).view(np.float32) for part in (a, b))
    with np.errstate(all="ignore"):
        distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    distance = distance[np.isfinite(distance)]
    return len(rows), float(distance.max()) if len(distance) else 0.0
