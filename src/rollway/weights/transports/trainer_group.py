"""The group that prime-rl's trainer forms with the ranks of all engines, and keeps for its run.

    trainer (rank 0)                      its store                 a rank of an engine (1 … W)
    listen on host:port, serve a store ─► ready ◄────────────────── connect, as soon as it listens
    NCCL: its unique id ────────────────► broadcast_from/0/0 ─────► read as plain bytes
    ═══════════ one communicator: NCCL between GPUs, gloo between CPUs ═══════════

The rendezvous is that of vLLM's `StatelessProcessGroup`, which prime-rl's trainer uses. There is no
CPU trainer of prime-rl's; over gloo the same messages run between a trainer of one's own
(`rollway.integrations.prime_rl.broadcast`) and CPU workers.

A rank keeps an idle connection to the store: it ends in the moment in which the trainer dies.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.transports.collective_group import Group
from rollway.weights.transports.collective_rendezvous import (
    BrokenOff,
    Location,
    Seconds,
    find_address_towards,
)
from rollway.weights.untrusted import read_pickle

_PROBE_SECONDS = 3.0
_POLL_SECONDS = 0.1
_UNIQUE_ID = "broadcast_from/0/0"
"""Where vLLM's `StatelessProcessGroup` puts the first object that rank 0 broadcasts."""
_UNIQUE_ID_BYTES = 128
_WHOLE = 1 << 40
"""Messages are not divided: a flat tensor is one broadcast, as prime-rl sends it."""


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a trainer waits for the ranks of its group, and how many they are."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:%-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    """All ranks, and the trainer."""
    join_seconds: Seconds
    """The time limit for the trainer to listen, and again for the group to form."""
    message_seconds: Seconds
    """The time limit for each message."""


class TrainerGroup:
    """One rank's membership: a channel for `state_dicts`."""

    def __init__(
        self,
        place: Rendezvous,
        rank: int,
        store: Any,
        device: torch.device,
        check: Callable[[], None],
        line: socket.socket | None = None,
    ) -> None:
        """Form the group on the trainer's store. `check` raises to give up, and is called
        regularly; `line` is a connection to the trainer, unless this is the trainer."""
        self.device = device
        self._check, self._line = check, line
        make = _form_gloo if device.type == "cpu" else NcclChannel
        self._channel: Group | NcclChannel | None = make(place, rank, store, device, self.watch)

    def watch(self) -> None:
        """Raise if the caller gives up, or the trainer is gone."""
        self._check()
        if self._line is not None and _has_ended(self._line):
            raise BrokenOff("The trainer is gone.")

    def post(self, flat: Tensor) -> None:
        self._get_channel().post(flat)

    def finish(self) -> None:
        try:
            self._get_channel().finish()
        except BrokenOff:
            self.watch()  # if the trainer is gone, that is the cause
            raise

    def close(self) -> None:
        """Leave the group; a broadcast under way breaks off."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._line is not None:
            self._line.close()

    def _get_channel(self) -> Group | NcclChannel:
        channel = self._channel
        if channel is None:
            raise BrokenOff("This rank has left the group.")
        return channel


def join_group(
    place: Rendezvous, rank: int, device: torch.device, check: Callable[[], None]
) -> TrainerGroup:
    """Join a trainer's group as a rank of an engine. `check` raises to give up."""
    line = _connect(place, check)
    try:
        limit = timedelta(seconds=place.join_seconds)
        # It announces itself to the trainer, which waits for all ranks, and does not wait here.
        store = dist.TCPStore(
            place.host, place.port, place.world_size, False, limit, use_libuv=False
        )
        return TrainerGroup(place, rank, store, device, check, line)
    except BaseException as error:
        line.close()
        if isinstance(error, WeightsError) or not isinstance(error, RuntimeError | ValueError):
            raise
        raise BrokenOff(f"The group did not form: {str(error)[:300]}") from error


