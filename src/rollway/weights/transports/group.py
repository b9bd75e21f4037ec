"""A group in which rank 0 broadcasts bytes to all others: over gloo between CPUs, over NCCL between
GPUs.

    rank 0                              a store of rank 0's             ranks 1, 2, …
    gloo: its address ────────────────► ◄────────────────────────────── their addresses
    NCCL: an id, as vLLM writes it ───► broadcast_from/0/0 ───────────► read as plain bytes
    ══════ broadcast, broadcast, …: messages of bytes, of lengths that all ranks know ═════════════

Three dialects use it. They differ in how a group forms, and in how tensors become messages:

    dialect        the group                               the messages
    `collective`   on the publisher's store, per version   chunks of tensors that the offer lists
    `state_dicts`  on prime-rl's trainer's, for a run      state dicts, each with a list of its own
    `vllm_group`   NCCL's id in a request of vLLM's        chunks of tensors that were listed before

A group is made from a store or an id alone: `torch.distributed`'s default group and its registry of
groups do not contain it. Every wait ends within a time limit. While it waits, it calls a `watch`,
which raises to give up.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Annotated, Any, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.untrusted import read_pickle

ID_BYTES = 128
"""The length of an id of NCCL's."""
UNIQUE_ID = "broadcast_from/0/0"
"""Where vLLM's `StatelessProcessGroup` puts the first object that rank 0 broadcasts."""
_STRUCTURE = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"
_NCCL = "libnccl.so.2"
_LEFT = "this rank has left the group"
_CONNECT_SECONDS = 3.0
_END_SECONDS = 5.0
_WATCH_SECONDS = 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3
T = TypeVar("T")
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The store on which a group forms, how many ranks receive, and the time limits of all."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:%-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    receivers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    init_seconds: Seconds
    """The time limit for all receivers to join, and again for the group to form."""
    step_seconds: Seconds
    """The time limit for each message to reach all receivers."""


class BrokenOff(WeightsError):
    """Other ranks died or are slow; this is seldom this rank's own fault."""


def never_give_up() -> None:
    """Watch nothing."""


def wait_for(
    is_ready: Callable[[], bool],
    seconds: float,
    watch: Callable[[], None] = never_give_up,
    pause: float = _SHORTEST_PAUSE,
) -> bool:
    """Ask until it is ready; return whether it was within `seconds`. `watch` raises to give up."""
    began = watched = time.monotonic()
    while not is_ready():
        now = time.monotonic()
        if now - watched > _WATCH_SECONDS:
            watch()
            watched = now
        if now - began > seconds:
            return False
        time.sleep(pause)
        pause = max(pause, min(2 * pause, _LONGEST_PAUSE))
    return True


def start_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Run a call beside this thread. One that waits for a lost rank does not keep the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever waits for it raises it)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


# --- the store -----------------------------------------------------------------------------------


def serve_store(host: str, port: int, seconds: float) -> tuple[Any, int]:
    """Serve a store on this address only; return it and its port."""
    try:
        # TCPStore itself would listen on every address of the machine.
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}.",
            "Name an address of this machine, and a free port (0 uses any).",
        ) from error
    port = listener.getsockname()[1]
    limit = timedelta(seconds=seconds)
    descriptor = listener.detach()  # the store closes it
    store = dist.TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


def connect_store(
    place: Place, watch: Callable[[], None] = never_give_up, seconds: float = 0.0
) -> tuple[Any, socket.socket]:
    """Connect to a store that begins to listen within `seconds`. Return it, and a connection that
    stays idle: it ends in the moment in which the store's process dies."""
    line: socket.socket | None = None
    reason = ""

    def connect() -> bool:
        nonlocal line, reason
        try:
            line = socket.create_connection((place.host, place.port), _CONNECT_SECONDS)
        except (OSError, ValueError) as error:  # ValueError: a malformed host name
            reason = getattr(error, "strerror", None) or str(error)
        return line is not None

    # Without a listener, the store's own client retries until its timeout, twice.
    if not wait_for(connect, seconds, watch, _WATCH_SECONDS) or line is None:
        raise BrokenOff(
            f"No trainer listens at {place.host}:{place.port} ({reason}).",
            "Check this address, and that workers reach it.",
        )
    line.setblocking(False)
    try:
        # By its number of ranks, the client announces itself to a server that waits for them.
        ranks, limit = place.receivers + 1, timedelta(seconds=place.init_seconds)
        store = dist.TCPStore(place.host, place.port, ranks, False, limit, use_libuv=False)
        store.set_timeout(timedelta(seconds=place.step_seconds))
    except RuntimeError as error:
        line.close()
        raise BrokenOff(f"The store at {place.host}:{place.port}: {_shorten(error)}.") from None
    return store, line


