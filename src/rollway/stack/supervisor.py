"""The process that owns a stack: starts it, watches it, restarts what dies, ends it.

    up ──spawns──► supervisor ──spawns──► etcd, nats (if asked for)
     │   spec on stdin  │                 workers
     │                  │                 frontend
     ├──lifeline────────┤  (a pipe: when the other end closes, the stack ends)
     └──reads state.json┘

It is a process of its own, so that a trainer may be killed, fork or hold the GIL for minutes
without the stack noticing; through the lifeline a killed trainer still takes its stack with it.
It ends on SIGTERM, SIGINT or a closed lifeline. If it is killed itself, its children are asked to
end by the kernel, and the next `rollway up` or `down` clears what is left (rollway.stack.local).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rollway.config import StackSpec
from rollway.errors import RollwayError, StartError
from rollway.http import Http
from rollway.stack import logs, processes
from rollway.stack.lease import Lease
from rollway.stack.locks import NamedLock
from rollway.stack.plan import LOOPBACK, ProcessPlan, StackPlan, plan_stack
from rollway.stack.processes import ProcessId
from rollway.stack.ready import (
    Absences,
    listed_instances,
    until_connectable,
    until_open,
    until_serving,
)
from rollway.stack.state import (
    DETACH,
    ProcessState,
    StackDir,
    StackState,
    patience,
    prepare_logs,
)

_WATCH_SECONDS = 0.2
_SCAN_SECONDS = 5.0
_STABLE_SECONDS = 60.0
_REGISTRATION_SECONDS = 10.0


class Supervisor:
    """Runs one stack from start to end."""

    def __init__(self, spec: StackSpec, lifeline: int | None) -> None:
        self.spec = spec
        self.directory = StackDir(spec.name)
        self.lifeline = lifeline
        self.ports = Lease()
        self.http = Http()
        self.stopping = asyncio.Event()
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.healing: dict[str, asyncio.Task[None]] = {}
        self.instances: dict[str, int] = {}
        self.retired: set[int] = set()
        self.plans: dict[str, ProcessPlan] = {}
        self.plan: StackPlan | None = None
        me = ProcessId.of(os.getpid())
        assert me is not None
        run_id = secrets.token_hex(8)
        self.state = StackState(
            name=spec.name,
            run_id=run_id,
            supervisor_pid=me.pid,
            supervisor_start=me.start,
            run_dir=str(_run_dir(run_id)),
            log_dir=str(spec.log_dir or self.directory.logs),
            models=[model.name for model in spec.models],
            model_paths={model.name: model.path for model in spec.models},
            checkpoint_roots=[str(root) for root in spec.checkpoint_roots],
            stop_seconds=spec.stop_seconds,
        )

    async def run(self) -> int:
        """Until told to stop; the exit status says whether the stack ever got ready."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        if self.lifeline is not None:
            loop.add_reader(self.lifeline, self._lifeline_changed)
        processes.adopt_orphans()
        self.directory.write(self.state)
        self.directory.record("start", run=self.state.run_id)
        failure: RollwayError | None = None
        try:
            await self._until_stop(self._start())
            if not self.stopping.is_set():
                self._ready()
                await self._watch()
        except RollwayError as error:
            failure = error
        except OSError as error:
            what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
            failure = StartError(
                f"The supervisor could not go on: {what}.",
                "Check the path, the disk space and the permissions it names.",
            )
        finally:
            await self._stop()
        if failure is None:
            self.directory.forget()
            self.directory.record("stopped", run=self.state.run_id)
            return 0
        self.state.phase, self.state.error = "failed", failure.as_json()
        self._write()
        self.directory.record("failed", run=self.state.run_id, message=failure.message)
        return 1

    # --- start -----------------------------------------------------------------------------

    async def _start(self) -> None:
        plan = self._prepare()
        for service in plan.by_role("service"):
            self._spawn(service)
            await self._watching_start(self._service_up(service))
            self._report(service, "ready", "")
        for worker in plan.by_role("worker"):
            self._spawn(worker)
        (frontend,) = plan.by_role("frontend")
        self._spawn(frontend)
        await self._watching_start(until_open(self.http, f"{plan.frontend_url}/health"))
        self._report(frontend, "ready", "")
        await self._watching_start(self._workers_serving(plan, plan.by_role("worker")))

    def _prepare(self) -> StackPlan:
        run_dir, log_dir = Path(self.state.run_dir), Path(self.state.log_dir)
        prepare_logs(log_dir)
        run_dir.mkdir(mode=0o700, parents=True)
        for part in ("tmp", "discovery"):
            (run_dir / part).mkdir()
        plan = plan_stack(
            self.spec, run_id=self.state.run_id, run_dir=run_dir, log_dir=log_dir, ports=self.ports
        )
        self.plan = plan
        self.plans = {process.name: process for process in plan.processes}
        self.state.frontend, self.state.rl = plan.frontend_url, plan.rl_url
        self.state.processes = [
            ProcessState(
                name=p.name,
                role=p.role,
                log=str(p.log),
                model=p.model,
                admin_url=p.admin_url,
                ports=p.ports,
            )
            for p in plan.processes
        ]
        self._write()
        return plan

    async def _workers_serving(self, plan: StackPlan, workers: list[ProcessPlan]) -> None:
        found = await until_serving(
            self.http,
            plan,
            workers,
            self._report,
            warm_up=self.spec.warmup,
            taken=self.retired | set(self.instances.values()),
            lost=self._respawn,
        )
        self.instances |= found
        for name, instance in found.items():
            self._state_of(name).instance = instance
        self._write()

    async def _service_up(self, service: ProcessPlan) -> None:
        await until_connectable(service.ports["client"], LOOPBACK)

    async def _watching_start(self, step: Coroutine[Any, Any, None]) -> None:
        """Do a step of the start; a process that dies meanwhile ends the start at once."""
        task = asyncio.ensure_future(step)
        deadline = self.state.started_at + self.spec.start_seconds
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_WATCH_SECONDS)
                for name, child in self.children.items():
                    if child.poll() is not None:
                        raise self._died_at_start(self.plans[name], child.returncode)
                if time.time() > deadline:
                    raise self._too_slow()
            await task
        finally:
            task.cancel()

    def _died_at_start(self, process: ProcessPlan, status: int) -> StartError:
        self._report(process, "failed", _exit_words(status))
        return StartError(
            f"{process.name} {_exit_words(status)} while the stack was starting.",
            logs.hint(process.log),
            log_tail="\n".join(logs.telling_tail(process.log)),
        )

    def _too_slow(self) -> StartError:
        waiting = [p for p in self.state.processes if p.state != "ready"]
        names = ", ".join(f"{p.name} ({p.state})" for p in waiting)
        log = Path(waiting[0].log) if waiting else Path(self.state.log_dir)
        return StartError(
            f"The stack was not ready after {self.spec.start_seconds:g} s; waiting for: {names}.",
            f"Give it more time with `start_seconds`, or see why in {log}.",
            log_tail="\n".join(logs.telling_tail(log)),
        )

    def _ready(self) -> None:
        self.state.phase = "ready"
        self._scan_memory()
        self._write()
        self.directory.record("ready", seconds=round(time.time() - self.state.started_at, 3))

    # --- one process -----------------------------------------------------------------------

    def _spawn(self, process: ProcessPlan) -> None:
        with process.log.open("ab") as log:
            child = subprocess.Popen(
                process.argv,
                env={**os.environ, **process.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        self.children[process.name] = child
        identity = ProcessId.of(child.pid)
        state = self._state_of(process.name)
        state.pid, state.start = child.pid, identity.start if identity else None
        state.ready_seconds, state.instance = None, None
        self._report(process, "starting", "")

    def _respawn(self, process: ProcessPlan) -> None:
        """Start a worker again that runs but never became known."""
        child = self.children[process.name]
        self._report(process, "lost", "it runs, but its registration was lost; starting it again")
        child.kill()
        child.wait()
        self._clear_session(child.pid)
        self._state_of(process.name).restarts += 1
        self._spawn(process)

    def _report(self, process: ProcessPlan, new_state: str, detail: str) -> None:
        state = self._state_of(process.name)
        if (state.state, state.detail) == (new_state, detail):
            return
        state.state, state.detail = new_state, detail
        if new_state == "ready":
            state.ready_seconds = round(time.time() - self.state.started_at, 3)
        self.directory.record(new_state, process=process.name, pid=state.pid, detail=detail)
        self._write()

    def _state_of(self, name: str) -> ProcessState:
        return next(state for state in self.state.processes if state.name == name)

    # --- watch and heal --------------------------------------------------------------------

    async def _watch(self) -> None:
        next_scan = 0.0
        registrations = asyncio.create_task(self._watch_registrations())
        try:
            await self._watch_children(next_scan)
        finally:
            registrations.cancel()

    async def _watch_registrations(self) -> None:
        """End workers that run but have dropped out of discovery; they are then healed."""
        assert self.plan is not None
        absent = Absences()
        while True:
            await asyncio.sleep(_REGISTRATION_SECONDS)
            ready = {
                state.name: state.instance
                for state in self.state.processes
                if state.state == "ready" and state.instance is not None
            }
            for name in absent.lost(ready, await listed_instances(self.http, self.plan)):
                self._report(self.plans[name], "lost", "it runs, but discovery lost it")
                self.children[name].kill()

    async def _watch_children(self, next_scan: float) -> None:
        while not self.stopping.is_set():
            for name, child in self.children.items():
                if child.poll() is not None and name not in self.healing:
                    self.healing[name] = asyncio.create_task(self._heal(name))
            if time.monotonic() >= next_scan:
                processes.reap({child.pid: None for child in self.children.values()})
                self._scan_memory()
                next_scan = time.monotonic() + _SCAN_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), _WATCH_SECONDS)

    async def _heal(self, name: str) -> None:
        """Start a dead process again, later each time it fails, until it serves."""
        process, state = self.plans[name], self._state_of(name)
        try:
            while (status := self.children[name].poll()) is not None:
                self._report(process, "exited", _exit_words(status))
                await asyncio.to_thread(self._clear_session, self.children[name].pid)
                wait = self._backoff(state)
                if wait is None:
                    self._report(process, "failed", f"{_exit_words(status)}; not restarted")
                    await asyncio.Event().wait()  # given up; keeps its place in `healing`
                    return
                self._report(process, "restarting", f"{_exit_words(status)}; again in {wait:g} s")
                await asyncio.sleep(wait)
                state.restarts += 1
                self._spawn(process)
                await self._serving_or_dead(process)
        finally:
            del self.healing[name]

    def _backoff(self, state: ProcessState) -> float | None:
        """Seconds to wait before the next start; None when it failed too often."""
        policy = self.spec.restart
        served = time.time() - self.state.started_at - (state.ready_seconds or 0.0)
        stable = state.ready_seconds is not None and served > _STABLE_SECONDS
        state.failures = 1 if stable else state.failures + 1
        if not policy.enabled or state.failures > policy.max_failures:
            return None
        return min(policy.backoff_seconds * 2.0 ** (state.failures - 1), policy.max_backoff_seconds)

    async def _serving_or_dead(self, process: ProcessPlan) -> None:
        """Return when a restarted process serves or has died; one that does neither is killed."""
        child = self.children[process.name]
        task = asyncio.ensure_future(self._serving(process))
        deadline = time.monotonic() + self.spec.start_seconds
        try:
            while not task.done() and child.poll() is None and time.monotonic() < deadline:
                await asyncio.wait({task}, timeout=_WATCH_SECONDS)
            if task.done():
                await task
                return
            reason = f"not serving after {self.spec.start_seconds:g} s"
        except RollwayError as error:
            reason = error.message
        finally:
            task.cancel()
        if child.poll() is None:
            self._report(process, "hung", reason)
            child.kill()
            await asyncio.to_thread(child.wait)

    async def _serving(self, process: ProcessPlan) -> None:
        """Return when a restarted process does its job again."""
        assert self.plan is not None
        if process.role == "worker":
            self.retired.add(self.instances.pop(process.name, 0))
            await self._workers_serving(self.plan, [process])
            return
        if process.role == "frontend":
            await until_open(self.http, f"{self.plan.frontend_url}/health")
        else:
            await self._service_up(process)
        self._report(process, "ready", "")

    def _clear_session(self, leader: int) -> None:
        """End what a dead leader left in its session: vLLM's EngineCore and Worker processes."""

        def left() -> set[ProcessId]:
            members = processes.members(self.state.run_id)
            return {process for process in members if _session(process.pid) == leader}

        memory = processes.end(left, 0.0)
        processes.remove_shared_memory({*memory, *self.state.shared_memory})

    def _scan_memory(self) -> None:
        """Note shared memory while its owners live: the dead cannot be asked."""
        known = set(self.state.shared_memory)
        found = processes.shared_memory(processes.members(self.state.run_id))
        if not found <= known:
            self.state.shared_memory = sorted(known | found)
            self._write()

    # --- stop ------------------------------------------------------------------------------

    async def _stop(self) -> None:
        seconds = patience(self.state)
        self.state.phase = "stopping"
        for task in self.healing.values():
            task.cancel()
        for state in self.state.processes:
            if state.state not in ("failed", "waiting"):
                state.state = "stopping"
        self._write()
        self._scan_memory()
        for child in self.children.values():
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
        memory = await asyncio.to_thread(self._wait_for_all, seconds)
        processes.remove_shared_memory({*memory, *self.state.shared_memory})
        shutil.rmtree(self.state.run_dir, ignore_errors=True)
        self.ports.release()
        await self.http.close()

    def _wait_for_all(self, seconds: float) -> set[str]:
        """SIGTERM was sent; give time, then SIGKILL every member that is left."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            processes.reap({child.pid: None for child in self.children.values()})
            if all(child.poll() is not None for child in self.children.values()):
                break
            time.sleep(0.05)
        # A leader that has gone may still have children on their way out.
        memory = processes.end(lambda: processes.members(self.state.run_id), 0.5)
        for child in self.children.values():
            child.poll()
        processes.reap({})
        return memory

    async def _until_stop(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work, but drop it when the stack is told to stop."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            await task
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _lifeline_changed(self) -> None:
        assert self.lifeline is not None
        said = os.read(self.lifeline, 1)
        asyncio.get_running_loop().remove_reader(self.lifeline)
        os.close(self.lifeline)
        self.lifeline = None
        if said != DETACH:
            self.directory.record("owner gone")
            self.stopping.set()

    def _write(self) -> None:
        """A full disk must not keep the stack from being watched and ended."""
        with contextlib.suppress(OSError):
            self.directory.write(self.state)


def _run_dir(run_id: str) -> Path:
    """Short, because vLLM puts Unix sockets below it and their paths end at 107 characters."""
    base = tempfile.gettempdir()
    if len(base) > 40:
        base = "/tmp"
    return Path(base) / f"rollway-{os.getuid()}-{run_id[:8]}"


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _exit_words(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def main() -> int:
    """Run a supervisor: the lifeline's fd as argument, the spec as JSON on stdin."""
    lifeline = int(sys.argv[1]) if len(sys.argv) > 1 else None
    spec = StackSpec.model_validate_json(sys.stdin.buffer.read())
    lock = NamedLock(StackDir(spec.name).lock_name)
    if not lock.acquire():
        print(f"a stack named {spec.name} is already running", file=sys.stderr)
        return 3
    return asyncio.run(Supervisor(spec, lifeline).run())


if __name__ == "__main__":
    sys.exit(main())
