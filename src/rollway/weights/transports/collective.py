"""Weights by broadcast: from a trainer's process into engines that run, over gloo or NCCL.

    publisher                       its store                      receivers (one per rank)
    publish: digests, list ───────► manifest ────────────────────► read, held against the offer
    wait for N of them ◄─────────── joined ◄────────────────────── take a number
    go ───────────────────────────► go ──────────────────────────► wait
    ══════ a process group of its own: broadcasts, the next while the last is used ══════
    wait for all ◄───────────────── ended ◄─────────────────────── digests compared, or why not
    done ─────────────────────────► done ────────────────────────► leave the group
    whatever goes wrong: stop ────► stop ────────────────────────► end, within a moment

Store and group live as long as one version is sent. A stranger who reaches the store can spoil a
transfer, which is an error on both sides. Digests guard against chance and mistakes; against one
who joins and crafts other bytes of the same digest, only a network that keeps him out does.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.bits import DTYPES, digest, dtype_name, raw_bytes
from rollway.weights.offer import Entry, Manifest, Offer
from rollway.weights.transports import meeting
from rollway.weights.transports.group import Backend, Group, address_towards
from rollway.weights.transports.meeting import Where

log = logging.getLogger(__name__)

_ALIGNED = 256
_ALONE = 1 << 20
"""Bytes from which on a tensor is sent straight from where it lies."""
_AGAIN = "Publish the version again; what was served before is still served."


class CollectivePublisher:
    """Sends versions to engines, one after the other.

        offer = publisher.publish(7, model.state_dict().items(), receivers=2)
        stack.refit(7, offer)   # every rank of every worker joins, and takes the bytes
        publisher.wait(7)       # raises if one did not get them; before the optimizer steps

    The tensors must not change before `wait` returns: it would be noticed, and refused."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        bucket_bytes: int = 64 << 20,
        init_seconds: float = 30.0,
        step_seconds: float = 60.0,
    ) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise UsageError(
                f"`{host}` is no address that workers can connect to.",
                "Name this machine's address in the network that they are in.",
            )
        if bucket_bytes < 1 or init_seconds <= 0 or step_seconds <= 0:
            raise UsageError("A bucket's size and the time limits must be more than zero.")
        self._host, self._port = host, port
        self._bucket_bytes = bucket_bytes
        self._init_seconds, self._step_seconds = init_seconds, step_seconds
        self._sending: _Sending | None = None

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], receivers: int = 1
    ) -> Offer:
        """Announce a version; it is sent once that many receivers have joined. Every
        tensor-parallel rank of every worker is one."""
        if receivers < 1:
            raise UsageError(f"There must be at least one receiver, not {receivers}.")
        if self._sending is not None and self._sending.is_alive():
            raise UsageError(
                f"Version {self._sending.version} is still being sent.",
                "Wait for it, or cancel it.",
            )
        given = dict(tensors)
        backend = _backend_of(given)
        manifest = _listed(version, given)
        parts = meeting.parts_of(manifest.encode())
        store, port = meeting.serve(self._host, self._port, self._step_seconds)
        where = Where(
            host=self._host,
            port=port,
            receivers=receivers,
            backend=backend,
            bucket_bytes=self._bucket_bytes,
            init_seconds=self._init_seconds,
            step_seconds=self._step_seconds,
            manifest_parts=len(parts),
            room=secrets.token_hex(8),
        )
        store = dist.PrefixStore(where.room, store)
        for number, part in enumerate(parts):
            store.set(f"manifest/{number}", part)
        self._sending = _Sending(version, where, manifest.entries, given, store)
        self._sending.start()
        place = msgspec.to_builtins(where)
        nbytes = manifest.nbytes
        return Offer("collective", version, manifest.identity, nbytes, place, repeatable=False)

    def wait(self, version: int, seconds: float | None = None) -> None:
        """Return when every receiver has the version; raise what went wrong."""
        sending = self._sending
        if sending is None or sending.version != version:
            raise UsageError(f"Version {version} is not the one that was published last.")
        sending.join(seconds)
        if sending.is_alive():
            raise WeightsError(f"Version {version} has not reached all within {seconds:g} s.")
        if sending.error is not None:
            raise sending.error

    def cancel(self) -> None:
        """Have the transfer under way end soon, if there is one: after a refit that failed."""
        if self._sending is not None:
            self._sending.cancelled.set()

    def close(self) -> None:
        """End what is under way; returns when it has ended."""
        self.cancel()
        if self._sending is not None:
            self._sending.join()

    def __enter__(self) -> CollectivePublisher:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Sending(threading.Thread):
    """One version on its way out, as rank 0."""

    def __init__(
        self,
        version: int,
        where: Where,
        entries: Sequence[Entry],
        tensors: dict[str, Tensor],
        store: Any,
    ) -> None:
        super().__init__(name=f"rollway-collective-{version}", daemon=True)
        self.version = version
        self.cancelled = threading.Event()
        self.error: WeightsError | None = None
        self._where = where
        self._entries = entries
        self._tensors = tensors
        self._store = store
        self._group: Group | None = None

    def run(self) -> None:
        host = meeting.Host(self._store, self._where)
        try:
            host.wait_for_all(self._cancellable)
            self._broadcast(host)
            host.wait_for_success()
            self._close_group()  # not before: bytes may still be on their way
        except (WeightsError, RuntimeError) as error:
            self._close_group()  # at once, so that receivers notice
            self.error = self._explained(host, error)
            log.warning("%s", self.error)
        finally:
            host.leave()
            self._store, self._tensors = None, {}

    def _broadcast(self, host: meeting.Host) -> None:
        where = self._where

        def look() -> None:
            self._cancellable()
            host.look()

        store = dist.PrefixStore("group", self._store)
        self._group = Group(
            store, 0, where.receivers + 1, where.backend, where.host, where.init_seconds
        )
        packed = _Buffers(self._device())
        for number, message in enumerate(messages(self._entries, where.bucket_bytes)):
            flat = self._flat(message, number, packed)
            self._group.post(_parts(flat, where.bucket_bytes), where.step_seconds)
            if number:
                self._group.finish(where.step_seconds, look)
        self._group.finish(where.step_seconds, look)

    def _flat(self, message: Sequence[Entry], number: int, packed: _Buffers) -> Tensor:
        """The bytes of a message: of one tensor, in place; of several, side by side."""
        if len(message) == 1:
            return raw_bytes(self._tensors[message[0].name])
        places, size = _placed(message)
        flat = packed.of_size(number, size)
        for one, at in zip(message, places, strict=True):
            flat[at : at + one.nbytes].copy_(raw_bytes(self._tensors[one.name]))
        return flat

    def _device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    def _cancellable(self) -> None:
        if self.cancelled.is_set():
            raise WeightsError("It was cancelled.")

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _explained(self, host: meeting.Host, error: Exception) -> WeightsError:
        cause = f"Version {self.version} did not reach all receivers: {error}"
        hint = getattr(error, "hint", "") or _AGAIN
        try:
            who = host.stop(cause)
        except RuntimeError as worse:
            who = f"the store failed: {worse}"
        return WeightsError(f"{cause} ({who})" if who else cause, hint)


