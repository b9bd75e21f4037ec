"""The actor that runs a node's part of a stack.

    Head ── start, stop, read ──► Keeper ── spawns ──► supervisor ── runs ──► engines of this node
      ▲                             │
      └────── waits for its end ────┘     the Head died: stop the processes, then free the groups

A Keeper holds the lifelines of its supervisors. If it is killed, they stop their stacks themselves
(`rollway.stack.supervisor`). Ray kills the children of an actor that it ends, unless the actor has
a runtime environment that says otherwise; but with one, Ray imports itself twice for each actor,
half a second of CPU time. So supervisors are grandchildren.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollway.errors import RollwayError, StartError
from rollway.spec import StackSpec
from rollway.stack import local, logs, preset, running
from rollway.stack.locks import Lease
from rollway.stack.ray import cluster, groups
from rollway.stack.ray.node_check import find_problem
from rollway.stack.state import (
    StackDir,
    StackState,
    find_record_dir,
    is_ray_part,
    list_stacks,
    read_secret,
)

if TYPE_CHECKING:
    from rollway.fleet.workers import Worker

POLL_SECONDS = 0.1
_END_SECONDS = 60.0
_MAX_FOLLOWERS = 64
COPY_PREFIX = "node-"
"""Of the names of files in a record that were copied from other nodes."""
LARGEST_PIECE = 4 << 20
"""How many bytes of a node's record one call brings."""


