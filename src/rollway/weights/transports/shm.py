"""Weights through shared memory: one copy out of the trainer's buffer, on one machine.

    trainer ── publish: copy in, sum up ──► /dev/shm/rollway-weights-…   (a few slots, used in turn)
                                                 │ mapped once, read in place
    worker  ◄── one copy, straight into its own parameters; sums compared after the copy

`adopt` moves a model's own parameters into a slot: publishing then copies nothing at all. A slot's
list of tensors is taken away before its bytes are written over, and a reader looks again when it
has read: it never takes half of one version and half of another.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.digest.bits import DTYPES, dtype_name, raw_bytes, spread, word_sum
from rollway.weights.offer import (
    MOST_MANIFEST_BYTES,
    Entry,
    Lies,
    Manifest,
    Offer,
    read_manifest,
)
from rollway.weights.transports.buckets import unless_empty
from rollway.weights.untrusted import is_file_name, open_plain, read_plain, reason

SHM = Path("/dev/shm")
_PREFIX = "rollway-weights-"
_ALIGNED = 256
_THREADS = 4
"""That sum up what was copied: they are faster than one that copies."""


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an offer: the slot's file name, below /dev/shm."""

    slot: Annotated[str, msgspec.Meta(max_length=255)]


@dataclass(slots=True)
class _Slot:
    path: Path
    version: int = -1
    memory: Tensor | None = None
    """All of it, as bytes."""

    @property
    def manifest(self) -> Path:
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.path, self.manifest, self.manifest.with_suffix(".partial")

    def room_for(self, nbytes: int) -> Tensor:
        """The slot's memory, larger if need be; readers keep what they have mapped."""
        if self.memory is None or self.memory.numel() < nbytes:
            self.path.unlink(missing_ok=True)
            self.memory = mapped_for_writing(self.path, nbytes)
        return self.memory

    def grown_to(self, nbytes: int) -> Tensor:
        """The same, with what was written there so far."""
        if self.memory is None or self.memory.numel() < nbytes:
            new = self.memory is None
            self.memory = None
            self.memory = mapped_for_writing(self.path, nbytes, new=new)
        return self.memory

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)
        self.memory = None


