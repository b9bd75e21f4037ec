"""Starts workers that join a running stack: copies of one of its workers on other ports."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

from rollway.chaos.faults import Injector, session
from rollway.fleet.discovery import RlListing, discover
from rollway.http import Http
from rollway.processes import ProcessId, end
from rollway.stack.lease import Lease
from rollway.stack.plan import LOOPBACK
from rollway.stack.state import StackDir


class Joiner:
    """Starts such workers, waits until they are listed, and stops them."""

    def __init__(self, stack: str, http: Http) -> None:
        self._stack = stack
        self._http = http
        self._lease = Lease()
        self._waiting: dict[int, subprocess.Popen[bytes]] = {}
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a worker with the first worker's command line and environment."""
        state = StackDir(self._stack).read()
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
        state = StackDir(self._stack).read()
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