class CollectiveReader:
    """Takes part in broadcasts. To be made on the thread whose GPU the engine uses."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self.manifest(offer).headers()

    def manifest(self, offer: Offer) -> Manifest:
        where = meeting.read_where(offer)
        return meeting.get_manifest(meeting.connect(where, offer), where, offer)

    def tensors(self, offer: Offer) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as it comes, valid until the next is asked for. Its digest is compared
        then: what was copied by then is what was published, or this raises."""
        where = meeting.read_where(offer)
        device = self._device(where)
        store = meeting.connect(where, offer)
        manifest = meeting.get_manifest(store, where, offer)
        seat = meeting.Seat(store, where, offer)
        group: Group | None = None
        try:
            seat.wait_for_go()
            group = self._group(store, where, seat.rank)
            for one, tensor in _received(group, manifest.entries, where, device, seat.look):
                yield one.name, tensor
                if digest(tensor) != one.digest:
                    raise WeightsError(
                        f"{one.name} of version {offer.version} is not what was published.",
                        "Publish it again, and change nothing before the refit has ended.",
                    )
            seat.taken()
        except BaseException as error:
            seat.failed(error)
            raise
        finally:
            if group is not None:
                group.close()

    def _group(self, store: Any, where: Where, rank: int) -> Group:
        address = address_towards(where.host, where.port)
        store = dist.PrefixStore("group", store)
        return Group(store, rank, where.receivers + 1, where.backend, address, where.init_seconds)

    def _device(self, where: Where) -> torch.device:
        if where.backend == "gloo":
            return torch.device("cpu")
        if self._gpu is None:
            raise WeightsError(
                "These weights come by NCCL, and this worker has no GPU.",
                "Publish tensors that are in CPU memory.",
            )
        return torch.device("cuda", self._gpu)


