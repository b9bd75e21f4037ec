"""A NIXL agent as this package uses it: registered memory, prepared reads, bounded waits.

NIXL is imported when the first agent is created. Its progress thread would keep a whole core busy,
so it is off: reads over shared memory or RDMA do not need it. Connecting and notifications do
progress, but only while `Agent.poll` runs. Plain TCP needs the thread, and is slower than other
transports over the same network.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollway.errors import UsageError, WeightsError

ErrorHandling = Literal["none", "peer"]
"""With `none`, processes of one machine read each other's memory directly, and NIXL notices when
one dies. Between machines, `peer` makes the network report a dead peer."""
Memory = Literal["DRAM", "VRAM"]
Numbers = NDArray[np.int64]
End = tuple[Memory, int, Numbers]
"""One end of reads: the kind of memory, its device, and the addresses."""
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_POLL_SECONDS = 0.0005
_LISTEN_SECONDS = 0.1


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


def choose_devices(pin: str, device: torch.device, root: Path = Path("/sys")) -> tuple[str, ...]:
    """Return the NICs for memory of a device, by their UCX names: those of the device's NUMA node
    for `auto`, all (an empty list) for `off`, or the one that is named."""
    if pin not in ("auto", "off"):
        return (pin if ":" in pin else f"{pin}:1",)
    if pin == "off" or device.type != "cuda":
        return ()
    properties: Any = torch.cuda.get_device_properties(device)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    node = _read_numa_node(root / "bus" / "pci" / "devices" / address)
    cards = sorted((root / "class" / "infiniband").glob("*"))
    near = [card.name for card in cards if _read_numa_node(card / "device") == node]
    return tuple(f"{name}:1" for name in near) if node is not None else ()


def _read_numa_node(device: Path) -> int | None:
    """Return the NUMA node of a device; None if the machine does not say."""
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def make_unique_name(kind: str) -> str:
    """Return a name for an agent that no other agent has, on any machine."""
    return f"{kind}-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def find_memory_kind(device: torch.device) -> tuple[Memory, int]:
    """Return NIXL's name for a device's memory, and the device's number."""
    if device.type == "cpu":
        return "DRAM", 0
    if device.type == "cuda":
        return "VRAM", device.index or 0
    raise UsageError(f"NIXL cannot read the memory of {device}.", "Publish from CPU or CUDA.")


@dataclass(slots=True)
class Prepared:
    """A read that can be repeated."""

    peer: str
    handle: Any
    lists: list[Any]

    def release(self) -> None:
        with suppress(Exception):  # it may still be in progress: then NIXL keeps it
            self.handle.release()
            for descriptors in self.lists:
                descriptors.release()


class TimedOut(WeightsError):
    """A read that was abandoned. It may still write, so its memory must not be used again."""


class Agent:
    """One NIXL agent; several threads may call it."""

    def __init__(
        self,
        name: str,
        error_handling: ErrorHandling,
        net_devices: Sequence[str] = (),
    ) -> None:
        """Both ends of a transfer must agree on `error_handling`.

        `net_devices` are NICs by their UCX names (`mlx5_0:1`); by default those of
        `UCX_NET_DEVICES`, or all."""
        api = import_nixl()
        self.error_handling: ErrorHandling = error_handling
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        options: dict[str, str] = {"ucx_error_handling_mode": error_handling}
        if net_devices:
            check_devices(net_devices)
            options["ucx_devices"] = ",".join(net_devices)
        with _describe_errors("cannot start"):
            self._agent = api.nixl_agent(name, config)
            self._agent.create_backend("UCX", options)

    def register(self, address: int, nbytes: int, device: torch.device) -> Any:
        """Let other agents read memory; return the handle to `deregister` it."""
        memory, index = find_memory_kind(device)
        with self._lock, _describe_errors(f"cannot register {nbytes} bytes"):
            return self._agent.register_memory([(address, nbytes, index, "")], memory)

    def deregister(self, handle: Any) -> None:
        with self._lock, suppress(Exception):  # the agent itself may be broken
            self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """Return the description of this agent and its memory, which a peer needs to read it."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Make the agent that `metadata` describes known here; return its name."""
        with self._lock, _describe_errors("cannot read the description of a source"):
            return str(self._agent.add_remote_agent(metadata).decode())

    def remove_peer(self, peer: str) -> None:
        with self._lock, suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def prepare(self, peer: str, local: End, remote: End, sizes: Numbers) -> Prepared:
        """Prepare a read from a peer; addresses at both ends and sizes correspond."""
        indices = np.arange(len(sizes), dtype=np.int32)
        with self._lock, _describe_errors(f"cannot read the memory that {peer} announced"):
            lists = []
            for owner, end in (("NIXL_INIT_AGENT", local), (peer, remote)):
                memory, device, addresses = end
                rows = np.column_stack([addresses, sizes, np.full_like(sizes, device)])
                lists.append(self._agent.prep_xfer_dlist(owner, rows.astype(np.uint64), memory))
            here, there = lists
            handle = self._agent.make_prepped_xfer("READ", here, indices, there, indices, b"")
        return Prepared(peer, handle, lists)

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
                    "Check that it still runs. Without RDMA between machines, publish by `files`.",
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

    def poll(self) -> None:
        """Drop new notifications; NIXL sends, receives and connects only meanwhile."""
        with self._lock, _describe_errors("cannot poll notifications"):
            self._agent.get_new_notifs()

    def listen(self) -> None:
        """Poll every 0.1 s in a background thread, which costs almost no CPU."""

        def run() -> None:
            while not self._stopped.wait(_LISTEN_SECONDS):
                with suppress(WeightsError):  # a dead peer must not cut off the others
                    self.poll()

        threading.Thread(target=run, name="rollway-nixl", daemon=True).start()

    def stop_listening(self) -> None:
        self._stopped.set()


@dataclass(slots=True)
class Pool:
    """Memory of one device that is registered with an agent. It grows when needed."""

    agent: Agent
    memory: Tensor | None = None
    handles: list[Any] = field(default_factory=list)
    version: int = -1

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory of at least `nbytes`; registering is slow, so it is reused if it fits."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        memory = self.memory
        if memory is None or memory.numel() < nbytes or memory.device != device:
            self.release()
            memory = self.memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
            self.handles = [self.agent.register(memory.data_ptr(), memory.numel(), device)]
        return memory

    def release(self) -> None:
        for handle in self.handles:
            self.agent.deregister(handle)
        self.memory, self.handles = None, []


@contextmanager
def _describe_errors(what: str) -> Iterator[None]:
    """Raise NIXL's errors as `WeightsError`, which says what NIXL cannot do."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # NIXL's errors have no common base class
        raise WeightsError(f"NIXL {what} ({error}).") from error
