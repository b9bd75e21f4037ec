"""The process that owns a stack: it starts the stack, watches it and stops it.

    rollway up ──spawns─────────────► Supervisor ──has──► Children  run processes, write state.json
     ├── spec, lifeline ─────► stdin ───┤   └──has──► Healer  restarts processes of a ready stack
     ├── ready, or why not ◄── stdout ──┘
     └── reads state.json

The life of a stack, as `phase` in state.json shows it:

    starting ──all workers answered──► ready ──SIGTERM, SIGINT, lifeline closed──► stopping
        │                              │   ▲                                          │
        │              a process died  └───┘  Healer restarts it                      ▼
        │                                                          state.json is removed
        └──error, dead process, timeout──► stopping ──► failed (state.json stays)

The supervisor is a separate process: a trainer may fork, or may hold the GIL for minutes, without
an effect on the stack. When the trainer is killed, the kernel closes its end of the
lifeline, and the stack stops. When the supervisor itself is killed, the kernel sends its children
SIGTERM, and the next `rollway up` or `down` clears the rest (rollway.stack.local).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rollway import processes
from rollway.errors import RollwayError, StartError
from rollway.fleet.admin import parse_label, version_left
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import RlListing, discover
from rollway.http import ONCE, Http
from rollway.spec import StackSpec
from rollway.stack import logs
from rollway.stack.children import Children, describe_exit, find_hint
from rollway.stack.commands import get_dial_address
from rollway.stack.launch import NAME_IN_USE, Parent
from rollway.stack.locks import Lease, NamedLock
from rollway.stack.plan import ProcessPlan
from rollway.stack.ready import (
    MissingCounter,
    ServingCheck,
    list_instances,
    wait_until_connectable,
    wait_until_joinable,
    wait_until_open,
)
from rollway.stack.state import (
    DETACH,
    LOADED,
    PAUSED,
    WAITS_FOR_REPLICA,
    ProcessState,
    StackDir,
)

_ROTATE_SECONDS = 1.0
WATCH_SECONDS = 0.2
_SCAN_SECONDS = 5.0
_STABLE_SECONDS = 60.0
_REGISTRATION_SECONDS = 10.0
_LABEL_SECONDS = 2.0


class _StopRequested(Exception):
    """A stack is to stop while it starts."""


async def _run_while(work: Coroutine[Any, Any, None], check: Callable[[], None]) -> None:
    """Run a coroutine, and `check` again and again, which raises to cancel it."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=WATCH_SECONDS)
            check()
        await task
    finally:
        task.cancel()


