"""Weights on one GPU, from one process to another: the reader copies out of the trainer's memory.

    trainer ── publish: copy into buckets, digest ──► device memory   (`adopt`: its own storages)
                 │ list of tensors: /dev/shm/rollway-ipc-…/<slot>.json   ▲ opened once
    offer ───────┴─ IPC handles of the buckets ─────────────────────────┤
    worker  ◄── `copy_into`: one kernel copies and sums; or `tensors`, as views of that memory ┘

An offer exists only when its copies are done: publishing waits for their digests. Handles are
opened once, since later versions lie in the same buckets; what was prepared for the version before
is used again while tensors lie where they lay. CPU tensors go the same way through shared memory,
so that everything but the handles works alike where there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.copies import SummedCopies
from rollway.weights.digest.bits import digests, started_digests
from rollway.weights.offer import (
    MOST_MANIFEST_BYTES,
    Count,
    Entry,
    Manifest,
    Offer,
    read_manifest,
)
from rollway.weights.transports.buckets import by_bucket, in_place, laid_out, unless_empty, views
from rollway.weights.transports.device_memory import (
    Handle,
    device_name,
    export,
    local_device,
    opened,
    room,
)
from rollway.weights.transports.taking import Taking
from rollway.weights.untrusted import is_file_name, read_plain, reason

SHM = Path("/dev/shm")
BUCKET_BYTES = 1 << 30
_PREFIX = "rollway-ipc-"
_COMPARED = 2 << 30
"""Bytes whose digests are compared together; a GPU that is asked more often waits."""


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an offer: the device, the buckets in order, and the file with the list of tensors."""

    device: Annotated[str, msgspec.Meta(max_length=64)]
    """A GPU's UUID, or `cpu`."""
    directory: Annotated[str, msgspec.Meta(max_length=255)]
    slot: Count
    buckets: Annotated[list[Handle], msgspec.Meta(max_length=1 << 16)]


@dataclass(slots=True)
class _Slot:
    """Memory for one version. An entry's offset counts through all buckets as if they were one."""

    number: int
    version: int = -1
    buckets: list[Tensor] = field(default_factory=list)
    """As bytes."""
    handles: list[Handle] = field(default_factory=list)
    packed: dict[int, _Packing] = field(default_factory=dict)
    """How the version before was put here, by bucket."""


@dataclass(frozen=True, slots=True)
class _Packing:
    """Tensors of some kinds, from some places, into a slot's bucket."""

    kinds: list[tuple[str, torch.dtype, torch.Size, tuple[int, ...], int]]
    entries: list[Entry]
    copies: SummedCopies


@dataclass(slots=True)
class _Adopted:
    """Parameters that are published from where they are."""

    slot: _Slot
    entries: list[Entry]
    named: Mapping[str, Tensor]
    places: list[int]

    def views(self) -> list[Tensor]:
        for (name, parameter), place in zip(self.named.items(), self.places, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"{name} is not where it was when it was adopted.",
                    "Adopt the module again, or publish its tensors by name.",
                )
        return [parameter.detach() for parameter in self.named.values()]


