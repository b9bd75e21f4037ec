"""Map files of /dev/shm, which publishers and readers on one machine share."""

from __future__ import annotations

import mmap
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.offer import MAX_MANIFEST_BYTES, Manifest, Offer
from rollway.weights.untrusted import open_plain, read_plain, reason

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
