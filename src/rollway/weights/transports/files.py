"""Weights as checkpoint directories, one for each version: `root/v7` is complete when it appears.

This works wherever the trainer and the workers share a directory, NFS included. The newest versions
stay; older ones are renamed out of sight before they are removed, so that no reader sees half of
one.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import (
    STABLE,
    TensorHeader,
    check_checkpoint,
    publish_checkpoint,
    read_headers,
)
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Publisher, Reader, Source, inspect_source, never
from rollway.weights.transports.versions import check_next, check_retention

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 4 << 30
_NAME = re.compile(r"v(\d{1,15})")
_WEIGHT_FILES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"),
    *(".pt", ".pth", ".gguf", ".h5", ".msgpack"),
)


class FilesPublisher(Publisher):
    """Writes versions below `root`, with all files but the weights copied from `model`.

    Example:
        with FilesPublisher(Path("/shared/weights"), model=path) as publisher:
            stack.refit(1, publisher.publish(1, model.named_parameters()))
    """

    transport = "files"

    def __init__(
        self,
        root: Path,
        model: Path,
        *,
        keep_recent: int = 4,
        max_off_policy_steps: int = 1,
        shard_bytes: int = SHARD_BYTES,
        temporary: bool = False,
    ) -> None:
        """Files have at most `shard_bytes`. A `temporary` root is removed when the publisher closes
        or its process ends, however it ends."""
        check_retention(keep_recent, max_off_policy_steps)
        if not (model / "config.json").is_file():
            raise UsageError(
                f"{model} has no config.json.", "Give the directory of the model that is trained."
            )
        self._root, self._model = root, model
        self._keep_recent = keep_recent
        self._shard_bytes = shard_bytes
        self._guard = leftovers.Guard(root) if temporary else None
        root.mkdir(parents=True, exist_ok=True)
        self._clean()

    def publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Write a version, then remove those that are too old."""
        source = inspect_source(tensors)
        check_next(version, max(self.versions(), default=None))
        write = partial(self._write, source.pairs())
        try:
            path = publish_checkpoint(self.path(version), write)
        except OSError as error:
            raise WeightsError(
                f"Version {version} cannot be written to {self._root}: {error.strerror}."
            ) from error
        self._clean()
        checkpoint = check_checkpoint(path, whole=False)
        where = {"path": str(checkpoint.path)}
        return Offer("files", version, checkpoint.identity, checkpoint.nbytes, where)

    def versions(self) -> list[int]:
        """List the versions that can be read now, oldest first."""
        names = [_NAME.fullmatch(path.name) for path in self._root.iterdir()]
        numbers = sorted(int(name[1]) for name in names if name)
        return [number for number in numbers if _exists(self.path(number) / STABLE)]

    def path(self, version: int) -> Path:
        """Return the directory of a version."""
        return self._root / f"v{version}"

    def close(self) -> None:
        """Remove a temporary root; other versions stay."""
        if self._guard is not None:
            self._guard.close()

    def _write(self, tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
        for path in self._model.iterdir():
            if path.is_file() and path.name != STABLE and not path.name.endswith(_WEIGHT_FILES):
                shutil.copy(path, directory)
        save_tensors(directory, tensors, self._shard_bytes)

    def _clean(self) -> None:
        """Remove old versions, and what publishers that died have left half-written."""
        for version in self.versions()[: -self._keep_recent]:
            trash = self._root / leftovers.scratch_name(f"v{version}", leftovers.TRASH)
            try:
                self.path(version).rename(trash)
            except OSError:
                continue  # another publisher was faster
        for path in self._root.glob(".v*"):
            is_abandoned = path.name.endswith(f".{leftovers.PARTIAL}") and leftovers.is_abandoned(
                path.name, _idle_seconds(path)
            )
            if is_abandoned or path.name.endswith(f".{leftovers.TRASH}"):
                shutil.rmtree(path, ignore_errors=True)


class FilesReader(Reader):
    """Reads checkpoint directories."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return read_headers(_find_directory(offer))

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        directory = _find_directory(offer)
        check = partial(check_checkpoint, directory, whole=bool(offer.where.get("whole", True)))
        with ThreadPoolExecutor(1) as pool:
            # Beside reading, since hashing takes about as long.
            verified = pool.submit(check)
            yield from read_tensors(directory)
            checkpoint = verified.result()
        now = check_checkpoint(directory, whole=False)
        if not checkpoint.identity == now.identity == offer.identity:
            raise WeightsError(f"{directory} changed while it was read.", "Write it again.")


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, file by file."""
    from safetensors import safe_open

    for file in sorted({header.file for header in read_headers(directory).values()}):
        with safe_open(str(directory / file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)


def save_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write tensors as they come into files of bounded size, with an index if there are several.

    At most one file's tensors are in memory at a time."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    total = 0
    for number, shard in enumerate(_split_into_shards(tensors, shard_bytes)):
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        try:
            save_file(shard, directory / f"{number}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise WeightsError(f"{directory} cannot be written: {error}.") from error
    # The names contain the number of files, which is known only now.
    count = len(shards)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    for number, file in enumerate(files):
        (directory / f"{number}.safetensors").rename(directory / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    if len(weight_map) != sum(map(len, shards)):
        raise UsageError("A tensor came twice.", "Publish each name once.")
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _split_into_shards(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    import torch

    shard: dict[str, Tensor] = {}
    nbytes = 0
    for name, tensor in tensors:
        if name in shard:
            raise UsageError(f"{name} came twice.", "Publish each name once.")
        if shard and nbytes + tensor.nbytes > shard_bytes:
            yield shard
            shard, nbytes = {}, 0
        # A copy, since a trainer that streams may gather the next tensor into the same memory.
        shard[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        nbytes += tensor.nbytes
    yield shard


def _find_directory(offer: Offer) -> Path:
    path = offer.where.get("path")
    if not isinstance(path, str) or "\0" in path:
        raise WeightsError("An offer of files names no directory.", "Publish the version again.")
    return Path(path)


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # NFS: another machine has just removed it
        return False


def _idle_seconds(directory: Path) -> float:
    """Return the time since anything was written in the directory."""
    try:
        newest = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return 0.0
    return time.time() - newest