class ShmPublisher:
    """Publishes versions to readers on this machine; the newest `keep` stay readable."""

    def __init__(self, keep: int = 2, directory: Path = SHM) -> None:
        if keep < 1:
            raise UsageError(f"At least one version must be kept, not {keep}.")
        if not directory.is_dir():
            raise UsageError(f"There is no shared memory at {directory}.", "Publish to files.")
        remove_abandoned(directory)
        mark = leftovers.mark()
        unique = os.urandom(4).hex()
        slots = [
            _Slot(directory / f"{_PREFIX}{mark}-{unique}-{number}") for number in range(keep + 1)
        ]
        # One of its own, so that nothing is ever written over a trainer's parameters.
        self._own, *self._slots = slots
        self._adopted: dict[str, Tensor] | None = None
        self._nbytes = 0
        """Of the last version; the next is mostly as large."""
        self._guard = leftovers.Guard(*(path for slot in slots for path in slot.paths))

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]] = (),
        lies: Mapping[str, Sequence[Lies]] | None = None,
    ) -> Offer:
        """Put a version where workers can read it; without tensors, those that were adopted. Each
        tensor is copied before the next one is asked for.

        `lies` says what lies in each tensor, for shards: see `rollway.weights.transports.shards`.
        """
        coming = unless_empty(tensors)
        if coming is None and not self._adopted:
            raise UsageError("There are no tensors to publish.")
        slot = self._own if coming is None else min(self._slots, key=_age)
        slot.manifest.unlink(missing_ok=True)  # whoever reads it now learns that it changed
        slot.version = -1
        if coming is None:
            entries, nbytes = _laid_out(self._adopted or {})
            memory = slot.room_for(nbytes)
            sums = spread(word_sum, [_view(memory, one) for one in entries])
        else:
            entries, sums, nbytes = self._copied(slot, coming)
        entries = [
            msgspec.structs.replace(
                one, digest=f"{total:016x}", lies=tuple((lies or {}).get(one.name, ()))
            )
            for one, total in zip(entries, sums, strict=True)
        ]
        manifest = Manifest(version, nbytes, entries)
        scratch = slot.manifest.with_suffix(".partial")
        scratch.write_bytes(manifest.encode())
        scratch.replace(slot.manifest)
        slot.version = version
        size = sum(one.nbytes for one in entries)
        return Offer("shm", version, manifest.identity, size, {"slot": slot.path.name})

    def _copied(
        self, slot: _Slot, tensors: Iterable[tuple[str, Tensor]]
    ) -> tuple[list[Entry], list[int], int]:
        """Copy tensors into the slot as they come, and sum each up while the next is copied."""
        slot.grown_to(self._nbytes)
        entries: dict[str, Entry] = {}
        sums: list[Future[int]] = []
        end = 0
        with ThreadPoolExecutor(_THREADS) as threads:
            for name, tensor in tensors:
                if name in entries:
                    raise UsageError(f"{name} came twice.", "Publish each name once.")
                one = entries[name] = _entry(name, tensor, end)
                end = _after(one)
                view = _view(slot.grown_to(end), one)
                _copy(view, tensor.detach())
                sums.append(threads.submit(word_sum, view))
        self._nbytes = end
        return list(entries.values()), [each.result() for each in sums], end

    def adopt(self, named: Mapping[str, Tensor]) -> None:
        """Move parameters (`dict(model.named_parameters())`) into shared memory, where publishing
        finds them. They must not change while a refit reads them: it is noticed, and refused."""
        named = dict(named)
        if any(parameter.device.type != "cpu" for parameter in named.values()):
            raise UsageError("Only parameters in CPU memory can be adopted.", "Use cuda_ipc.")
        entries, nbytes = _laid_out(named)
        memory = self._own.room_for(nbytes)
        for one, parameter in zip(entries, named.values(), strict=True):
            view = _view(memory, one)
            view.copy_(parameter.detach())
            parameter.data = view
        self._adopted = {name: parameter.data for name, parameter in named.items()}

    def close(self) -> None:
        """Take everything away; readers keep what they have mapped."""
        for slot in (self._own, *self._slots):
            slot.remove()
        self._guard.close()
        self._adopted = None

    def __enter__(self) -> ShmPublisher:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class ShmReader:
    """Reads offers in place; mappings are kept, so that the next version costs no page faults."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._maps: dict[str, tuple[int, Tensor]] = {}

    def manifest(self, offer: Offer) -> Manifest:
        return read_manifest(self._look(offer), offer)

    def sums(self, offer: Offer) -> dict[str, int]:
        """Of each tensor's words, as it was published."""
        known = {one.name: one.word_sum for one in self.manifest(offer).entries}
        return {name: total for name, total in known.items() if total is not None}

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = lambda _: False
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in place. Its sum is compared when the next one is asked for: what was
        copied by then is what was published, or this raises. A tensor whose copy is compared with
        `sums` by the caller is `summed`, and is not read again."""
        manifest = self.manifest(offer)
        views = self.views(offer, manifest)
        for one in manifest.entries:
            yield one.name, views[one.name]
            if not summed(one.name):
                check_unchanged(views[one.name], one, offer)
        self.check_there(offer, manifest)

    def views(self, offer: Offer, manifest: Manifest) -> dict[str, Tensor]:
        """All tensors in place, to be checked by whoever reads them."""
        memory = self._memory(offer, manifest.nbytes)
        return {one.name: _view(memory, one) for one in manifest.entries}

    def check_there(self, offer: Offer, manifest: Manifest) -> None:
        """That the slot still holds what it held when reading began."""
        if read_manifest(self._look(offer), offer) != manifest:
            raise WeightsError(f"Version {offer.version} was written over while it was read.")

    def _look(self, offer: Offer) -> bytes:
        path = self._path(offer).with_name(f"{self._path(offer).name}.json")
        try:
            return read_plain(path, MOST_MANIFEST_BYTES, follow=False)
        except FileNotFoundError as error:
            raise WeightsError(
                f"Version {offer.version} is not in shared memory any more.",
                "Its publisher has ended, or has published others since.",
            ) from error
        except OSError as error:
            raise WeightsError(
                f"The list of tensors of version {offer.version} cannot be read: {reason(error)}.",
                "Run trainer and workers as one user, and let their containers share /dev/shm.",
            ) from error

    def _path(self, offer: Offer) -> Path:
        try:
            slot = msgspec.convert(offer.where, Where).slot
        except msgspec.ValidationError as error:
            raise WeightsError(
                f"This offer names no slot of shared memory: {error}.", "Publish the version again."
            ) from error
        if not is_file_name(slot, _PREFIX):
            raise WeightsError(f"{slot!a} is no slot of shared memory.")
        return self._directory / slot

    def _memory(self, offer: Offer, nbytes: int) -> Tensor:
        path = self._path(offer)
        with plain_file(path) as (handle, found):
            if found.st_size < max(nbytes, 1):
                raise WeightsError(f"{path} does not hold {nbytes} bytes.")
            known = self._maps.get(path.name)
            if known is None or known[0] != found.st_ino or known[1].numel() < nbytes:
                # A publisher that went away takes its memory with it.
                there = {name for name in self._maps if (self._directory / name).exists()}
                self._maps = {name: self._maps[name] for name in there}
                known = self._maps[path.name] = (found.st_ino, mapped(handle, found.st_size))
        return known[1]


@contextmanager
def plain_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A plain file of shared memory: its descriptor, and what it is."""
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(open_plain(path, follow=False))
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {reason(error)}.") from error
        yield handle, os.fstat(handle)


