"""List the tensors of a checkpoint, or compare two; for developers.

python scripts/inspect_weights.py DIR          one line for each group of equal tensors
python scripts/inspect_weights.py DIR OTHER    what differs; exit status 1 if anything does
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollway.errors import RollwayError
from rollway.weights.checkpoint import read_tensors
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.untrusted import StoredTensor, read_weight_file

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$|(?<=bias)\d+$")
_CHUNK = 16 << 20
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's dtype names. numpy has no BF16; it is the upper half of an F32."""


def list_tensors(directory: Path) -> list[str]:
    """Return a line for each group of tensors of a checkpoint, or of a trainer's ranks."""
    lines = []
    for path in sorted(directory.glob("rank*.safetensors")) or [directory]:
        tensors = read_tensors(path) if path.is_dir() else read_weight_file(path)
        lines.append(
            f"{path.name}: {len(tensors)} tensors, {sum(t.size for t in tensors.values())} B"
        )
        groups = Counter(f"{tensor} {_NUMBER.sub('*', name)}" for name, tensor in tensors.items())
        lines += [f"  {count} x {group}" for group, count in groups.items()]
    return lines


def compare(first: Path, second: Path) -> list[str]:
    """Return a line for each tensor that two checkpoints do not have alike, byte for byte."""
    mine, theirs = read_tensors(first), read_tensors(second)
    lines = [f"only in the first: {name}" for name in sorted(mine.keys() - theirs.keys())]
    lines += [f"only in the second: {name}" for name in sorted(theirs.keys() - mine.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        old, new = mine[name], theirs[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            lines.append(f"{name} is {old}, then {new}")
        elif difference := _compare_tensors(old, new):
            lines.append(f"{name}: {difference}")
    return lines


def _compare_tensors(old: StoredTensor, new: StoredTensor) -> str:
    size = ELEMENT_BYTES.get(old.dtype, 1)
    count, largest = 0, 0.0
    for mine, theirs in zip(_read_chunks(old), _read_chunks(new), strict=True):
        if mine != theirs:
            elements, distance = _compare_chunks(mine, theirs, old.dtype, size)
            count, largest = count + elements, max(largest, distance)
    distance_text = f", by {largest:.6g} at most" if old.dtype in _FLOATS else ""
    return f"{count} of {old.size // size} elements differ{distance_text}" if count else ""


def _read_chunks(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the bytes in chunks that end at the end of an element."""
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        for at in range(0, tensor.size, _CHUNK):
            yield file.read(min(_CHUNK, tensor.size - at))


def _compare_chunks(mine: bytes, theirs: bytes, dtype: str, size: int) -> tuple[int, float]:
    """Return how many elements differ, and the largest finite difference."""
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


def main(paths: list[str]) -> int:
    try:
        if len(paths) == 1:
            print("\n".join(list_tensors(Path(paths[0]))))
            return 0
        lines = compare(*map(Path, paths))
    except (RollwayError, TypeError) as error:
        print(f"{error}\n{__doc__}", file=sys.stderr)
        return 2
    print("\n".join(lines) or "equal, byte for byte")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
