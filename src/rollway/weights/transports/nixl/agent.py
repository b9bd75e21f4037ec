"""A NIXL agent as this package uses it: registered memory, prepared reads, bounded waits.

NIXL is imported when the first agent is made. Its progress thread keeps a whole core busy and is
off: reads over shared memory or RDMA do not need it, and the little else that must progress (the
first contact, notifications) does so whenever notifications are polled. Plain TCP needs the thread
(`progress=True`).
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollway.errors import UsageError, WeightsError

ErrorHandling = Literal["none", "peer"]
"""With `none`, processes of one machine read each other's memory directly, and NIXL notices when
one dies. Between machines, `peer` makes the network report a dead peer."""
Memory = Literal["DRAM", "VRAM"]
Numbers = NDArray[np.uint64]
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_POLL_SECONDS = 0.0005
_LISTEN_SECONDS = 0.1
OnMessage = Callable[[str, bytes], None]
"""Receives the sender of a notification, and the notification."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an agent talks to others; both ends of a transfer must agree on `error_handling`."""

    error_handling: ErrorHandling = "none"
    net_devices: tuple[str, ...] = ()
    """NICs by their UCX names (`mlx5_0:1`). Empty: those of `UCX_NET_DEVICES`, or all."""
    progress: bool = False


def import_nixl() -> Any:
    """Import NIXL's Python API by the name of its CUDA build: `nixl` would import torch first."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # it raises everything that it logs
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise UsageError("NIXL is not installed.", "pip install rollway[nixl]")


def check_devices(names: Sequence[str], root: Path = Path("/sys/class")) -> None:
    """Raise for an unknown network device: UCX would ignore the name and use another device."""
    devices = {path.name for kind in ("infiniband", "net") for path in (root / kind).glob("*")}
    for name in names:
        if devices and name.partition(":")[0] not in devices:
            raise UsageError(
                f"This machine has no network device {name}.",
                f"It has {', '.join(sorted(devices))}.",
            )


def unique_name(kind: str) -> str:
    """Return a name for an agent that no other agent has, on any machine."""
    return f"{kind}-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


@dataclass(slots=True)
class Region:
    """Memory that other agents may read."""

    address: int
    nbytes: int
    descriptors: Any


@dataclass(slots=True)
class Prepared:
    """A read that can be repeated."""

    peer: str
    handle: Any
    lists: tuple[Any, Any]

    def release(self) -> None:
        with suppress(Exception):  # it may still be in progress: then NIXL keeps it
            self.handle.release()
            for descriptors in self.lists:
                descriptors.release()


class Agent:
    """One NIXL agent; several threads may call it."""

    def __init__(self, name: str, settings: Settings) -> None:
        api = import_nixl()
        self.name = name
        self.settings = settings
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        config = api.nixl_agent_config(enable_prog_thread=settings.progress, backends=[])
        options: dict[str, str] = {"ucx_error_handling_mode": settings.error_handling}
        if settings.net_devices:
            check_devices(settings.net_devices)
            options["ucx_devices"] = ",".join(settings.net_devices)
        with _describe_errors("cannot start"):
            self._agent = api.nixl_agent(name, config)
            self._agent.create_backend("UCX", options)

    def register(self, address: int, nbytes: int, memory: Memory, device: int = 0) -> Region:
        with self._lock, _describe_errors(f"cannot register {nbytes} bytes"):
            descriptors = self._agent.register_memory([(address, nbytes, device, "")], memory)
        return Region(address, nbytes, descriptors)

    def deregister(self, region: Region) -> None:
        with self._lock, suppress(Exception):  # the agent itself may be broken
            self._agent.deregister_memory(region.descriptors)

    def metadata(self) -> bytes:
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        with self._lock, _describe_errors("cannot read the description of a source"):
            return str(self._agent.add_remote_agent(metadata).decode())

    def remove_peer(self, peer: str) -> None:
        with self._lock, suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def prepare(
        self, peer: str, local: tuple[Memory, Numbers], remote: tuple[Memory, Numbers]
    ) -> Prepared:
        """Prepare a read from a peer; rows of (address, bytes, device) at both ends correspond."""
        with self._lock, _describe_errors(f"cannot read the memory that {peer} announced"):
            here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local[1], local[0])
            there = self._agent.prep_xfer_dlist(peer, remote[1], remote[0])
            indices = np.arange(len(local[1]), dtype=np.int32)
            handle = self._agent.make_prepped_xfer("READ", here, indices, there, indices, b"")
        return Prepared(peer, handle, (here, there))

    def read(self, reads: Sequence[Prepared], timeout: float) -> None:
        """Run these reads side by side; raise if one fails, or if not all end in time."""
        deadline = time.monotonic() + timeout
        pending = [read for read in reads if self._is_pending(self._agent.transfer, read)]
        while pending:
            check = self._agent.check_xfer_state
            pending = [read for read in pending if self._is_pending(check, read)]
            if pending and time.monotonic() > deadline:
                raise TimedOut(
                    f"{pending[0].peer} sent nothing within {timeout:g} s.",
                    "Check that it still runs; over plain TCP both ends need progress=True.",
                )
            if pending:
                time.sleep(_POLL_SECONDS)

    def _is_pending(self, call: Any, read: Prepared) -> bool:
        what = f"cannot read from {read.peer}: it has ended, or is out of reach"
        with self._lock, _describe_errors(what):
            state = str(call(read.handle))
            if state == "ERR":
                raise RuntimeError("the transfer failed")
        return state == "PROC"

    def notify(self, peer: str, message: bytes) -> None:
        with self._lock, _describe_errors(f"cannot notify {peer}"):
            self._agent.send_notif(peer, message)

    def poll(self, on_message: OnMessage) -> None:
        """Deliver the notifications since the last poll; NIXL also sends and connects meanwhile."""
        with self._lock, _describe_errors("cannot poll notifications"):
            received: dict[str, list[bytes]] = self._agent.get_new_notifs()
        for peer, messages in received.items():
            for message in messages:
                on_message(peer, message)

    def listen(self, on_message: OnMessage) -> None:
        """Poll every 0.1 s in a background thread, which costs almost no CPU."""

        def run() -> None:
            while not self._stopped.wait(_LISTEN_SECONDS):
                with suppress(WeightsError):  # a dead peer must not cut off the others
                    self.poll(on_message)

        threading.Thread(target=run, name="rollway-nixl", daemon=True).start()

    def stop_listening(self) -> None:
        self._stopped.set()


class TimedOut(WeightsError):
    """A read that was abandoned. It may still write, so its memory must not be used again."""


@contextmanager
def _describe_errors(what: str) -> Iterator[None]:
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # NIXL's errors have no common base class
        raise WeightsError(f"NIXL {what} ({error}).") from error