class Supervisor:
    """Runs one stack from start to end."""

    def __init__(self, spec: StackSpec, parent: Parent) -> None:
        self._spec = spec
        self._parent = parent
        self._ports = Lease()
        self._http = Http()
        self._stopping = asyncio.Event()
        self._children = Children(spec)
        self._healer = Healer(self._children, self._http)

    async def run(self) -> int:
        """Run until a signal or the lifeline says stop; return 1 if the stack failed, else 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        # Not by the pid: a shell may be between, which can be killed alone.
        self._parent.watch(
            lambda message: loop.call_soon_threadsafe(self._let_go, message), by_pid=False
        )
        processes.adopt_orphans()
        children, directory = self._children, self._children.directory
        # Before the first process starts: by the state, or else by the run's id, `rollway down`
        # finds the processes if this one is killed.
        directory.begin(children.state)
        children.history.note("start")
        failure: RollwayError | None = None
        rotation = asyncio.create_task(self._rotate_logs())
        try:
            await self._start()
            self._become_ready()
            children.history.start_sampling(lambda: children.state)
            await self._healer.watch(self._stopping)
        except _StopRequested:
            pass
        except RollwayError as error:
            failure = error
        except OSError as error:
            cause = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
            failure = StartError(
                f"The supervisor cannot continue: {cause}.",
                "Check the path, the disk space and the permissions.",
            )
        finally:
            self._healer.cancel()  # first, or it would restart what `stop` kills
            await asyncio.to_thread(children.history.stop_sampling)
            await children.stop()
            self._ports.release()
            await self._http.close()
            rotation.cancel()  # last: processes write to their logs until they have stopped
        if failure is None:
            directory.forget()
            children.history.note_state(children.state, now=True)
            children.history.note("stopped")
            children.history.close(ended_well=True)
            children.prune_logs()
            return 0
        children.state.phase, children.state.error = "failed", failure.as_json()
        children.write_state()
        children.history.note("failed", detail=failure.message)
        children.history.close(ended_well=False)
        self._parent.report_error(failure)
        return 1

    async def _start(self) -> None:
        children, healer = self._children, self._healer
        plan = children.prepare(self._ports)
        # A launcher that has placed the workers here starts the frontend at the same time, and ends
        # the whole stack if that fails.
        if self._spec.join is not None and self._spec.placed is None:
            await self._run_start_step(wait_until_joinable(self._http, plan))
        if self._spec.join is not None:
            await self._run_start_step(healer.note_refits())
        for service in plan.by_role("service"):
            children.spawn(service)
            await self._run_start_step(healer.wait_for_service(service))
        # Workers may load their models for minutes; the frontend starts meanwhile.
        for worker in plan.by_role("worker"):
            children.spawn(worker)
        for frontend in plan.by_role("frontend"):
            children.spawn(frontend)
            await self._run_start_step(healer.wait_for_frontend(frontend))
        await self._run_start_step(healer.wait_for_workers(plan.by_role("worker")))

    async def _run_start_step(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step of the start; raise StartError at once when a process dies meanwhile."""
        # One deadline for all steps: `start_seconds` counts from the start of the stack.
        deadline = self._children.state.started_at + self._spec.start_seconds

        def check() -> None:
            if self._stopping.is_set():
                raise _StopRequested
            for name, child in self._children.running.items():
                if child.poll() is not None:
                    raise self._make_death_error(self._children.plans[name], child.returncode)
            if time.time() > deadline:
                raise self._make_timeout_error()

        await _run_while(step, check)

    def _make_death_error(self, process: ProcessPlan, status: int) -> StartError:
        self._children.report(process, "failed", describe_exit(status))
        whose = f", a worker of the model `{process.model}`," if process.model else ""
        return StartError(
            f"{process.name}{whose} {describe_exit(status)} while the stack was starting.",
            find_hint(process.log),
            log_tail="\n".join(logs.read_error_tail(process.log)),
        )

    def _make_timeout_error(self) -> StartError:
        state = self._children.state
        waiting = [process for process in state.processes if process.state != "ready"]
        names = ", ".join(f"{process.name} ({process.state})" for process in waiting)
        log = Path(waiting[0].log) if waiting else Path(state.log_dir)
        return StartError(
            f"The stack was not ready after {self._spec.start_seconds:g} s; waiting for: {names}.",
            f"Give it more time with `start_seconds`, or see why in {log}.",
            log_tail="\n".join(logs.read_error_tail(log)),
        )

    def _become_ready(self) -> None:
        children = self._children
        children.state.phase = "ready"
        children.scan_memory()
        children.write_state()
        children.history.note("ready")
        self._parent.report({"phase": "ready"})

    async def _rotate_logs(self) -> None:
        """Rotate logs, and record changes of workers that came too quickly for their own entry."""
        while True:
            await asyncio.to_thread(self._children.rotate_logs)
            self._children.history.note_state(self._children.state)
            await asyncio.sleep(_ROTATE_SECONDS)

    def _let_go(self, message: bytes) -> None:
        """Handle the owner's last message: DETACH, or nothing when it has closed or died."""
        if message != DETACH:
            self._children.history.note("owner gone")
            self._stopping.set()


