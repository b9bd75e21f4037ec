"""A NIXL agent as this package uses it: registered memory, and reads that end in bounded time.

NIXL is imported when the first agent is created. Its progress thread would keep a whole core busy,
so it is off: reads over shared memory or RDMA do not need it. Connecting does need progress, so
each agent polls ten times a second, which costs almost no CPU. Plain TCP needs NIXL's own thread,
and is slower than other transports over the same network.
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
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError

ErrorHandling = Literal["none", "peer"]
"""With `none`, processes of one machine read each other's memory directly, and NIXL notices when
one dies. Between machines, `peer` makes the network report a dead peer."""
Memory = Literal["DRAM", "VRAM"]
Block = tuple[int, int, int]
"""A run of bytes: its address, its length, and the number of its device."""
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


class Read(NamedTuple):
    """Blocks of a peer's memory, and the blocks of this process's memory that they go into."""

    peer: str
    remote: tuple[Memory, Sequence[Block]]
    local: tuple[Memory, Sequence[Block]]


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
        self._closed = threading.Event()
        self._abandoned: list[Any] = []
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        options: dict[str, str] = {"ucx_error_handling_mode": error_handling}
        if net_devices:
            check_devices(net_devices)
            options["ucx_devices"] = ",".join(net_devices)
        with _describe_errors("cannot start"):
            self._agent = api.nixl_agent(name, config)
            self._agent.create_backend("UCX", options)
        threading.Thread(target=self._listen, name="rollway-nixl", daemon=True).start()

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

    def read(self, reads: Sequence[Read], timeout: float) -> None:
        """Run these reads side by side; raise if one fails, or if not all end in time."""
        handles = {read.peer: self._prepare(read) for read in reads}
        try:
            self._run(handles, timeout)
        except TimedOut:
            self._abandoned.append(handles)  # to release them would not end the reads
            handles = {}
            raise
        finally:
            for handle in handles.values():
                with suppress(Exception):  # another read failed, and this one goes on
                    handle.release()

    def close(self) -> None:
        self._closed.set()

    def _prepare(self, read: Read) -> Any:
        with self._lock, _describe_errors(f"cannot read the memory that {read.peer} announced"):
            local, remote = (
                self._agent.get_xfer_descs(np.array(blocks, dtype=np.uint64), memory)
                for memory, blocks in (read.local, read.remote)
            )
            return self._agent.initialize_xfer("READ", local, remote, read.peer)

    def _run(self, handles: dict[str, Any], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        call, pending = self._agent.transfer, list(handles)
        while pending := [peer for peer in pending if self._is_pending(call, peer, handles[peer])]:
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"{pending[0]} sent nothing within {timeout:g} s.",
                    "Check that it still runs. Without RDMA between machines, publish by `files`.",
                )
            time.sleep(_POLL_SECONDS)
            call = self._agent.check_xfer_state

    def _is_pending(self, call: Any, peer: str, handle: Any) -> bool:
        with self._lock, _describe_errors(f"cannot read from {peer}: it has ended, or is away"):
            state = str(call(handle))
            if state == "ERR":
                raise RuntimeError("the transfer failed")
        return state == "PROC"

    def _listen(self) -> None:
        """Let peers connect: NIXL makes progress only while it is called."""
        while not self._closed.wait(_LISTEN_SECONDS):
            with self._lock, suppress(Exception):  # a dead peer must not cut off the others
                self._agent.get_new_notifs()


@dataclass(slots=True)
class Pool:
    """Memory of one device that is registered with an agent. It grows when needed."""

    agent: Agent
    memory: Tensor | None = None
    handles: list[Any] = field(default_factory=list)
    version: int = -1

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return `nbytes` of the memory; registering is slow, so it is reused if it suffices."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        memory = self.memory
        if memory is None or memory.numel() < nbytes or memory.device != device:
            self.release()
            memory = self.memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
            self.handles = [self.agent.register(memory.data_ptr(), memory.numel(), device)]
        return memory[:nbytes]

    def release(self) -> None:
        for handle in self.handles:
            self.agent.deregister(handle)
        self.memory, self.handles = None, []


@contextmanager
def _describe_errors(what: str) -> Iterator[None]:
    """Raise NIXL's errors as `WeightsError`, which says what NIXL cannot do."""
    try:
        yield
    except Exception as error:  # NIXL's errors have no common base class
        raise WeightsError(f"NIXL {what} ({error}).") from error
