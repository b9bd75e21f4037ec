"""Place tensors one after another in bytes, view them there, and share the bytes by /dev/shm.

The bytes may be several buckets. An entry's offset counts through all of them as if they were one.
"""

from __future__ import annotations

import mmap
import os
import shutil
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.digest.checksums import DTYPES, dtype_name, raw_bytes
from rollway.weights.offer import MAX_MANIFEST_BYTES, Entry, Manifest, Offer, PlacedBox
from rollway.weights.untrusted import open_plain, read_plain, reason

T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | torch.nn.Module


def name_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Return parameters by name, from (name, tensor) pairs, a mapping or a module."""
    if isinstance(parameters, torch.nn.Module):
        return dict(parameters.named_parameters())
    return dict(parameters)


def align(nbytes: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


def make_entry(
    name: str, tensor: Tensor, offset: int, digest: str = "", boxes: Iterable[PlacedBox] = ()
) -> Entry:
    kind, shape = dtype_name(tensor), tuple(tensor.shape)
    return Entry(name, kind, shape, offset, tensor.nbytes, digest, tuple(boxes))


def set_digests(entries: Sequence[Entry], digests: Sequence[str]) -> list[Entry]:
    pairs = zip(entries, digests, strict=True)
    return [msgspec.structs.replace(entry, digest=digest) for entry, digest in pairs]


def set_sums(entries: Sequence[Entry], sums: Sequence[int]) -> list[Entry]:
    return set_digests(entries, [f"{total:016x}" for total in sums])


def lay_out(
    tensors: Mapping[str, Tensor], alignment: int, start: int = 0
) -> tuple[list[Entry], int]:
    """Place tensors from `start` on; return their entries, and how many bytes they take."""
    entries: list[Entry] = []
    end = start
    for name, tensor in tensors.items():
        entries.append(make_entry(name, tensor, end))
        end += align(tensor.nbytes, alignment)
    return entries, end - start


def split_in_chunks(
    items: Iterable[T], count_bytes: Callable[[T], int], chunk_bytes: int
) -> Iterator[list[T]]:
    """Divide tensors into the chunks of a broadcast, as vLLM does: each ends with the tensor by
    which it exceeds the size."""
    chunk: list[T] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += count_bytes(item)
        if size > chunk_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def join_chunks(tensors: Iterable[Tensor], chunk_bytes: int) -> Iterator[Tensor]:
    """Yield the bytes of each chunk; a tensor that is one alone is viewed, not copied."""
    for chunk in split_in_chunks(tensors, lambda tensor: tensor.nbytes, chunk_bytes):
        parts = [raw_bytes(tensor) for tensor in chunk]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)


def view_entry(memory: Tensor, entry: Entry, start: int = 0) -> Tensor:
    """View a tensor in memory whose first byte has the offset `start`."""
    at = entry.offset - start
    if at % DTYPES[entry.dtype].itemsize:
        raise WeightsError(f"{entry.name} does not begin where an element can.")
    raw = memory[at : at + entry.nbytes]
    if raw.numel() != entry.nbytes:
        raise WeightsError(f"{entry.name} extends past the end of its memory.")
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)


def view_entries(entries: Sequence[Entry], buckets: Sequence[Tensor]) -> list[Tensor]:
    """View tensors in buckets; each tensor must be in one bucket."""
    starts = [0, *accumulate(bucket.numel() for bucket in buckets)][:-1]
    numbers = [bisect_right(starts, entry.offset) - 1 for entry in entries]
    return [
        view_entry(buckets[number], entry, starts[number])
        for number, entry in zip(numbers, entries, strict=True)
    ]


SHM = Path("/dev/shm")


def prepare_directory(directory: Path, prefix: str) -> None:
    """Check that the directory exists, and remove the leftovers of publishers that died."""
    if not directory.is_dir():
        raise UsageError(f"There is no shared memory at {directory}.", "Publish to files.")
    for path in directory.glob(f"{prefix}*"):
        if not leftovers.is_abandoned(path.name, 0.0):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def open_shared_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a plain file for reading; yield its descriptor and its status."""
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(open_plain(path, follow=False))
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {reason(error)}.") from error
        yield handle, os.fstat(handle)


def map_for_reading(handle: int, size: int, *, whole: bool = True) -> Tensor:
    """Map a file for reading, as a tensor of bytes.

    All pages are mapped at once: page faults would take longer than the copy that follows. Pass
    `whole=False` for a file that is only partly written, since this would fill it with zeros."""
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if whole else 0)
    memory = mmap.mmap(handle, size, flags=flags, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor cannot be written to
        return torch.frombuffer(memory, dtype=torch.uint8)


def map_for_writing(path: Path, nbytes: int, *, old_nbytes: int = 0) -> Tensor:
    """Map a new file of that size, or enlarge one of `old_nbytes` and keep its contents."""
    flags = os.O_NOFOLLOW if old_nbytes else os.O_CREAT | os.O_EXCL
    handle = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        # Allocated now: a write to a page that /dev/shm has no space for kills the process.
        # Only the new bytes: the kernel would look at every page of the old ones.
        os.posix_fallocate(handle, old_nbytes, max(nbytes, 1) - old_nbytes)
        return torch.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=torch.uint8)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightsError(
            f"{path.parent} has no space for {nbytes} bytes of weights: {error.strerror}.",
            "Enlarge it (`--shm-size` of a container), keep fewer versions, or publish to files.",
        ) from error
    finally:
        os.close(handle)


def write_tensor_list(path: Path, manifest: Manifest) -> None:
    """Write the file with a version's list of tensors; it appears at once and complete."""
    scratch = path.with_suffix(".partial")
    scratch.unlink(missing_ok=True)
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(manifest.encode())
    scratch.replace(path)


class VersionGone(WeightsError):
    """The publisher does not have the version any more."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"Version {version} is not in the publisher's memory any more.",
            "Its publisher has closed, or has published newer versions since.",
        )


def read_tensor_list(path: Path, offer: Offer) -> bytes:
    """Read the file with the list of tensors that a publisher wrote for this offer."""
    try:
        return read_plain(path, MAX_MANIFEST_BYTES, follow=False)
    except FileNotFoundError as error:
        raise VersionGone(offer.version) from error
    except OSError as error:
        raise WeightsError(
            f"The list of tensors of version {offer.version} cannot be read: {reason(error)}.",
            "Run trainer and workers as one user, and share /dev/shm between their containers.",
        ) from error
