"""What is in a directory of weights: a checkpoint, or the shards of a trainer's ranks.

Tensors whose names differ only in numbers (layers, experts) and that are alike are one group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import read_headers
from rollway.weights.untrusted import parse_json, read_plain, reason
from rollway.weights.weight_file import Stored, stored_tensors

_RANK = re.compile(r"rank(\d+)\.safetensors")
_MOST_POSITION = 64 << 20
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$|(?<=bias)\d+$")


@dataclass(slots=True)
class Group:
    """Tensors of one kind."""

    name: str
    """With `*` for numbers."""
    dtype: str
    shape: tuple[int, ...]
    tensors: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Inventory:
    """The tensors of a checkpoint, or of one rank."""

    title: str
    tensors: dict[str, Stored]
    position: dict[str, Any] = field(default_factory=dict)
    """Of a rank, from the file beside its shard."""

    @property
    def bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    def groups(self) -> list[Group]:
        found: dict[tuple[str, str, tuple[int, ...]], Group] = {}
        for name, tensor in self.tensors.items():
            key = _NUMBER.sub("*", name), tensor.dtype, tensor.shape
            group = found.setdefault(key, Group(*key))
            group.tensors += 1
            group.bytes += tensor.size
        return list(found.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "position": self.position,
            "tensors": len(self.tensors),
            "bytes": self.bytes,
            "dtypes": sorted({tensor.dtype for tensor in self.tensors.values()}),
            "groups": [
                {
                    "name": group.name,
                    "dtype": group.dtype,
                    "shape": list(group.shape),
                    "tensors": group.tensors,
                    "bytes": group.bytes,
                }
                for group in self.groups()
            ],
        }


def inventories(directory: Path) -> list[Inventory]:
    """One for a checkpoint; one for each rank where a trainer's ranks wrote theirs."""
    if not directory.is_dir():
        raise UsageError(f"There is no directory {directory}.", "Check the path.")
    files = [path for path in directory.iterdir() if _RANK.fullmatch(path.name)]
    ranks = {int(path.stem.removeprefix("rank")): path for path in files}
    if len(files) != len(ranks):
        raise UsageError(f"{directory} has two files of one rank.", "Keep one for each rank.")
    if ranks:
        return [_of_rank(rank, ranks[rank]) for rank in sorted(ranks)]
    tensors: dict[str, Stored] = {}
    for file in sorted({header.file for header in read_headers(directory).values()}):
        tensors |= stored_tensors(directory / file)
    return [Inventory(directory.name, tensors)]


def _of_rank(rank: int, path: Path) -> Inventory:
    beside = path.with_suffix(".json")
    position: dict[str, Any] = {}
    if beside.is_file():
        try:
            position = _position(parse_json(read_plain(beside, _MOST_POSITION)), rank)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{beside} does not describe rank {rank} ({reason(error)}).",
                "Let the trainer write its ranks again.",
            ) from error
    return Inventory(f"rank {rank}", stored_tensors(path), position)


def _position(fields: Any, rank: int) -> dict[str, Any]:
    """Where a rank stands in its groups, from its own file or from that of all ranks."""
    if isinstance(fields, dict) and isinstance(fields.get("ranks"), dict):
        fields = fields["ranks"].get(str(rank))
    position = fields.get("position") if isinstance(fields, dict) else None
    if not isinstance(position, dict):
        raise ValueError("it has no position")
    ranks = {name: number for name, number in position.items() if not _is_size(name)}
    if not all(name.isidentifier() and type(n) is int for name, n in ranks.items()):
        raise ValueError("its position is not made of whole numbers")
    return ranks


def _is_size(name: str) -> bool:
    """Whether a field of a position counts ranks; a `first_layer` is no rank either."""
    return name.endswith("_size") or name == "first_layer"