class Healer:
    """Keeps the children of a ready stack serving.

        dies ──► exited ──► session cleared ──► restarting (after a wait) ──► starting ──► ready
                                │                   ▲
                                └── a rank of a replica over several machines:
                                    waiting for its replica ──request file──┘

    The ranks of such a replica live and die together. A rank that was restarted alone would wait
    for ever for the others, or meet their old processes. So this machine only clears up and says
    that it waits. The process that sees all machines stops the other ranks (`running.stop_rank`),
    and when all of them wait, releases each (`running.release_rank`).
    """

    def __init__(self, children: Children, http: Http) -> None:
        self._children = children
        self._http = http
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._instances: dict[str, int] = {}
        self._retired: set[int] = set()
        """Instance ids of dead workers, which discovery lists for some time after their death."""

    async def watch(self, stopping: asyncio.Event) -> None:
        """Restart what dies until `stopping` is set."""
        watches = [
            asyncio.create_task(self._watch_registrations()),
            asyncio.create_task(self._watch_labels()),
        ]
        next_scan = 0.0
        try:
            while not stopping.is_set():
                for name, child in self._children.running.items():
                    if child.poll() is not None and name not in self._restarts:
                        self._restarts[name] = asyncio.create_task(self._restart(name))
                if time.monotonic() >= next_scan:
                    self._children.reap()
                    self._children.scan_memory()
                    next_scan = time.monotonic() + _SCAN_SECONDS
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), WATCH_SECONDS)
        finally:
            for each in watches:
                each.cancel()

    def cancel(self) -> None:
        """Give up all restarts that are under way."""
        for task in self._restarts.values():
            task.cancel()

    async def wait_for_workers(self, workers: Sequence[ProcessPlan]) -> None:
        """Return when these workers have registered and answered."""
        children = self._children
        check = ServingCheck(
            self._http,
            children.plan,
            children.report,
            warm_up=children.spec.warmup,
            secret=children.secret,
        )
        used = self._retired | set(self._instances.values())
        instances = await check.wait(workers, used, on_lost=children.respawn)
        self._instances |= instances
        for name, instance in instances.items():
            children.get_state(name).instance = instance
        children.write_state()

    async def wait_for_service(self, service: ProcessPlan) -> None:
        host = get_dial_address(self._children.spec.admin_host)
        await wait_until_connectable(service.ports["client"], host)
        self._children.report(service, "ready", "")

    async def wait_for_frontend(self, frontend: ProcessPlan) -> None:
        await wait_until_open(self._http, f"{self._children.plan.frontend_url}/health")
        self._children.report(frontend, "ready", "")

    async def note_refits(self) -> None:
        """Record whether workers that this stack joins were refitted: then its own wait for it."""
        admin = DynamoAdmin(self._http)
        with contextlib.suppress(RollwayError):  # the frontend may be starting, too
            for worker in await discover(
                self._http, RlListing(self._children.plan.rl_url), retry=ONCE
            ):
                label = None if worker.error else (await admin.read(worker)).label
                if (version_left(label) or label or 0) > 0:
                    self._children.get_refitted_file(worker.model).touch()

    async def _watch_registrations(self) -> None:
        """Kill workers that run but have dropped out of discovery; `watch` restarts them."""
        children, counter = self._children, MissingCounter()
        while True:
            await asyncio.sleep(_REGISTRATION_SECONDS)
            ready = {
                state.name: state.instance
                for state in children.state.processes
                if state.state == "ready"
                and state.instance is not None
                # Which mocker has which instance id is unknown.
                and children.plans[state.name].engine != "mocker"
            }
            for name in counter.find_lost(ready, await list_instances(self._http, children.plan)):
                if children.get_state(name).instance != ready[name]:
                    continue  # it was restarted while the listing was read
                children.report(children.plans[name], "lost", "it runs, but discovery lost it")
                children.running[name].kill()

    async def _watch_labels(self) -> None:
        """Record what each worker declares: its version, whichever process refitted it, whether
        it is paused, and whether one that was out of routing has been refitted."""
        while True:
            await asyncio.sleep(_LABEL_SECONDS)
            await asyncio.gather(*map(self._read_label, self._children.plans.values()))

    async def _read_label(self, process: ProcessPlan) -> None:
        children, state = self._children, self._children.get_state(process.name)
        if state.state not in LOADED or process.admin_url is None or process.engine == "mocker":
            return
        url, instance = f"{process.admin_url}/engine/get_weight_version", state.instance
        try:
            answer = await self._http.post(url, {}, timeout=5.0, retry=ONCE)
        except RollwayError:
            return
        label = parse_label(answer.get("version"))
        if state.instance != instance or state.state not in LOADED or label is None or label < 0:
            return  # it was restarted meanwhile, or changes weights
        has_changed, state.version = state.version != label, label
        if answer.get("paused"):
            children.report(process, PAUSED, "`rollway fleet resume` resumes it")
        else:
            children.report(process, "ready", "")
        if has_changed:
            children.write_state()

    async def _restart(self, name: str) -> None:
        """Restart a dead process until it serves, with a longer wait after each failure."""
        children = self._children
        process, state = children.plans[name], children.get_state(name)
        try:
            while (status := children.running[name].poll()) is not None:
                exited = describe_exit(status)
                children.report(process, "exited", exited)
                await asyncio.to_thread(children.clear_session, children.running[name].pid)
                wait = self.choose_backoff(state)
                if wait is None:
                    children.report(process, "failed", f"{exited}; not restarted")
                    # The entry in `_restarts` stays, so that `watch` does not try again.
                    await asyncio.Event().wait()
                    return
                if process.shares_replica:
                    await self._wait_for_release(process, exited)
                children.report(process, "restarting", f"{exited}; again in {wait:g} s")
                await asyncio.sleep(wait)
                state.restarts += 1
                children.spawn(process)
                await self._wait_for_restart(process)
        finally:
            del self._restarts[name]

    async def _wait_for_release(self, process: ProcessPlan, exited: str) -> None:
        """Return when a request file says that all ranks of the replica are gone."""
        request = self._children.directory.get_restart_request(process.name)
        request.unlink(missing_ok=True)  # one for an earlier death
        self._children.report(process, WAITS_FOR_REPLICA, exited)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if request.exists():
                request.unlink(missing_ok=True)
                return

    def choose_backoff(self, state: ProcessState) -> float | None:
        """Return the seconds to wait before the next start; None after too many failures."""
        policy = self._children.spec.restart
        if policy.enabled and self._was_replaced(state):
            return 0.0
        served = time.time() - self._children.state.started_at - (state.ready_seconds or 0.0)
        is_stable = state.ready_seconds is not None and served > _STABLE_SECONDS
        state.failures = 1 if is_stable else state.failures + 1
        if not policy.enabled or state.failures > policy.max_failures:
            return None
        return min(policy.backoff_seconds * 2.0 ** (state.failures - 1), policy.max_backoff_seconds)

    def _was_replaced(self, state: ProcessState) -> bool:
        """Return whether a refit killed the process so that it restarts, which is not a failure."""
        mark = self._children.directory.get_replaced_mark(state.pid or 0)
        was_replaced = mark.exists()
        if was_replaced:
            mark.unlink(missing_ok=True)
            self._children.history.note("replaced", state)
        return was_replaced

    async def _wait_for_restart(self, process: ProcessPlan) -> None:
        """Return when a restarted process serves or has died; kill it after `start_seconds`."""
        children = self._children
        deadline = time.monotonic() + children.spec.start_seconds

        def is_running() -> bool:  # looks it up each time: `respawn` may replace the child
            return children.running[process.name].poll() is None

        def check() -> None:
            if not is_running() or time.monotonic() > deadline:
                raise StartError(f"not serving after {children.spec.start_seconds:g} s")

        try:
            await _run_while(self._wait_until_serving(process), check)
        except RollwayError as error:
            if is_running():
                children.report(process, "hung", error.message)
                children.running[process.name].kill()
                await asyncio.to_thread(children.running[process.name].wait)

    async def _wait_until_serving(self, process: ProcessPlan) -> None:
        if process.role == "worker":
            # Its old id stays listed for a while and must not count as the restarted worker.
            self._retired.add(self._instances.pop(process.name, 0))
            await self.wait_for_workers([process])
        elif process.role == "frontend":
            await self.wait_for_frontend(process)
        else:
            await self.wait_for_service(process)


def main() -> int:
    """Run a supervisor, as a `Child` whose job is the spec."""
    parent = Parent()
    spec = StackSpec.model_validate_json(parent.job)
    lock = NamedLock(StackDir(spec.name).lock_name)
    if not lock.acquire():
        print(f"a stack named {spec.name} is already running", file=sys.stderr)
        return NAME_IN_USE
    return asyncio.run(Supervisor(spec, parent).run())
