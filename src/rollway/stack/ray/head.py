"""The actor that owns a stack on Ray: it starts the parts, watches them and takes them down.

    driver ── creates ──► Head  `rollway/<stack>`, detached: the name is the lock
      │                    │ 1. a Keeper per node      2. groups: Ray holds the resources
      ├─ Witness ◄─ waits ─┤ 3. part 0: services and frontend, then the other parts
      │  (dies with the    │ 4. watches: parts, nodes, ranks, the owner
      │   driver)          │ stop: processes, then keepers, then groups, then itself
      └─ start, stop, read ┘

Whatever the Head creates is in its record before it exists, so that a failure, a dead owner or
Ctrl-C at any point takes down exactly what there is. If the Head itself dies, its Keepers do that.
`healing.py` says what happens to lost parts and nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from rollway.config import StackSpec
from rollway.errors import RollwayError, StartError
from rollway.stack.ray import cluster
from rollway.stack.ray.healing import Events, Healing
from rollway.stack.ray.ledger import Ledger
from rollway.stack.ray.mirror import Pieces
from rollway.stack.ray.parts import SERVICES, Parts
from rollway.stack.ray.placement import Placement
from rollway.stack.state import StackState

if TYPE_CHECKING:
    from rollway.fleet.discovery import Worker

_LAST_CALL_SECONDS = 3.0


class Head:
    """Owns one run of a stack."""

    def __init__(
        self,
        spec: dict[str, Any],
        placement: Placement,
        run_id: str,
        owner: dict[str, Any],
        witness: Any,
    ) -> None:
        import ray

        self._me = ray.get_runtime_context().current_actor
        self._spec = StackSpec.model_validate(spec)
        self._placement = placement
        self._identity = {"run_id": run_id, "since": time.time(), **owner}
        self._parts = Parts(self._spec, run_id, self._me)
        self._ledger = Ledger()
        self._witness = witness
        self._phase = "starting"
        self._error: dict[str, Any] | None = None
        self._secret = ""
        self._freed: list[str] = []
        self._stopping, self._over, self._ready = (asyncio.Event() for _ in range(3))
        self._events = Events()
        self._healing = Healing(
            self._spec, self._parts, placement.services, self._events, self._fail,
            self._stopping.is_set,
        )  # fmt: skip
        self._me.run.remote()  # before any call of the driver, which may die at once

    # --- the life of the run ---------------------------------------------------------------------

    async def run(self) -> None:
        """Start the stack, watch it until it is to stop, and leave nothing behind."""
        import ray

        owner = asyncio.create_task(self._watch_owner())
        try:
            await self._run_until_stop(self._parts.start(self._placement))
            if not self._stopping.is_set():
                await self._become_ready()
                await self._stopping.wait()
        except RollwayError as error:
            self._error = error.as_json()
        except Exception as error:  # noqa: BLE001  (whatever it is, the run must be taken down)
            cause = " ".join(str(error).split())[:600] or type(error).__name__
            self._error = StartError(f"The stack could not start on Ray: {cause}").as_json()
        owner.cancel()
        self._phase = "stopping"
        self._stopping.set()
        self._ready.set()
        await self._take_down()
        self._phase = "stopped"
        self._over.set()
        # Calls that wait for the end get their answer first. (`exit_actor` would wait for all
        # calls of this actor, also for those that wait for its end.)
        await asyncio.sleep(_LAST_CALL_SECONDS)
        ray.kill(self._me)

    async def _run_until_stop(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
            return
        await task

    async def _become_ready(self) -> None:
        self._healing.start()
        keeper = self._parts.keepers[self._parts.parts[SERVICES].node]
        self._secret = (await keeper.wait_until_joinable.remote(self._parts.parts[SERVICES].name))[
            "join"
        ]["secret"]
        self._phase = "ready"
        seconds = time.time() - self._identity["since"]
        self._events.note("ready", seconds=round(seconds, 3), steps=dict(self._parts.steps))
        self._ready.set()

    async def _watch_owner(self) -> None:
        """Stop the run when its owner dies; a detached run has none once it is ready."""
        import ray

        witness = self._witness
        with contextlib.suppress(ray.exceptions.RayError):
            await cluster.outlast(witness.wait.remote)
        if self._witness is witness:
            self._events.note("owner gone")
            self._fail("The process that owns the stack has ended.")

    def _fail(self, cause: str) -> None:
        if self._error is None and not self._stopping.is_set():
            self._error = StartError(cause).as_json()
        self._stopping.set()

    async def _take_down(self) -> None:
        """Stop all processes, then the keepers, then free the groups."""
        import ray

        self._healing.cancel()
        await self._parts.groups.wait_for_calls()
        keepers = list(self._parts.keepers.values())
        stops = [cluster.outlast(keeper.stop.remote) for keeper in keepers]
        # A Keeper that died has no answer; the lifeline has told its supervisor to stop.
        await asyncio.gather(*stops, return_exceptions=True)
        for keeper in keepers:
            ray.kill(keeper)
        self._freed = await asyncio.to_thread(cluster.remove_groups, list(self._parts.groups.nodes))

    # --- what drivers ask ------------------------------------------------------------------------

    async def identify(self) -> dict[str, Any]:
        """Return the run id, and who started the stack, when and where."""
        return {**self._identity, "phase": self._phase, "stack": self._spec.name}

    async def wait_until_ready(self) -> dict[str, Any] | None:
        """Return None when the stack is ready, or the error after everything was taken down."""
        await self._ready.wait()
        if self._phase != "ready":
            await self._over.wait()
            return self._error or StartError("The stack was stopped while it started.").as_json()
        return None

    async def wait_until_over(self) -> dict[str, Any] | None:
        """Return the cause when the run has ended; None if somebody stopped it."""
        await self._over.wait()
        return self._error

    async def detach(self) -> None:
        """Outlive the owner."""
        self._witness = None

    async def stop(self) -> list[str]:
        """Take the run down; return the ids of its groups when nothing is left of it."""
        self._events.note("stop")
        self._stopping.set()
        await self._over.wait()
        return self._freed

    async def read_state(self) -> bytes:
        """Return the state of the whole stack."""
        states = await self._healing.read_states()
        merged = self._make_state()
        for part, state in states:
            if part.number == SERVICES:
                merged.frontend, merged.rl = state.frontend, state.rl
                merged.join_spec, merged.log_dir = state.join_spec, state.log_dir
                merged.run_dir = state.run_dir
            for process in state.processes:
                process.node = self._parts.addresses.get(part.node, "")
                merged.processes.append(process)
        return msgspec.json.encode(merged)

    def _make_state(self) -> StackState:
        spec = self._spec
        return StackState.from_spec(
            spec,
            run_id=self._identity["run_id"],
            supervisor_pid=0,
            supervisor_start=0,
            run_dir="",
            log_dir="",
            phase="stopping" if self._phase == "stopped" else self._phase,
            started_at=self._identity["since"],
            ray_namespace=spec.ray.namespace,
            waiting=self._healing.waiting,
        )

    async def read_events(self) -> list[dict[str, Any]]:
        """Return the history of the run: starts, losses, replacements."""
        return list(self._events.entries)

    async def read_secret(self) -> str:
        """Return the secret that signs orders and offers. Every caller may run code on
        the cluster anyway."""
        return self._secret

    async def replace_worker(self, worker: Worker) -> bool:
        """Kill a worker so that its supervisor restarts it."""
        calls = [keeper.replace.remote(worker) for keeper in self._parts.keepers.values()]
        return any(a is True for a in await asyncio.gather(*calls, return_exceptions=True))

    async def read_log(self, process: str, lines: int, reader: str = "") -> list[str] | None:
        """Return the last lines of a process's log; with a `reader`, then what is new to it."""
        for keeper in self._parts.keepers.values():
            call = (
                keeper.follow_log.remote(process, lines, reader)
                if reader
                else keeper.read_log.remote(process, lines)
            )
            with contextlib.suppress(Exception):  # a node that was lost has no log
                answer: list[str] | None = await call
                if answer is not None:
                    return answer
        return None

    async def read_record(
        self, known: dict[str, dict[str, int]], own: frozenset[str]
    ) -> dict[str, Pieces]:
        """Return what each node has recorded and the reader does not have."""
        keepers = {node[:12]: keeper for node, keeper in self._parts.keepers.items()}
        calls = [
            keeper.read_record.remote(known.get(node, {}), own) for node, keeper in keepers.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)  # a node may be lost
        return {
            node: parts
            for node, parts in zip(keepers, answers, strict=True)
            if isinstance(parts, dict)
        }

    # --- the record of versions, and the lock of refits ------------------------------------------

    async def call_ledger(self, method: str, *arguments: Any) -> Any:
        """Read or write the versions of a model."""
        return getattr(self._ledger, method)(*arguments)

    async def lock(self, name: str, token: str, witness: Any) -> bool:
        """Wait for a lock; it is released when the witness dies."""
        return await self._ledger.lock(name, token, witness)

    async def unlock(self, name: str, token: str) -> None:
        self._ledger.unlock(name, token)