def find_address_towards(host: str, port: int) -> str:
    """Return the address by which this machine reaches another, and is reached from there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket sends nothing
        return str(probe.getsockname()[0])


# --- the group -----------------------------------------------------------------------------------


class Group:
    """A rank's membership.

    Nothing but this object references the backend or its pending work, so that `close` ends both
    even while somebody keeps an exception and the frames in its traceback."""

    def __init__(
        self,
        backend: Gloo | Nccl,
        step_seconds: float,
        watch: Callable[[], None] = never_give_up,
        line: socket.socket | None = None,
    ) -> None:
        """`watch` raises to give up. It is called regularly: gloo lets a rank that has half of a
        tensor wait for ever when its sender is gone, and NCCL waits for ever for any rank that
        died. `line` is a connection to rank 0, unless this is rank 0."""
        self.device = backend.device
        self._backend: Any = backend
        self._seconds, self._watch, self._line = step_seconds, watch, line
        self._work: Any = None

    def watch(self) -> None:
        """Raise if the caller gives up, or rank 0 is gone."""
        self._watch()
        if _has_ended(self._line):
            raise BrokenOff("The trainer is gone.")

    def broadcast(self, flat: Tensor) -> None:
        """Send bytes from rank 0, or receive them; every rank calls this with as many."""
        if flat.numel():
            self._try(lambda: self._start(flat))
            if not wait_for(lambda: self._try(self._has_arrived), self._seconds, self.watch):
                raise BrokenOff(f"Nothing moved for {self._seconds:g} s.")
            self._work = None

    def close(self) -> None:
        """Leave the group; a broadcast under way breaks off.

        That may take as long as a lost rank is waited for, so it happens on another thread. The
        bytes of the broadcast stay in memory until it has ended."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
        if self._backend is None:
            return
        last_references, is_idle = [self._backend, self._work], self._work is None
        self._backend = self._work = None

        def end() -> None:
            last_references[0].abort()
            last_references.clear()  # gloo waits here, until its work has ended

        ending = start_thread("rollway-group-end", end)
        if is_idle:
            wait_for(ending.done, _END_SECONDS)

    def _start(self, flat: Tensor) -> None:
        self._work = self._backend.broadcast(flat, self._seconds)

    def _has_arrived(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises the error of a broadcast that failed
        return True

    def _try(self, call: Callable[[], T]) -> T:
        """Make a call of the backend; raise its error anew, since a traceback would keep it."""
        problem = "this rank has left the group"
        try:
            result = call()
            if self._backend is not None:  # else another thread has closed it
                return result
        except (AttributeError, RuntimeError) as error:
            if self._backend is not None:
                problem = _shorten(error)
        self.watch()  # if somebody gave up or rank 0 is gone, that is the cause
        raise BrokenOff(f"The broadcast broke off: {problem}.")


def send(group: Group, messages: Iterable[Tensor]) -> int:
    """Broadcast messages from rank 0, and return their bytes."""
    nbytes = 0
    for flat in messages:
        group.broadcast(flat)
        nbytes += flat.nbytes
    return nbytes


def form_group(
    place: Place,
    rank: int,
    store: Any,
    device: torch.device,
    watch: Callable[[], None],
    line: socket.socket | None = None,
) -> Group:
    """Form a group on a store, together with all other ranks."""
    ranks, seconds = place.receivers + 1, place.init_seconds
    if device.type == "cpu":
        address = place.host if rank == 0 else find_address_towards(place.host, place.port)
        return Group(Gloo(store, rank, ranks, address, seconds), place.step_seconds, watch, line)
    if rank == 0:
        unique_id = Nccl.make_id()
        store.set(UNIQUE_ID, write_unique_id(unique_id))
    else:
        if not wait_for(lambda: store.check([UNIQUE_ID]), seconds, watch, _WATCH_SECONDS):
            raise BrokenOff(f"The trainer sent no NCCL id within {seconds:g} s.")
        unique_id = read_unique_id(store.get(UNIQUE_ID))
    return Group(
        Nccl(unique_id, rank, ranks, device, seconds, watch), place.step_seconds, watch, line
    )


def write_unique_id(unique_id: bytes) -> bytes:
    """Return NCCL's id as vLLM pickles its C structure, also without vLLM."""
    names = "".join(
        f"c{module}\n{name}\n" for module, name in (("_ctypes", "_unpickle"), _STRUCTURE)
    )
    # Protocol 3: _unpickle(ncclUniqueId, ({}, b"…")).
    return b"\x80\x03" + names.encode() + b"}C" + bytes([ID_BYTES]) + unique_id + b"\x86\x86R."


def read_unique_id(raw: bytes) -> bytes:
    """Return NCCL's id from vLLM's pickle of a C structure, as plain bytes."""
    named = {_STRUCTURE: "id", ("_ctypes", "_unpickle"): lambda kind, state: (kind, state)}
    match read_pickle(raw, "the trainer", named):
        case ("id", ({}, bytes(unique_id))) if len(unique_id) == ID_BYTES:
            return unique_id
    raise WeightsError("The trainer's store has no NCCL id of vLLM's.")


def _has_ended(line: socket.socket | None) -> bool:
    try:
        # The store never writes to a connection that asks for nothing.
        return line is not None and not line.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _shorten(error: Exception) -> str:
    """Return the message without the backend's source location and advice."""
    message = re.sub(r"^\[[^]]*\] ?", "", str(error)).partition("\n")[0]
    return message.partition(". This is typically")[0].rstrip(". ")[:300]


# --- its backends --------------------------------------------------------------------------------


class Gloo:
    """gloo between CPUs, as torch has it; gloo itself keeps the time limits."""

    device = torch.device("cpu")

    def __init__(self, store: Any, rank: int, ranks: int, address: str, seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        # By default, gloo uses any address that the host's own name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=seconds)
        problem = ""
        try:
            store = dist.PrefixStore("group", store)
            self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, options)
        except RuntimeError as error:
            problem = _shorten(error)
        # Raise outside of `except`: the frames of the first error would keep a half-made group.
        if problem:
            raise BrokenOff(f"The group did not form within {seconds:g} s: {problem}.")

    def broadcast(self, flat: Tensor, seconds: float) -> Any:
        return self._group.broadcast(flat, 0, timedelta(seconds=seconds))

    def abort(self) -> None:
        """Do nothing: a group ends when nobody references it."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Nccl:
    """NCCL between GPUs, by its own library, which torch has loaded.

    The other ways of it are no use here: trainers have no vLLM, torch's process group has a
    watchdog that ends a process after the death of a rank, and forms with torch's alone."""

    _FLOAT32, _UINT8, _SUM = 7, 1, 0

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        ranks: int,
        device: torch.device | None = None,
        seconds: float = 600.0,
        watch: Callable[[], None] = never_give_up,
    ) -> None:
        """Form the communicator with all others, on this thread's GPU by default."""
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._library = _load_nccl()
        self._comm = ctypes.c_void_p()
        self._bytes: Tensor | None = None
        # Broadcasts have a stream of their own, so that they delay no other work.
        self._stream = torch.cuda.Stream(self.device)
        # On a thread: NCCL waits for ever for a rank that does not come.
        forming = start_thread("rollway-group-nccl", lambda: self._form(unique_id, rank, ranks))
        try:
            is_formed = lambda: forming.done() and forming.result().is_completed()  # noqa: E731
            if not wait_for(is_formed, seconds, watch):
                raise BrokenOff(f"The group did not form within {seconds:g} s.")
        except BaseException:
            # Also if it forms after all; on a thread, because this too may wait for a lost rank.
            forming.add_done_callback(lambda _: start_thread("rollway-group-end", self.abort))
            raise

    @staticmethod
    def make_id() -> bytes:
        unique_id = _UniqueId()
        _check_status("ncclGetUniqueId", _load_nccl().ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    def broadcast(self, flat: Tensor, seconds: float) -> Any:
        """Send bytes, or receive them into `flat`. NCCL broadcasts bytes, whatever the dtype is."""
        flat = flat.to(self.device)
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            return self._enqueue("ncclBroadcast", flat, flat.nbytes, self._UINT8, 0)

    def is_completed(self) -> bool:
        """Return whether the last call has ended. Raise if this rank has left the group, or the
        connection to another rank broke."""
        is_over = bool(self._event.query())
        # Afterwards: what was aborted is over too.
        comm, status = self._comm, ctypes.c_int()
        if not comm:
            raise BrokenOff("This rank has left the group.")
        asked = self._library.ncclCommGetAsyncError(comm, ctypes.byref(status))
        _check_status("ncclCommGetAsyncError", asked)
        _check_status("NCCL", status.value)
        return is_over

    def wait(self) -> None:
        """Let go of the bytes; a stream has no error of its own."""
        self._bytes = None

    def abort(self) -> None:
        """Leave the group; a broadcast ends with an error on this rank; others notice by an error,
        their watch, or the time limit."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def _form(self, unique_id: bytes, rank: int, ranks: int) -> Self:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            given, comm = _UniqueId.from_buffer_copy(unique_id), ctypes.byref(self._comm)
            status = self._library.ncclCommInitRank(comm, ranks, given, rank)
            _check_status("ncclCommInitRank", status)
            # vLLM's communicators do the same, to see that the group works.
            first = torch.zeros(1, device=self.device)
            return self._enqueue("ncclAllReduce", first, 1, self._FLOAT32, self._SUM)

    def _enqueue(self, name: str, flat: Tensor, count: int, dtype: int, how: int) -> Self:
        """Start a broadcast from rank `how`, or a reduction by operation `how`; keep the bytes."""
        call, stream = getattr(self._library, name), ctypes.c_void_p(self._stream.cuda_stream)
        address, size = ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(count)
        _check_status(name, call(address, address, size, dtype, how, self._comm, stream))
        self._bytes, self._event = flat, torch.cuda.Event()
        self._event.record(self._stream)
        return self


def _load_nccl() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or _NCCL)  # as vLLM's ranks do
    except OSError as error:
        raise WeightsError(
            f"NCCL cannot be loaded: {error}.", "Publish tensors in CPU memory."
        ) from error


def _check_status(name: str, status: int) -> None:
    if status:
        describe = _load_nccl().ncclGetErrorString
        describe.restype = ctypes.c_char_p
        raise BrokenOff(
            f"{name} failed: {describe(status).decode()}.", "NCCL_DEBUG=INFO says more."
        )
