"""Watching a stack that is ready: what dies is started again, what discovery lost is too."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rollway import processes
from rollway.errors import RollwayError
from rollway.stack.children import Children, exit_words
from rollway.stack.plan import ProcessPlan, StackPlan, reachable
from rollway.stack.ready import (
    Absences,
    listed_instances,
    until_connectable,
    until_open,
    until_serving,
)
from rollway.stack.state import ProcessState

WATCH_SECONDS = 0.2
_SCAN_SECONDS = 5.0
_ROTATE_SECONDS = 1.0
_STABLE_SECONDS = 60.0
_REGISTRATION_SECONDS = 10.0


class Healer(Children):
    """Keeps the children serving."""

    async def _watch(self) -> None:
        registrations = asyncio.create_task(self._watch_registrations())
        try:
            await self._watch_children()
        finally:
            registrations.cancel()

    async def _watch_logs(self) -> None:
        """Rotate the logs from the first start to the last stop."""
        while True:
            await asyncio.to_thread(self._rotate_logs)
            await asyncio.sleep(_ROTATE_SECONDS)

    async def _watch_registrations(self) -> None:
        """End workers that run but have dropped out of discovery; they are then healed."""
        assert self.plan is not None
        absent = Absences()
        while True:
            await asyncio.sleep(_REGISTRATION_SECONDS)
            ready = {
                state.name: state.instance
                for state in self.state.processes
                if state.state == "ready"
                and state.instance is not None
                and self.plans[state.name].engine != "mocker"  # which is which is not known there
            }
            for name in absent.lost(ready, await listed_instances(self.http, self.plan)):
                if self._state_of(name).instance != ready[name]:
                    continue  # it has just been started anew
                self._report(self.plans[name], "lost", "it runs, but discovery lost it")
                self.children[name].kill()

    async def _watch_children(self) -> None:
        next_scan = 0.0
        while not self.stopping.is_set():
            for name, child in self.children.items():
                if child.poll() is not None and name not in self.healing:
                    self.healing[name] = asyncio.create_task(self._heal(name))
            if time.monotonic() >= next_scan:
                processes.reap({child.pid: None for child in self.children.values()})
                self._scan_memory()
                next_scan = time.monotonic() + _SCAN_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), WATCH_SECONDS)

    async def _heal(self, name: str) -> None:
        """Start a dead process again, later each time it fails, until it serves."""
        process, state = self.plans[name], self._state_of(name)
        try:
            while (status := self.children[name].poll()) is not None:
                self._report(process, "exited", exit_words(status))
                await asyncio.to_thread(self._clear_session, self.children[name].pid)
                wait = self._backoff(state)
                if wait is None:
                    self._report(process, "failed", f"{exit_words(status)}; not restarted")
                    await asyncio.Event().wait()  # given up; keeps its place in `healing`
                    return
                self._report(process, "restarting", f"{exit_words(status)}; again in {wait:g} s")
                await asyncio.sleep(wait)
                state.restarts += 1
                self._spawn(process)
                await self._serving_or_dead(process)
        finally:
            del self.healing[name]

    def _backoff(self, state: ProcessState) -> float | None:
        """Seconds to wait before the next start; None when it failed too often."""
        policy = self.spec.restart
        if policy.enabled and self._was_replaced(state):
            return 0.0
        served = time.time() - self.state.started_at - (state.ready_seconds or 0.0)
        stable = state.ready_seconds is not None and served > _STABLE_SECONDS
        state.failures = 1 if stable else state.failures + 1
        if not policy.enabled or state.failures > policy.max_failures:
            return None
        return min(policy.backoff_seconds * 2.0 ** (state.failures - 1), policy.max_backoff_seconds)

    def _was_replaced(self, state: ProcessState) -> bool:
        """Whether a refit has ended it so that it starts anew: no failure of its own."""
        return any(
            event.get("event") == "replaced" and event.get("pid") == state.pid
            for event in self.directory.events()
        )

    async def _serving_or_dead(self, process: ProcessPlan) -> None:
        """Return when a restarted process serves or has died; one that does neither is killed."""
        task = asyncio.ensure_future(self._serving(process))
        deadline = time.monotonic() + self.spec.start_seconds

        def alive() -> bool:  # it may be respawned meanwhile
            return self.children[process.name].poll() is None

        try:
            while not task.done() and alive() and time.monotonic() < deadline:
                await asyncio.wait({task}, timeout=WATCH_SECONDS)
            if task.done():
                await task
                return
            reason = f"not serving after {self.spec.start_seconds:g} s"
        except RollwayError as error:
            reason = error.message
        finally:
            task.cancel()
        if alive():
            self._report(process, "hung", reason)
            self.children[process.name].kill()
            await asyncio.to_thread(self.children[process.name].wait)

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

    async def _workers_serving(self, plan: StackPlan, workers: list[ProcessPlan]) -> None:
        found = await until_serving(
            self.http,
            plan,
            workers,
            self._report,
            warm_up=self.spec.warmup,
            secret=self.secret,
            taken=self.retired | set(self.instances.values()),
            lost=self._respawn,
        )
        self.instances |= found
        for name, instance in found.items():
            self._state_of(name).instance = instance
        self._write()

    async def _service_up(self, service: ProcessPlan) -> None:
        await until_connectable(service.ports["client"], reachable(self.spec.admin_host))
