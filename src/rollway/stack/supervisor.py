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
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rollway import private, processes
from rollway.config import StackSpec
from rollway.errors import RollwayError, StartError
from rollway.orders import stack_secret
from rollway.stack import logs
from rollway.stack.children import exit_words
from rollway.stack.heal import WATCH_SECONDS, Healer
from rollway.stack.locks import NamedLock
from rollway.stack.plan import ProcessPlan, StackPlan, plan_stack
from rollway.stack.ready import until_joined, until_open
from rollway.stack.retention import record_names
from rollway.stack.state import (
    DETACH,
    ProcessState,
    StackDir,
    new_secret,
    patience,
    prepare_logs,
    remove_run_dir,
)
from rollway.weights.adapter import remove_abandoned


class Supervisor(Healer):
    """Runs one stack from start to end."""

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
        rotation = asyncio.create_task(self._watch_logs())
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
            rotation.cancel()
        if failure is None:
            self.directory.forget()
            self.directory.record("stopped", run=self.state.run_id)
            self._prune_after()
            return 0
        self.state.phase, self.state.error = "failed", failure.as_json()
        self._write()
        self.directory.record("failed", run=self.state.run_id, message=failure.message)
        return 1

    # --- start -----------------------------------------------------------------------------

    async def _start(self) -> None:
        plan = self._prepare()
        if self.spec.join is not None:
            await self._watching_start(until_joined(self.http, plan))
        for service in plan.by_role("service"):
            self._spawn(service)
            await self._watching_start(self._service_up(service))
            self._report(service, "ready", "")
        for worker in plan.by_role("worker"):
            self._spawn(worker)
        for frontend in plan.by_role("frontend"):
            self._spawn(frontend)
            await self._watching_start(until_open(self.http, f"{plan.frontend_url}/health"))
            self._report(frontend, "ready", "")
        await self._watching_start(self._workers_serving(plan, plan.by_role("worker")))

    def _prepare(self) -> StackPlan:
        run_dir, log_dir = Path(self.state.run_dir), Path(self.state.log_dir)
        prepare_logs(log_dir)
        self._set_logs_aside(log_dir)
        private.make_scratch(run_dir)
        for part in ("tmp", "discovery"):
            private.make_scratch(run_dir / part)
        self.secret = new_secret(run_dir, self._joined_secret())
        plan = plan_stack(
            self.spec, run_id=self.state.run_id, run_dir=run_dir, log_dir=log_dir, ports=self.ports
        )
        self.plan = plan
        self.plans = {process.name: process for process in plan.processes}
        record_names(log_dir, self.plans)
        self.state.frontend, self.state.rl = plan.frontend_url, plan.rl_url
        self.state.invitation = plan.invitation
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

    def _joined_secret(self) -> str:
        """Of the stack that this one joins; without it, its offers will not be believed here."""
        if self.spec.join is None:
            return ""
        return self.spec.join.secret or stack_secret()

    async def _watching_start(self, step: Coroutine[Any, Any, None]) -> None:
        """Do a step of the start; a process that dies meanwhile ends the start at once."""
        task = asyncio.ensure_future(step)
        deadline = self.state.started_at + self.spec.start_seconds
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=WATCH_SECONDS)
                for name, child in self.children.items():
                    if child.poll() is not None:
                        raise self._died_at_start(self.plans[name], child.returncode)
                if time.time() > deadline:
                    raise self._too_slow()
            await task
        finally:
            task.cancel()

    def _died_at_start(self, process: ProcessPlan, status: int) -> StartError:
        self._report(process, "failed", exit_words(status))
        return StartError(
            f"{process.name} {exit_words(status)} while the stack was starting.",
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
        remove_abandoned()
        remove_run_dir(Path(self.state.run_dir))
        self.ports.release()
        await self.http.close()

    def _wait_for_all(self, seconds: float) -> set[str]:
        """SIGTERM was sent; give time, then SIGKILL every member that is left."""
        deadline = time.monotonic() + seconds
        memory: set[str] = set()
        while time.monotonic() < deadline:
            processes.reap({child.pid: None for child in self.children.values()})
            if all(child.poll() is not None for child in self.children.values()):
                break
            memory |= processes.shared_memory(processes.members(self.state.run_id))
            time.sleep(0.05)
        # A leader that has gone may still have children on their way out.
        memory |= processes.end(lambda: processes.members(self.state.run_id), 0.5)
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
