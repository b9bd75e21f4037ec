"""Faults during a refit, injected into real processes, files and connections.

Each fault strikes at one step of the refit protocol. `Injector` observes the fleet's steps and
injects the armed fault at the first worker that reaches its step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from chaos.target import Target
from rollway.errors import Unreachable
from rollway.fleet.workers import RlListing, Worker, discover
from rollway.http import Http
from rollway.processes import ProcessId, end
from rollway.stack.commands import LOOPBACK
from rollway.stack.locks import Lease
from rollway.weights.checkpoint import STABLE

STEPS = ("preflight", "pause", "update", "flush", "verify", "open", "resume")
BEFORE = "before"
SHORT_SECONDS = 1.5

WHERE: dict[str, tuple[str, ...]] = {
    "none": (BEFORE,),
    "kill_worker": STEPS,
    "stop_worker": STEPS,
    "hang_worker": STEPS,
    "worker_leave": STEPS,
    "worker_join": (BEFORE,),
    "slow_disk": ("update",),
    "missing_checkpoint": (BEFORE, "update"),
    "corrupt_checkpoint": (BEFORE, "update"),
    "half_checkpoint": (BEFORE, "update"),
    "wrong_checkpoint": (BEFORE,),
    "connection_reset": STEPS,
    "frontend_restart": STEPS,
    "frontend_stall": STEPS,
    "supervisor_crash": STEPS,
    "refit_cancelled": STEPS,
}
"""Every fault, and the steps at which it can strike."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault at a step of the protocol."""

    fault: str
    step: str


