"""A NIXL agent as this package uses it: registered memory, prepared reads, bounded waits.

NIXL is imported when an agent is made, not before. Its progress thread turns a whole core and is
off: reads over shared memory or RDMA need none, and what little else there is (the first contact,
notifications) moves on whenever somebody asks for notices. Plain TCP needs it (`progress=True`).
"""

from __future__ import annotations

import importlib
import os
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
"""`none` lets processes of one machine read each other's memory directly; NIXL notices there when
one dies. Between machines `peer` makes the network report it."""
Memory = Literal["DRAM", "VRAM"]
Numbers = NDArray[np.uint64]
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_LOOK_SECONDS = 0.0005
_PULSE_SECONDS = 0.1
Tell = Callable[[str, bytes], None]
"""Called with who sent a notice, and the notice."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an agent talks to others; both ends of a transfer must agree on `error_handling`."""

    error_handling: ErrorHandling = "none"
    net_devices: tuple[str, ...] = ()
    """NICs to use, as UCX calls them (`mlx5_0:1`); all when empty, or `UCX_NET_DEVICES`."""
    progress: bool = False


def import_nixl() -> Any:
    """NIXL's Python API. By the name of its CUDA build: `nixl` alone imports torch to choose."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what it logs, it also raises
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise UsageError("NIXL is not installed.", "pip install rollway[nixl]")


def check_devices(names: Sequence[str], root: Path = Path("/sys/class")) -> None:
    """UCX takes any name without a word, and then uses another way."""
    there = {path.name for kind in ("infiniband", "net") for path in (root / kind).glob("*")}
    for name in names:
        if there and name.partition(":")[0] not in there:
            raise UsageError(
                f"This machine has no network device {name}.", f"It has {', '.join(sorted(there))}."
            )


@dataclass(slots=True)
class Region:
    """Memory that other agents may read."""

    address: int
    nbytes: int
    descriptors: Any


@dataclass(slots=True)
class Prepared:
    """A read that can be done again and again."""

    peer: str
    handle: Any
    lists: tuple[Any, Any]

    def release(self) -> None:
        with suppress(Exception):  # it may still be under way: then NIXL keeps it
            self.handle.release()
            for one in self.lists:
                one.release()


class Agent:
    """One NIXL agent; its calls may come from several threads."""

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
        with _told("cannot start"):
            self._agent = api.nixl_agent(name, config)
            self._agent.create_backend("UCX", options)

    def register(self, address: int, nbytes: int, memory: Memory, device: int = 0) -> Region:
        with self._lock, _told(f"cannot register {nbytes} bytes"):
            descriptors = self._agent.register_memory([(address, nbytes, device, "")], memory)
        return Region(address, nbytes, descriptors)

    def deregister(self, region: Region) -> None:
        with self._lock, suppress(Exception):  # the agent itself may be broken by now
            self._agent.deregister_memory(region.descriptors)

    def metadata(self) -> bytes:
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        with self._lock, _told("cannot read the description of a source"):
            return str(self._agent.add_remote_agent(metadata).decode())

    def remove_peer(self, peer: str) -> None:
        with self._lock, suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def prepare(
        self, peer: str, local: tuple[Memory, Numbers], remote: tuple[Memory, Numbers]
    ) -> Prepared:
        """A read of rows of (address, bytes, device) from a peer, into the rows of `local`."""
        with self._lock, _told(f"cannot read the memory that {peer} announced"):
            here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local[1], local[0])
            there = self._agent.prep_xfer_dlist(peer, remote[1], remote[0])
            all_of_it = np.arange(len(local[1]), dtype=np.int32)
            handle = self._agent.make_prepped_xfer("READ", here, all_of_it, there, all_of_it, b"")
        return Prepared(peer, handle, (here, there))

    def read(self, reads: Sequence[Prepared], timeout: float) -> None:
        """Do these reads side by side; raise when one fails, or not all end in time."""
        deadline = time.monotonic() + timeout
        waiting = []
        for one in reads:
            if self._state(self._agent.transfer, one) == "PROC":
                waiting.append(one)
        while waiting:
            waiting = [o for o in waiting if self._state(self._agent.check_xfer_state, o) == "PROC"]
            if waiting and time.monotonic() > deadline:
                raise TimedOut(
                    f"{waiting[0].peer} gave nothing within {timeout:g} s.",
                    "See whether it still runs; over plain TCP both ends need progress=True.",
                )
            if waiting:
                time.sleep(_LOOK_SECONDS)

    def _state(self, call: Any, one: Prepared) -> str:
        with self._lock, _told(f"cannot read from {one.peer}: it has ended, or is out of reach"):
            state = str(call(one.handle))
            if state == "ERR":
                raise RuntimeError("the transfer failed")
        return state

    def notify(self, peer: str, message: bytes) -> None:
        with self._lock, _told(f"cannot notify {peer}"):
            self._agent.send_notif(peer, message)

    def hear(self, tell: Tell) -> None:
        """Tell what others sent since the last time; also moves NIXL's own business on."""
        with self._lock, _told("cannot look for notices"):
            found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        for peer, messages in found.items():
            for message in messages:
                tell(peer, message)

    def listen(self, tell: Tell) -> None:
        """Hear every now and then, in a thread of its own, which costs next to nothing."""

        def run() -> None:
            while not self._stopped.wait(_PULSE_SECONDS):
                with suppress(WeightsError):  # one that died must not keep us from the others
                    self.hear(tell)

        threading.Thread(target=run, name="rollway-nixl", daemon=True).start()

    def stop_listening(self) -> None:
        self._stopped.set()


class TimedOut(WeightsError):
    """A read that was given up may still write: its memory must not be used again."""


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # NIXL's errors have no base of their own
        raise WeightsError(f"NIXL {what} ({error}).") from error