class CudaIpcPublisher:
    """Publishes versions to readers on this machine; the newest `keep` stay readable, and take as
    much memory of the device each. What a reader still has open goes back when it lets go."""

    def __init__(
        self, keep: int = 1, bucket_bytes: int = BUCKET_BYTES, directory: Path = SHM
    ) -> None:
        if keep < 1 or bucket_bytes < 1:
            raise UsageError(f"{keep} versions in buckets of {bucket_bytes} bytes keep nothing.")
        if not directory.is_dir():
            raise UsageError(f"There is no shared memory at {directory}.", "Publish to files.")
        remove_abandoned(directory)
        self._directory = directory / f"{_PREFIX}{leftovers.mark()}-{os.urandom(4).hex()}"
        self._directory.mkdir(mode=0o700)
        self._guard = leftovers.Guard(self._directory)
        self._bucket_bytes = bucket_bytes
        self._slots = [_Slot(number) for number in range(keep)]
        self._adopted: _Adopted | None = None

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]] = ()) -> Offer:
        """Put a version where workers can read it; without tensors, those that were adopted. No
        more than a bucket's tensors are held at a time."""
        coming = unless_empty((name, tensor.detach()) for name, tensor in tensors)
        if coming is not None:
            slot = min(self._slots, key=_age)
            self._take_away(slot)  # before its bytes change: whoever reads it now learns of it
            entries = self._copied(slot, coming)
        elif self._adopted is not None:
            slot = self._adopted.slot
            self._take_away(slot)
            entries = _with_digests(self._adopted.entries, digests(self._adopted.views()))
        else:
            raise UsageError("There are no tensors to publish.")
        return self._offer(slot, version, entries)

    def adopt(self, module: torch.nn.Module) -> None:
        """Publish a module's parameters from where they are, without a copy (on a CPU, where they
        are not in shared memory, they are moved there first). They must not change while a refit
        reads them: it would be noticed, and refused."""
        named = dict(module.named_parameters())
        if not named:
            raise UsageError("This module has no parameters to publish.")
        _one_device(named)
        slot = _Slot(len(self._slots))
        if next(iter(named.values())).device.type == "cpu":
            entries = self._copied(slot, ((name, p.detach()) for name, p in named.items()))
            for parameter, view in zip(named.values(), views(entries, slot.buckets), strict=True):
                parameter.data = view
        else:
            entries, slot.buckets = in_place(named)
            slot.handles = [export(bucket) for bucket in slot.buckets]
        places = [parameter.data_ptr() for parameter in named.values()]
        self._adopted = _Adopted(slot, entries, named, places)

    def retire(self, version: int) -> None:
        """No reader can begin with this version any more; its memory is kept for the next."""
        for slot in self._all_slots():
            if slot.version == version:
                self._take_away(slot)

    def close(self) -> None:
        """Take everything away."""
        self._guard.close()
        for slot in self._all_slots():
            slot.buckets, slot.handles, slot.packed = [], [], {}
        self._adopted = None
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def __enter__(self) -> CudaIpcPublisher:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _all_slots(self) -> list[_Slot]:
        return [*self._slots, *([self._adopted.slot] if self._adopted else [])]

    def _take_away(self, slot: _Slot) -> None:
        self._manifest(slot).unlink(missing_ok=True)
        slot.version = -1

    def _manifest(self, slot: _Slot) -> Path:
        return self._directory / f"{slot.number}.json"

    def _copied(self, slot: _Slot, tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        """Copy tensors into the slot's buckets, one bucket's at a time."""
        entries: list[Entry] = []
        names: set[str] = set()
        number = -1
        for number, some in enumerate(by_bucket(tensors, self._bucket_bytes)):
            twice = names & some.keys()
            if twice:
                raise UsageError(f"{min(twice)} came twice.", "Publish each name once.")
            names |= some.keys()
            entries += self._filled(slot, number, some)
            some.clear()
        self._let_go(slot, number + 1)
        return entries

    def _filled(self, slot: _Slot, number: int, given: dict[str, Tensor]) -> list[Entry]:
        """Digests are there when the copies are: only then may a source be given back."""
        packing = self._pack(slot, number, given)
        return _with_digests(packing.entries, packing.copies.start()())

    def _pack(self, slot: _Slot, number: int, given: dict[str, Tensor]) -> _Packing:
        """Prepare to copy tensors into one of the slot's buckets, which is made anew where they do
        not fit."""
        kinds = [(n, t.dtype, t.shape, t.stride(), t.data_ptr()) for n, t in given.items()]
        device = _one_device(given, slot.buckets[:number])
        known = slot.packed.get(number)
        if known is not None and known.kinds == kinds and slot.buckets[number].device == device:
            return known
        start = sum(bucket.numel() for bucket in slot.buckets[:number])
        entries, size = laid_out(given, start)
        held = [(one.numel(), one.device) for one in slot.buckets[number : number + 1]]
        if held != [(size, device)]:
            self._let_go(slot, number)  # before the new one: there may be room for one
            path = self._directory / f"{slot.number}.{number}.{os.urandom(4).hex()}"
            slot.buckets.append(room(size, device, path))
            slot.handles.append(export(slot.buckets[-1], path))
        targets = views(laid_out(given, 0)[0], slot.buckets[number : number + 1])
        copies = SummedCopies(list(zip(targets, given.values(), strict=True)))
        packing = _Packing(kinds, entries, copies)
        if not copies.keeps_tensors:
            slot.packed[number] = packing
        return packing

    def _let_go(self, slot: _Slot, number: int) -> None:
        """Of this bucket, and of those after it."""
        for one in slot.handles[number:]:
            if one.file:
                (self._directory / one.file).unlink(missing_ok=True)
        del slot.buckets[number:], slot.handles[number:]
        slot.packed = {n: packing for n, packing in slot.packed.items() if n < number}

    def _offer(self, slot: _Slot, version: int, entries: list[Entry]) -> Offer:
        manifest = Manifest(version, sum(b.numel() for b in slot.buckets), entries)
        path = self._manifest(slot)
        scratch = path.with_suffix(".partial")
        scratch.unlink(missing_ok=True)
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(manifest.encode())
        scratch.replace(path)
        slot.version = version
        where = Where(
            device_name(slot.buckets[0].device), self._directory.name, slot.number, slot.handles
        )
        size = sum(one.nbytes for one in entries)
        as_json: dict[str, Any] = msgspec.to_builtins(where)
        return Offer("cuda_ipc", version, manifest.identity, size, as_json)


class CudaIpcReader:
    """Reads offers in place; what was opened stays open for the versions that come."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory
        self._publisher = ""
        self._open: dict[int, dict[Handle, Tensor]] = {}
        """By slot: one whose buckets were made anew does not keep the old ones."""
        self._taking: dict[int, Taking] = {}
        """By slot: what was prepared for the version before."""
        self._stream: Any = None
        self.seconds: dict[str, float] = {}
        """Of the last `copy_into`, by part."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        return read_manifest(self._look(offer, _where(offer)), offer)

    def tensors(self, offer: Offer) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, as a view of the trainer's memory. Digests are compared when a few
        gigabytes were taken, and at the end: by then the copies are done, and what was copied is
        what was published, or this raises. Copy on the stream that is current here."""
        where = _where(offer)
        raw = self._look(offer, where)
        manifest = read_manifest(raw, offer)
        buckets = self._buckets(where, manifest.nbytes)
        on_gpu = buckets[0].device.type == "cuda"
        at_once = _COMPARED if on_gpu else 0
        taken: list[tuple[Entry, Tensor]] = []
        begun: list[tuple[list[Entry], Callable[[], list[str]]]] = []
        nbytes = 0
        for one, view in zip(manifest.entries, views(manifest.entries, buckets), strict=True):
            yield one.name, view
            taken.append((one, view))
            nbytes += one.nbytes
            if nbytes >= at_once:
                # A GPU looks at these while the next are taken.
                begun.append(_begin(taken))
                taken, nbytes = [], 0
                while len(begun) > (1 if on_gpu else 0):
                    _compare(*begun.pop(0), offer)
        if taken:
            begun.append(_begin(taken))
        for each in begun:
            _compare(*each, offer)
        self._check_still(offer, where, raw)

    def copy_into(self, offer: Offer, targets: Mapping[str, Tensor]) -> None:
        """Copy every tensor into one of this process, by name: of its kind, and on its device.

        What is copied is what is summed, and this returns when it is there and is what was
        published; when it raises, the targets hold nothing that may be served. It has a stream of
        its own, so that other work on the device goes on."""
        where = _where(offer)
        with self._timed("look"):
            raw = self._look(offer, where)
            buckets = self._buckets(where, None)
        with self._on_stream(buckets[0].device):
            with self._timed("launch"):
                taking = self._taking.get(where.slot)
                if taking is not None and not taking.fits(where.buckets, targets):
                    taking = None
                # Before the list is read: mostly tensors lie where they lay.
                begun = taking.start() if taking else []
            with self._timed("list"):
                manifest = read_manifest(raw, offer)
                self._buckets(where, manifest.nbytes)
            if taking is None or not taking.is_of(manifest.entries):
                with self._timed("prepare"):
                    for each in begun:
                        each()
                    self._taking.pop(where.slot, None)
                    taking = Taking(where.buckets, buckets, manifest.entries, targets)
                    begun = taking.start()
            with self._timed("wait"):
                entries = iter(manifest.entries)
                for size, each in zip(taking.sizes, begun, strict=True):
                    _compare(list(islice(entries, size)), each, offer)
            if not taking.keeps_tensors:
                self._taking[where.slot] = taking
        with self._timed("look again"):
            self._check_still(offer, where, raw)

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """After what was asked of the device so far; whatever happens, nothing is written any
        more when this is over."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        if part == "look":
            self.seconds = {}
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began

    def close(self) -> None:
        """Let go of the trainer's memory."""
        self._open, self._taking = {}, {}

    def _check_still(self, offer: Offer, where: Where, raw: bytes) -> None:
        """That the version's list is as it was before."""
        now = self._look(offer, where)
        if now != raw:
            read_manifest(now, offer)
            raise WeightsError(f"Version {offer.version} was written over while it was read.")

    def _look(self, offer: Offer, where: Where) -> bytes:
        name = where.directory
        if not is_file_name(name, _PREFIX):
            raise WeightsError(f"{name!a} is no directory of a publisher.")
        try:
            if leftovers.gone(name, 0.0):
                raise FileNotFoundError(name)  # what it held may be anybody's by now
            path = self._directory / name / f"{where.slot}.json"
            return read_plain(path, MOST_MANIFEST_BYTES, follow=False)
        except FileNotFoundError as error:
            self.close()
            raise WeightsError(
                f"Version {offer.version} is not in the trainer's memory any more.",
                "Its publisher has ended, or has published others since.",
            ) from error
        except OSError as error:
            raise WeightsError(
                f"The list of tensors of version {offer.version} cannot be read: {reason(error)}.",
                "Run trainer and workers as one user, and let their containers share /dev/shm.",
            ) from error

    def _buckets(self, where: Where, nbytes: int | None) -> list[Tensor]:
        """The publisher's memory, and that it is as long as it should be, where that is known."""
        if nbytes is not None and sum(one.nbytes for one in where.buckets) != nbytes:
            raise WeightsError("The buckets of an offer are not as long as what lies in them.")
        device = local_device(where.device)
        if self._publisher != where.directory:
            self.close()  # one that went away takes its memory with it
            self._publisher = where.directory
        known = self._open.pop(where.slot, {})
        if known.keys() != set(where.buckets):
            self._taking.pop(where.slot, None)  # its addresses are of what is let go here
        found = {
            one: known[one]
            if one in known
            else opened(one, device, self._directory / self._publisher)
            for one in where.buckets
        }
        self._open[where.slot] = found
        return [found[one] for one in where.buckets]


def remove_abandoned(directory: Path = SHM) -> None:
    """Remove what publishers that died have left."""
    for path in directory.glob(f"{_PREFIX}*"):
        if leftovers.gone(path.name, 0.0):
            shutil.rmtree(path, ignore_errors=True)


def _where(offer: Offer) -> Where:
    try:
        where = msgspec.convert(offer.where, Where)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This is no offer by CUDA IPC: {error}.") from error
    if not where.buckets:
        raise WeightsError("An offer by CUDA IPC names no memory.")
    return where


def _begin(
    taken: Sequence[tuple[Entry, Tensor]],
) -> tuple[list[Entry], Callable[[], list[str]]]:
    return [one for one, _ in taken], started_digests([view for _, view in taken])


def _compare(entries: Sequence[Entry], found: Callable[[], list[str]], offer: Offer) -> None:
    for one, each in zip(entries, found(), strict=True):
        if each != one.digest:
            raise WeightsError(
                f"{one.name} of version {offer.version} changed while it was read.",
                "Publish the version again, and change nothing before the refit has ended.",
            )


def _with_digests(entries: Sequence[Entry], found: Sequence[str]) -> list[Entry]:
    return [
        msgspec.structs.replace(one, digest=each) for one, each in zip(entries, found, strict=True)
    ]


def _one_device(tensors: Mapping[str, Tensor], others: Sequence[Tensor] = ()) -> torch.device:
    devices = {tensor.device for tensor in (*tensors.values(), *others)}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(
            f"These tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Use a publisher for each GPU.",
        )
    return devices.pop()


def _age(slot: _Slot) -> int:
    return slot.version