class Keeper:
    """Runs the stacks of one run on one node."""

    def __init__(self, run_id: str, name: str, head: Any) -> None:
        import ray

        self._run_id = run_id
        self._name = name
        self._head = head
        self._names: set[str] = set()
        """The stacks that were started here, also those that still start."""
        self._starts: set[asyncio.Task[None]] = set()
        self._running: dict[str, local.RunningStack] = {}
        self._ports = Lease()
        self._followers: dict[str, logs.LogFollower] = {}
        self._stopping = threading.Event()
        self._stop_lock = asyncio.Lock()
        _show_gpus()
        self._me = ray.get_runtime_context().current_actor
        self._me.run.remote()  # before any call: the Head may die at once

    async def run(self) -> None:
        """Wait for the end of the Head; then leave nothing behind."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            await cluster.outlast(self._head.wait_until_over.remote)
        await self.stop()
        await asyncio.to_thread(self._remove_groups)
        ray.kill(self._me)

    async def examine(self, needs: dict[str, Any]) -> tuple[bool, tuple[str, str] | None]:
        """Clear what dead runs left on this node; return whether it has GPUs, and what of the
        `needs` of a stack it does not have."""
        await asyncio.to_thread(_clear_dead_parts)
        return bool(preset.list_gpus()), await asyncio.to_thread(find_problem, needs)

    async def lease_ports(self, host: str) -> tuple[int, int, int]:
        """Choose the ports of rank 0 of a replica over several nodes: where the ranks meet, a
        second one for data-parallel engines, and the admin port, which its supervisor reserves."""
        what, admin = "a port of a replica over several nodes", Lease()
        first, second = (self._ports.reserve_port(0, host, what) for _ in range(2))
        try:
            return first, second, admin.reserve_port(0, host, what)
        finally:
            admin.release()

    async def start(self, fields: dict[str, Any], after: list[str]) -> dict[str, Any] | None:
        """Start a stack; return when it is ready, or with the error.

        `after` are stacks of a Keeper that died here: their GPUs must be free first."""
        spec = StackSpec.model_validate(fields)
        self._names.add(spec.name)
        task = asyncio.ensure_future(asyncio.to_thread(self._start, spec, after))
        self._starts.add(task)
        try:
            await task
        except RollwayError as error:
            return error.as_json()
        finally:
            self._starts.discard(task)
        return None

    def _start(self, spec: StackSpec, after: list[str]) -> None:
        was_cancelled = False

        def check(_: StackState) -> None:
            nonlocal was_cancelled
            if self._stopping.is_set() and not was_cancelled:
                was_cancelled = True  # raise once: the stop that follows reports here, too
                raise StartError("The start was cancelled.")

        _wait_until_gone(after)
        self._running[spec.name] = local.start(spec, check, as_grandchild=True)

    async def wait_until_joinable(self, name: str) -> dict[str, Any]:
        """Return how to join a stack of this node, as soon as its services answer. Workers need
        no frontend to load their models."""
        while True:
            state = await asyncio.to_thread(StackDir(name).read)
            known = [] if state is None else state.processes
            services = {process.state for process in known if process.role == "service"}
            if state is not None and known and services <= {"ready"}:
                join = {**state.join_spec["join"], "secret": read_secret(state)}
                return {**state.join_spec, "join": join}
            await asyncio.sleep(POLL_SECONDS)

    async def watch(self, name: str) -> str:
        """Return when the supervisor of a stack has ended, with the error it wrote."""
        # The supervisor's state is in a file, which has to be polled.
        while True:
            state = await asyncio.to_thread(StackDir(name).read)
            if state is None or not state.is_supervised:
                error = state.error if state is not None else None
                return str(error["message"]) if error else ""
            await asyncio.sleep(1.0)

    async def read_states(self) -> list[StackState]:
        """Return the states of this run's stacks on this node."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[StackState]:
        states = (StackDir(name).read() for name in sorted(self._names))
        return [state for state in states if state is not None]

    async def replace(self, worker: Worker) -> bool:
        """Kill a worker that does not answer, if it is on this node, so that it restarts."""
        stacks = [running.LocalAccess(name) for name in self._running]
        return any([await stack.replace_worker(worker) for stack in stacks])

    async def stop_rank(self, name: str, process: str) -> bool:
        return await asyncio.to_thread(running.stop_rank, name, process)

    async def release_rank(self, name: str, process: str) -> None:
        await asyncio.to_thread(running.release_rank, name, process)

    async def read_log(self, process: str, lines: int, reader: str) -> list[str] | None:
        """Return the last lines of a log; at the next calls of a `reader` what is new. None if this
        node does not have it."""
        return await asyncio.to_thread(self._read_log, process, lines, reader)

    def _read_log(self, process: str, lines: int, reader: str) -> list[str] | None:
        if reader not in self._followers:
            paths = (Path(state.log_dir) / f"{process}.log" for state in self._read())
            path = next(filter(Path.is_file, paths), None)
            if path is None or not reader:
                return None if path is None else logs.tail(path, lines)
            self._followers[reader] = logs.LogFollower(path, lines)
            while len(self._followers) > _MAX_FOLLOWERS:  # readers that have ended
                self._followers.pop(next(iter(self._followers))).close()
        return self._followers[reader].read()

    async def read_record(
        self, known: dict[str, dict[str, int]], own: frozenset[str]
    ) -> dict[str, bytes]:
        """Return what this node has recorded of the run and the reader does not have."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        for state in await asyncio.to_thread(self._read):
            if (directory := find_record_dir(state)) is not None:  # all parts of a run have one
                return await asyncio.to_thread(read_record, directory, known.get(node, {}), own)
        return {}

    async def stop_part(self, name: str) -> None:
        """Stop one stack of this node."""
        running = self._running.pop(name, None)
        if running is not None:
            await asyncio.to_thread(running.stop)

    async def stop(self) -> None:
        """Stop all stacks of this node; return when their processes are gone."""
        self._stopping.set()
        async with self._stop_lock:
            await asyncio.gather(*self._starts, return_exceptions=True)
            running = [self._running.pop(name) for name in list(self._running)]
            stops = (asyncio.to_thread(stack.stop) for stack in running)
            await asyncio.gather(*stops, return_exceptions=True)
            self._ports.release()

    def _remove_groups(self) -> None:
        """Free the groups of the run, when all Keepers have stopped: the first of those that live
        waits for the others."""
        import ray

        prefix = cluster.get_part_name(self._run_id, "node-")
        while True:
            names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
            keepers = sorted(name for name in names if name.startswith(prefix))
            if keepers[:1] != [self._name]:
                return
            if len(keepers) == 1:
                groups.remove_run(self._run_id)
                return
            time.sleep(POLL_SECONDS)


def read_record(directory: Path, known: dict[str, int], own: frozenset[str]) -> dict[str, bytes]:
    """Return what files of a record have beyond the `known` bytes, except the reader's `own`."""
    pieces: dict[str, bytes] = {}
    room = LARGEST_PIECE
    for path in sorted(directory.glob("*.jsonl")):
        if path.name in own or path.name.startswith(COPY_PREFIX) or path.is_symlink():
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(known.get(path.name, 0))
            if data := file.read(room):
                pieces[path.name] = data
                room -= len(data)
    return pieces


def _show_gpus() -> None:
    """Make all GPUs visible again. Ray before 2.60 hides them from an actor that reserves none, but
    the engines are given theirs by name."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    name = b"CUDA_VISIBLE_DEVICES"
    before = [entry.partition(b"=")[2] for entry in entries if entry.startswith(name + b"=")]
    os.environb.pop(name, None)
    if before:
        os.environb[name] = before[0]


def _wait_until_gone(names: list[str]) -> None:
    """Wait until the supervisors of a dead Keeper's stacks have ended; clear what they left."""
    for name in names:
        deadline = time.monotonic() + _END_SECONDS
        while (state := StackDir(name).read()) is not None and state.is_supervised:
            if time.monotonic() > deadline:
                raise StartError(
                    f"The stack `{name}` of this node does not end.", f"Try `rollway down {name}`."
                )
            time.sleep(POLL_SECONDS)
        local.clear_leftovers(StackDir(name))


def _clear_dead_parts() -> None:
    """Clear what killed supervisors of earlier runs left on this machine."""
    for state in list_stacks():
        if is_ray_part(state.name) and not state.is_supervised:
            local.clear_leftovers(StackDir(state.name))
