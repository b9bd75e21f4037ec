"""Restart the processes of a ready stack that die.

    dies ──► exited ──► session cleared ──► restarting (after a wait) ──► starting ──► ready
                            │                   ▲
                            └── a rank of a replica over several machines:
                                waiting for its replica ──request file──┘

The ranks of such a replica live and die together. A rank that was restarted alone would wait for
ever for the others, or meet their old processes. So this machine only clears up and says that it
waits. Whoever sees all machines stops the other ranks (`local.stop_rank`), and when all of them
wait, releases each (`local.release_rank`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from rollway.errors import RollwayError
from rollway.http import Http
from rollway.stack.children import Children, describe_exit
from rollway.stack.plan import ProcessPlan, get_dial_address
from rollway.stack.ready import (
    MissingCounter,
    ServingCheck,
    list_instances,
    wait_until_connectable,
    wait_until_open,
)
from rollway.stack.state import WAITS_FOR_REPLICA, ProcessState

WATCH_SECONDS = 0.2
_SCAN_SECONDS = 5.0
_STABLE_SECONDS = 60.0
_REGISTRATION_SECONDS = 10.0


class Healer:
    """Keeps the children of a ready stack serving."""

    def __init__(self, children: Children, http: Http) -> None:
        self._children = children
        self._http = http
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._instances: dict[str, int] = {}
        self._retired: set[int] = set()
        """Instance ids of dead workers, which discovery lists for some time after their death."""

    async def watch(self, stopping: asyncio.Event) -> None:
        """Restart what dies until `stopping` is set."""
        registrations = asyncio.create_task(self._watch_registrations())
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
            registrations.cancel()

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
        """Whether a refit killed the process so that it restarts, which is not a failure."""
        return any(
            event.get("event") == "replaced" and event.get("pid") == state.pid
            for event in self._children.directory.events()
        )

    async def _wait_for_restart(self, process: ProcessPlan) -> None:
        """Return when a restarted process serves or has died; kill it after `start_seconds`."""
        children = self._children
        task = asyncio.ensure_future(self._wait_until_serving(process))
        deadline = time.monotonic() + children.spec.start_seconds

        def is_running() -> bool:  # looks it up each time: `respawn` may replace the child
            return children.running[process.name].poll() is None

        try:
            while not task.done() and is_running() and time.monotonic() < deadline:
                await asyncio.wait({task}, timeout=WATCH_SECONDS)
            if task.done():
                await task
                return
            reason = f"not serving after {children.spec.start_seconds:g} s"
        except RollwayError as error:
            reason = error.message
        finally:
            task.cancel()
        if is_running():
            children.report(process, "hung", reason)
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
