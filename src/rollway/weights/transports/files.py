"""Weights as checkpoint directories, one for each version: `root/v7` is whole when it appears.

Works wherever the trainer and the workers share a directory, NFS included. The newest few stay;
older ones are renamed out of sight before they are removed, so that nobody sees half of one.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import STABLE, check_checkpoint, publish_checkpoint
from rollway.weights.offer import Offer
from rollway.weights.transports.versions import Versions, check_next, check_retention

SHARD_BYTES = 4 << 30
_NAME = re.compile(r"v(\d{1,15})")
_WEIGHT_FILES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"),
    *(".pt", ".pth", ".gguf", ".h5", ".msgpack"),
)

Named = Iterable[tuple[str, Any]]
"""Names and torch tensors; each tensor is copied before the next one is asked for."""


class FilesReader(Versions):
    """The versions in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def versions(self) -> list[int]:
        try:
            found = [_NAME.fullmatch(path.name) for path in self.root.iterdir()]
        except FileNotFoundError:
            return []
        numbers = sorted(int(name[1]) for name in found if name)
        return [number for number in numbers if _is_there(self.path(number) / STABLE)]

    def path(self, version: int) -> Path:
        return self.root / f"v{version}"


class FilesPublisher(FilesReader):
    """Writes versions below `root`, with everything but the weights copied from `model`."""

    def __init__(
        self,
        root: Path,
        model: Path,
        *,
        keep_recent: int = 4,
        max_off_policy_steps: int = 1,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        check_retention(keep_recent, max_off_policy_steps)
        if not (model / "config.json").is_file():
            raise UsageError(
                f"{model} has no config.json.", "Give the directory of the model that is trained."
            )
        super().__init__(root)
        self._model = model
        self._keep_recent = keep_recent
        self._shard_bytes = shard_bytes
        root.mkdir(parents=True, exist_ok=True)
        self._clean()

    def publish(self, version: int, tensors: Named) -> Offer:
        """Write a version, then let go of those that are too old."""
        check_next(version, self.latest())
        try:
            path = publish_checkpoint(self.path(version), partial(self._write, tensors))
        except OSError as error:
            raise WeightsError(
                f"Version {version} cannot be written to {self.root}: {error.strerror}."
            ) from error
        self._clean()
        made = check_checkpoint(path, whole=False)
        return Offer("files", version, made.identity, made.nbytes, {"path": str(made.path)})

    def _write(self, tensors: Named, directory: Path) -> None:
        for path in self._model.iterdir():
            if path.is_file() and path.name != STABLE and not path.name.endswith(_WEIGHT_FILES):
                shutil.copy(path, directory)
        save_tensors(directory, tensors, self._shard_bytes)

    def _clean(self) -> None:
        for version in self.versions()[: -self._keep_recent]:
            trash = self.root / leftovers.scratch_name(f"v{version}", leftovers.TRASH)
            try:
                self.path(version).rename(trash)
            except OSError:
                continue  # somebody else was faster
        for path in self.root.glob(".v*"):
            half = path.name.endswith(f".{leftovers.PARTIAL}") and leftovers.gone(
                path.name, _idle(path)
            )
            if half or path.name.endswith(f".{leftovers.TRASH}"):
                shutil.rmtree(path, ignore_errors=True)


def save_tensors(directory: Path, tensors: Named, shard_bytes: int) -> None:
    """Write tensors as they come, into files of bounded size, with an index when those are many.

    No more than one file's tensors are in memory at a time."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files: list[list[str]] = []
    total = 0
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        files.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        try:
            save_file(shard, directory / f"{number}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk comes as one
            raise WeightsError(f"{directory} cannot be written: {error}.") from error
    names = [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        (directory / f"{number}.safetensors").rename(directory / name)
    held = [name for file in files for name in file]
    if len(set(held)) != len(held):
        raise UsageError("A tensor came twice.", "Publish each name once.")
    if len(files) > 1:
        where = {name: file for file, held in zip(names, files, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(tensors: Named, shard_bytes: int) -> Iterator[dict[str, Any]]:
    import torch

    shard: dict[str, Any] = {}
    held = 0
    for name, tensor in tensors:
        if name in shard:
            raise UsageError(f"{name} came twice.", "Publish each name once.")
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        # A copy, since a trainer that streams may gather the next tensor into the same memory.
        shard[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        held += tensor.nbytes
    if not shard:
        raise UsageError("There are no tensors to publish.")
    yield shard


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # NFS: another machine removed it meanwhile
        return False


def _idle(directory: Path) -> float:
    """Since anything was written in it."""
    try:
        newest = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return 0.0
    return time.time() - newest
