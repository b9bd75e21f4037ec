"""Weights as checkpoint directories, one for each version: `root/v7` is complete when it appears.

This works wherever the trainer and the workers share a directory, NFS included. The newest versions
stay; older ones are renamed out of sight before they are removed, so that no reader sees half of
one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import (
    STABLE,
    TensorHeader,
    check_checkpoint,
    publish_checkpoint,
    read_headers,
    read_word_sums,
)
from rollway.weights.device_copies import HostCopier, copy_to_host
from rollway.weights.digest.checksums import dtype_name, finish_word_sums, start_word_sum, word_sum
from rollway.weights.offer import Offer
from rollway.weights.transports.base import (
    Publisher,
    Reader,
    Source,
    check_next,
    check_retention,
    inspect_source,
    never,
)

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

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Write a version, then remove those that are too old."""
        source = inspect_source(tensors)
        check_next(version, max(self.versions(), default=None))
        sums: dict[str, int] = {}
        write = partial(self._write, source.pairs(), sums)
        try:
            path = publish_checkpoint(self.path(version), write, sums)
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

    def _close(self) -> None:
        """Remove a temporary root; other versions stay."""
        if self._guard is not None:
            self._guard.close()

    def _write(
        self, tensors: Iterable[tuple[str, Tensor]], sums: dict[str, int], directory: Path
    ) -> None:
        for path in self._model.iterdir():
            if path.is_file() and path.name != STABLE and not path.name.endswith(_WEIGHT_FILES):
                shutil.copy(path, directory)
        sums.update(save_tensors(directory, tensors, self._shard_bytes))

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

    def sums(self, offer: Offer) -> Mapping[str, int]:
        """Return the word sums that a `FilesPublisher` recorded, if they are of all tensors."""
        directory = _find_directory(offer)
        sums = read_word_sums(directory)
        return sums if sums.keys() == self.headers(offer).keys() else {}

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        directory, whole = _find_directory(offer), bool(offer.where.get("whole", True))
        identities = {offer.identity}
        sums = self.sums(offer)
        if sums:
            yield from _read_summed(directory, sums, summed)
            now = check_checkpoint(directory, whole=whole, weights=False, needs_config=False)
        else:
            # The weights count here; whoever made the offer has decided whether they need a config.
            check = partial(check_checkpoint, directory, whole=whole, needs_config=False)
            with ThreadPoolExecutor(1) as pool:
                # Beside reading, since hashing takes about as long.
                verified = pool.submit(check)
                yield from read_tensors(directory)
                identities.add(verified.result().identity)
            now = check_checkpoint(directory, whole=False, needs_config=False)
        if identities != {now.identity}:
            raise WeightsError(f"{directory} changed while it was read.", "Write it again.")


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, file by file."""
    from safetensors import safe_open

    for file in sorted({header.file for header in read_headers(directory).values()}):
        with safe_open(str(directory / file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)


def _read_summed(
    directory: Path, sums: Mapping[str, int], summed: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and compare their sums; that is ten times as fast as hashing the files."""
    for name, tensor in read_tensors(directory):
        yield name, tensor
        if not summed(name) and word_sum(tensor) != sums[name]:
            raise WeightsError(
                f"{directory} is corrupt: {name} changed after it was published.",
                "Publish the version again.",
            )


def save_tensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> dict[str, int]:
    """Write tensors as they come into files of bounded size, with an index if there are several.

    Returns the word sum of each tensor. Nothing but a few chunks is held in memory."""
    writers: list[WeightFileWriter] = []
    names: set[str] = set()
    with HostCopier() as copier, ExitStack() as unfinished:
        for name, tensor in tensors:
            if name in names:
                raise UsageError(f"{name} came twice.", "Publish each name once.")
            names.add(name)
            if not writers or not writers[-1].has_room(name, tensor, shard_bytes):
                if writers:
                    unfinished.pop_all()
                    writers[-1].close()
                path = directory / f"{len(writers)}.safetensors"
                writers.append(WeightFileWriter(path, copier))
                unfinished.callback(writers[-1].abandon)
            writers[-1].add(name, tensor)
        unfinished.pop_all()
        writers[-1].close()
    _name_files(directory, writers)
    sums = {name: total for writer in writers for name, total in writer.sums.items()}
    on_gpu = {name: total for name, total in sums.items() if not isinstance(total, int)}
    totals = finish_word_sums(list(on_gpu.values()))
    on_host = {name: total for name, total in sums.items() if isinstance(total, int)}
    return on_host | dict(zip(on_gpu, totals, strict=True))


def _name_files(directory: Path, writers: Sequence[WeightFileWriter]) -> None:
    """Rename the files: their names contain how many there are, which is known only now."""
    count = len(writers)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    for number, file in enumerate(files):
        (directory / f"{number}.safetensors").rename(directory / file)
    if count > 1:
        pairs = zip(files, writers, strict=True)
        weight_map = {name: file for file, writer in pairs for name in writer.sums}
        metadata = {"total_size": sum(writer.nbytes for writer in writers)}
        index = {"metadata": metadata, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


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


HEADER_BYTES = 256 << 10
"""Space for the size and the header of a file; another file begins where it does not suffice."""
_LONGEST_NUMBERS = 96  # what an entry of the header has beside its name and its shape, at most
_WORD = 8


class WeightFileWriter:
    """Writes one file. Bytes are in the file when `close` has returned.

        [ size │ header, padded with spaces │ tensor │ tensor │ … │ tensors of odd sizes ]

    The header names all tensors, so it is written last, into the space that was left for it.
    Tensors must follow each other without gaps and begin at a multiple of their element size. So
    those that do not end at a multiple of eight bytes come last, in the order of their element
    sizes.
    """

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
        """Return whether the tensor fits the header, and the file then has no more than `most`
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