def _connect(place: Rendezvous, check: Callable[[], None]) -> socket.socket:
    """Return a connection to the trainer's store, which may begin to listen only later."""
    deadline = time.monotonic() + place.join_seconds
    while True:
        check()
        try:
            line = socket.create_connection((place.host, place.port), _PROBE_SECONDS)
            line.setblocking(False)
            return line
        except OSError as error:
            if time.monotonic() > deadline:
                raise BrokenOff(
                    f"No trainer listens at {place.host}:{place.port} after "
                    f"{place.join_seconds:g} s ({error.strerror or error}).",
                    "Check weight_broadcast.host and port, and that workers reach the trainer.",
                ) from error
        time.sleep(_POLL_SECONDS)


def _has_ended(line: socket.socket) -> bool:
    try:
        return not line.recv(1)  # the store never writes to a connection that asks for nothing
    except BlockingIOError:
        return False
    except OSError:
        return True


def _form_gloo(
    place: Rendezvous, rank: int, store: Any, device: torch.device, watch: Callable[[], None]
) -> Group:
    location = Location(
        host=place.host,
        port=place.port,
        receivers=place.world_size - 1,
        backend="gloo",
        bucket_bytes=_WHOLE,
        init_seconds=place.join_seconds,
        step_seconds=place.message_seconds,
        manifest_parts=1,
        prefix="prime-rl",
    )
    address = place.host if rank == 0 else find_address_towards(place.host, place.port)
    return Group(store, rank, location, address, watch)


class NcclChannel:
    """A communicator of vLLM's between GPUs, as prime-rl's trainer makes it. NCCL broadcasts bytes,
    whatever the dtype is."""

    def __init__(
        self,
        place: Rendezvous,
        rank: int,
        store: Any,
        device: torch.device,
        watch: Callable[[], None],
    ) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self._seconds, self._watch = place.message_seconds, watch
        self._posted: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._communicator: Any
        if rank == 0:
            group = StatelessProcessGroup(0, place.world_size, store)
            self._communicator = PyNcclCommunicator(group, device)
        else:
            raw = _wait_for_unique_id(store, place, watch)
            self._communicator = PyNcclCommunicator.from_unique_id_bytes(
                raw, rank, place.world_size, device
            )

    def post(self, flat: Tensor) -> None:
        event = torch.cuda.Event()
        if flat.numel():
            self._communicator.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        event.record()
        self._posted.append((flat, event))

    def finish(self) -> None:
        """Wait for the bytes that were posted first. NCCL itself waits for ever for a rank that
        has died."""
        deadline = time.monotonic() + self._seconds
        pause = 5e-5
        while not self._posted[0][1].query():
            self._watch()
            if time.monotonic() > deadline:
                raise BrokenOff(f"Nothing moved for {self._seconds:g} s.")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        self._posted.popleft()

    def close(self) -> None:
        """Abort the communicator; what is posted ends with an error on all ranks."""
        self._communicator.destroy()
        self._posted.clear()


def _wait_for_unique_id(store: Any, place: Rendezvous, watch: Callable[[], None]) -> bytes:
    deadline = time.monotonic() + place.join_seconds
    while not store.check([_UNIQUE_ID]):
        watch()
        if time.monotonic() > deadline:
            raise BrokenOff(f"The trainer sent no NCCL id within {place.join_seconds:g} s.")
        time.sleep(_POLL_SECONDS)
    return read_unique_id(store.get(_UNIQUE_ID))


def read_unique_id(raw: bytes) -> bytes:
    """Return NCCL's id from vLLM's pickle of a C structure, as plain bytes."""
    structure = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"
    named = {structure: "id", ("_ctypes", "_unpickle"): lambda kind, state: (kind, state)}
    message = read_pickle(raw, "the trainer", named)
    match message:
        case ("id", ({}, bytes(unique_id))) if len(unique_id) == _UNIQUE_ID_BYTES:
            return unique_id
    raise WeightsError("The trainer's store has no NCCL id of vLLM's.")