def messages(entries: Iterable[Entry], bucket_bytes: int) -> Iterator[list[Entry]]:
    """What travels together: a tensor of some size by itself, small ones up to a bucket."""
    alone = min(_ALONE, bucket_bytes)
    together: list[Entry] = []
    size = 0
    for one in entries:
        room = _aligned(one.nbytes)
        if together and (one.nbytes >= alone or size + room > bucket_bytes):
            yield together
            together, size = [], 0
        if one.nbytes >= alone:
            yield [one]
        else:
            together.append(one)
            size += room
    if together:
        yield together


class _Buffers:
    """Two, used in turn: one is filled while the other is in use."""

    def __init__(self, device: torch.device) -> None:
        self._both = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def of_size(self, number: int, nbytes: int) -> Tensor:
        if self._both[number % 2].numel() < nbytes:
            device = self._both[number % 2].device
            self._both[number % 2] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._both[number % 2][:nbytes]


def _received(
    group: Group,
    entries: Sequence[Entry],
    where: Where,
    device: torch.device,
    look: Callable[[], None],
) -> Iterator[tuple[Entry, Tensor]]:
    """Views into what came; the next message travels while the last one's are in use."""
    buffers = _Buffers(device)
    expected = list(messages(entries, where.bucket_bytes))

    def post(number: int) -> Tensor:
        flat = buffers.of_size(number, _placed(expected[number])[1])
        group.post(_parts(flat, where.bucket_bytes), where.step_seconds)
        return flat

    coming = post(0)
    for number, message in enumerate(expected):
        flat = coming
        if number + 1 < len(expected):
            coming = post(number + 1)
        group.finish(where.step_seconds, look)
        for one, at in zip(message, _placed(message)[0], strict=True):
            part = flat[at : at + one.nbytes]
            yield one, part.view(DTYPES[one.dtype]).view(one.shape)


def _placed(message: Sequence[Entry]) -> tuple[list[int], int]:
    """Where the tensors of a message start, and its size."""
    places, end = [], 0
    for one in message:
        places.append(_aligned(end))
        end = places[-1] + one.nbytes
    return places, end


def _parts(flat: Tensor, bucket_bytes: int) -> list[Tensor]:
    return list(flat.split(bucket_bytes)) if flat.numel() else []


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _backend_of(tensors: dict[str, Tensor]) -> Backend:
    devices = {tensor.device for tensor in tensors.values()}
    if not devices:
        raise UsageError("There are no tensors to publish.")
    if len(devices) > 1:
        raise UsageError(
            f"The tensors are on {', '.join(sorted(map(str, devices)))}.",
            "Publish tensors that are all on one device.",
        )
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Tensors on {device} cannot be broadcast.", "Copy them to CPU memory.")
    return "nccl" if device.type == "cuda" else "gloo"


def _listed(version: int, tensors: dict[str, Tensor]) -> Manifest:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        kind = dtype_name(tensor)
        entries.append(Entry(name, kind, shape, offset, nbytes, digest(tensor)))
        offset += nbytes
    return Manifest(version, offset, entries)