def check_unchanged(view: Tensor, one: Entry, offer: Offer) -> None:
    if word_sum(view) != one.word_sum:
        raise WeightsError(
            f"{one.name} of version {offer.version} changed while it was read.",
            "Publish the version again, and change nothing before the refit has ended.",
        )


def mapped(handle: int, size: int, *, whole: bool = True) -> Tensor:
    """To read only, and all at once: page by page would take longer than the copy. Unless not the
    `whole` of it has been written: it would be filled with zeros."""
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if whole else 0)
    memory = mmap.mmap(handle, size, flags=flags, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to
        return torch.frombuffer(memory, dtype=torch.uint8)


def remove_abandoned(directory: Path = SHM) -> None:
    """Remove what publishers that died have left."""
    for path in directory.glob(f"{_PREFIX}*"):
        if leftovers.gone(path.name, 0.0):
            path.unlink(missing_ok=True)


def mapped_for_writing(path: Path, nbytes: int, *, new: bool = True) -> Tensor:
    """A file of at least that size; what an old one holds stays."""
    flags = os.O_CREAT | os.O_EXCL if new else os.O_NOFOLLOW
    handle = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        os.posix_fallocate(handle, 0, max(nbytes, 1))  # a full /dev/shm is an error here, no crash
        return torch.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=torch.uint8)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightsError(
            f"{path.parent} has no room for {nbytes} bytes of weights: {error.strerror}.",
            "Enlarge it (`--shm-size` of a container), keep fewer versions, or publish to files.",
        ) from error
    finally:
        os.close(handle)


def _copy(target: Tensor, tensor: Tensor) -> None:
    """On one thread where it can be: torch's wait for each other when cores are busy."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        raw_bytes(target).numpy()[:] = raw_bytes(tensor).numpy()
    else:
        target.copy_(tensor)


def _laid_out(tensors: dict[str, Tensor]) -> tuple[list[Entry], int]:
    entries, end = [], 0
    for name, tensor in tensors.items():
        entries.append(_entry(name, tensor, end))
        end = _after(entries[-1])
    return entries, end


def _entry(name: str, tensor: Tensor, offset: int) -> Entry:
    nbytes = tensor.numel() * tensor.element_size()
    return Entry(name, dtype_name(tensor), tuple(tensor.shape), offset, nbytes)


def _after(one: Entry) -> int:
    return one.offset + -(-one.nbytes // _ALIGNED) * _ALIGNED


def _view(memory: Tensor, one: Entry) -> Tensor:
    if one.offset % DTYPES[one.dtype].itemsize:
        raise WeightsError(f"{one.name} does not begin where an element can.")
    part = memory[one.offset : one.offset + one.nbytes]
    return part.view(DTYPES[one.dtype]).view(one.shape)


def _age(slot: _Slot) -> int:
    return slot.version