class ResettingHttp(Http):
    """Sends real requests. When armed, it resets the next connection after the request was sent and
    before an answer arrives, so the server may or may not have acted on it."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    async def before_request(self, method: str, url: str, body: Any) -> None:
        if not self.armed:
            return
        self.armed = False
        parts = urlsplit(url)
        data = b"" if body is None else msgspec.json.encode(body)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"{method} {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        await asyncio.sleep(0.05)
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        raise Unreachable(f"{method} {url} failed: connection reset (injected).")


@dataclass(slots=True)
class Injector:
    """Injects one fault at a time."""

    target: Target
    http: ResettingHttp
    join: Callable[[], Awaitable[None]]
    strike: Strike = Strike("none", BEFORE)
    path: Path | None = None
    """The checkpoint of this refit, a copy that may be damaged."""
    refit: asyncio.Task[Any] | None = None
    struck: bool = False
    joined: dict[int, int] = field(default_factory=dict)
    """Workers that chaos itself started: instance id to pid."""
    _stopped: list[ProcessId] = field(default_factory=list)
    _later: list[asyncio.Task[None]] = field(default_factory=list)

    async def on_step(self, step: str, worker: Worker) -> None:
        if not self.struck and self.strike.step == step:
            self.struck = True
            await self._act(worker)

    async def before(self) -> None:
        """Inject a fault that comes before the refit."""
        if self.strike.step == BEFORE:
            self.struck = True
            await self._act(None)

    async def after(self) -> None:
        """Continue the processes that were stopped."""
        for task in self._later:
            await task
        self._later.clear()
        self._continue()

    async def _act(self, worker: Worker | None) -> None:
        fault = self.strike.fault
        if fault == "worker_join":
            await self.join()
        elif fault.endswith("_checkpoint"):
            self._damage(fault)
        elif fault == "connection_reset":
            self.http.armed = True
        elif fault == "refit_cancelled":
            assert self.refit is not None
            self.refit.cancel()
        elif fault == "frontend_stall":
            for frontend in self.target.find("frontend"):
                self._later.append(asyncio.create_task(self._stall(frontend.pid, 0.0)))
        elif fault == "frontend_restart":
            for frontend in self.target.find("frontend"):
                frontend.send(signal.SIGKILL)
        elif fault == "supervisor_crash":
            assert worker is not None
            self.target.kill_supervisor(worker)
        elif worker is not None:
            self._strike_worker(fault, worker)

    def _strike_worker(self, fault: str, worker: Worker) -> None:
        leader = self.pid_of(worker)
        if leader is None:
            return
        if fault == "kill_worker":
            os.kill(leader, signal.SIGKILL)
        elif fault == "worker_leave":
            os.kill(leader, signal.SIGTERM)
        elif fault == "hang_worker":
            self._stop(leader)
        else:
            # From outside, a slow disk looks like a worker that stalls while it reads.
            delay = 0.005 if fault == "slow_disk" else 0.0
            self._later.append(asyncio.create_task(self._stall(leader, delay)))

    async def _stall(self, leader: int, delay: float) -> None:
        await asyncio.sleep(delay)
        self._stop(leader)
        await asyncio.sleep(SHORT_SECONDS)
        self._continue()

    def _stop(self, leader: int) -> None:
        self._stopped = session(leader)
        for process in self._stopped:
            process.send(signal.SIGSTOP)

    def _continue(self) -> None:
        for process in self._stopped:
            process.send(signal.SIGCONT)
        self._stopped = []

    def pid_of(self, worker: Worker) -> int | None:
        if worker.instance_id in self.joined:
            return self.joined[worker.instance_id]
        return self.target.find_pid(worker)

    def _damage(self, fault: str) -> None:
        assert self.path is not None
        weights = self.path / "model.safetensors"
        if fault == "missing_checkpoint":
            shutil.rmtree(self.path)
            return
        data = bytearray(weights.read_bytes())
        if fault == "half_checkpoint":
            del data[len(data) // 2 :]
        elif fault == "corrupt_checkpoint":
            data[-40:] = os.urandom(40)
        else:  # wrong_checkpoint: a valid file with another shape of the same size
            (self.path / STABLE).unlink(missing_ok=True)
            data = bytearray(_transpose(bytes(data)))
        weights.write_bytes(data)


def _transpose(data: bytes) -> bytes:
    """Return a weight file whose header has the sides of the first matrix swapped."""
    (length,) = struct.unpack("<Q", data[:8])
    header = msgspec.json.decode(data[8 : 8 + length])
    for name, fields in header.items():
        shape = fields.get("shape", []) if name != "__metadata__" else []
        if len(shape) == 2 and shape[0] != shape[1]:
            fields["shape"] = shape[::-1]
            break
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _find_descendants(leader: int) -> list[ProcessId | None]:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(leader).children(recursive=True)
        return [ProcessId.of(child.pid) for child in children]
    return []


def session(leader: int) -> list[ProcessId]:
    """Return all processes of a worker: they share the session of their leader."""
    members = []
    for process in [*_find_descendants(leader), ProcessId.of(leader)]:
        with contextlib.suppress(ProcessLookupError):
            if process is not None and os.getsid(process.pid) == leader:
                members.append(process)
    return members


# --- workers that join ---------------------------------------------------------------------------


class Joiner:
    """Starts workers that join the stack, copies of one of its workers on other ports; waits until
    they are listed, and stops them."""

    def __init__(self, target: Target, http: Http) -> None:
        self._target = target
        self._http = http
        self._lease = Lease()
        self._waiting: dict[int, subprocess.Popen[bytes]] = {}
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a worker with the first worker's command line and environment."""
        state = self._target.read_state()
        worker = next((p for p in state.processes if p.role == "worker"), None) if state else None
        if worker is None or worker.pid is None:
            return
        proc = Path("/proc") / str(worker.pid)
        argv = (proc / "cmdline").read_bytes().decode().split("\0")[:-1]
        entries = (proc / "environ").read_bytes().decode().split("\0")
        env = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        port = self._lease.reserve_port(0, LOOPBACK, "a joining worker's admin port")
        events = self._lease.reserve_port(0, "0.0.0.0", "a joining worker's KV-event port")
        env["DYN_SYSTEM_PORT"] = str(port)
        if "VLLM_NIXL_SIDE_CHANNEL_PORT" in env:
            host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]
            kv = self._lease.reserve_port(0, host, "a joining worker's side channel for KV")
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(kv)
        argv = [re.sub(r"tcp://\*:\d+", f"tcp://*:{events}", argument) for argument in argv]
        with Path(worker.log).with_name("joined.log").open("ab") as log:
            child = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._children.append(child)
        self._waiting[port] = child

    async def are_listed(self, injector: Injector) -> bool:
        """Return whether all started workers are listed, or have died."""
        state = self._target.read_state()
        listed = await discover(self._http, RlListing(state.rl)) if state else []
        for port, child in list(self._waiting.items()):
            if child.poll() is not None:
                del self._waiting[port]
            for worker in listed:
                if worker.admin_url.endswith(f":{port}") and worker.error is None:
                    injector.joined[worker.instance_id] = child.pid
                    self._waiting.pop(port, None)
        return not self._waiting

    async def end_all(self) -> None:
        for child in self._children:
            mine = session(child.pid)
            if child.poll() is None:
                os.kill(child.pid, signal.SIGTERM)
            await asyncio.to_thread(end, partial(_alive, mine), 3.0)
            child.wait()
        self._children.clear()
        self._waiting.clear()
        self._lease.release()


def _alive(candidates: list[ProcessId]) -> set[ProcessId]:
    return {process for process in candidates if process.alive}
