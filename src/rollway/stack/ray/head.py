"""The actor that owns a stack on Ray: it starts the parts, watches them and takes them down.

    driver ── creates ──► Head  `rollway/<stack>`, detached: the name is the lock
      │                    │ 1. a Keeper per node      2. groups: Ray holds the resources
      ├─ Witness ◄─ waits ─┤ 3. part 0: services and frontend, then the other parts
      │  (dies with the    │ 4. watches: parts, nodes, ranks, the owner
      │   driver)          │ stop: processes, then keepers, then groups, then itself
      └─ start, stop, read ┘

Whatever the Head creates is in its record before it exists, so that a failure, a dead owner or
Ctrl-C at any point takes down exactly what there is. If the Head itself dies, its Keepers do that.

    a part's Keeper or supervisor dies, its node lives     the part starts again there
    a node is lost                                         `replace`: its replicas are placed again,
                                                           or wait for room; `fail`: the run ends
    part 0 is lost                                         the run ends with that cause
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from rollway.config import StackSpec
from rollway.errors import RollwayError, StartError
from rollway.fleet.discovery import Worker
from rollway.stack.ray import cluster
from rollway.stack.ray.ledger import Ledger
from rollway.stack.ray.parts import SERVICES, Part, Parts
from rollway.stack.ray.placement import Placement, ReplicaPlace, place_again
from rollway.stack.state import WAITS_FOR_REPLICA, StackState

RETRY_SECONDS = 5.0
NODE_SECONDS = 60.0
"""How long a node may neither run a new Keeper nor be dead."""
_RANK_SECONDS = 1.0
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
        given_gpus: dict[str, list[str]] | None = None,
    ) -> None:
        import ray

        self._me = ray.get_runtime_context().current_actor
        self._spec = StackSpec.model_validate(spec)
        self._placement = placement
        self._identity = {"run_id": run_id, "since": time.time(), **owner}
        self._parts = Parts(self._spec, run_id, self._me, given_gpus)
        self._ledger = Ledger()
        self._witness = witness
        self._phase = "starting"
        self._error: dict[str, Any] | None = None
        self._secret = ""
        self._displaced: list[ReplicaPlace] = []
        """Replicas of lost nodes that have no new place yet."""
        self._waiting: list[str] = []
        self._lost: set[str] = set()
        self._events: list[dict[str, Any]] = []
        self._healing = asyncio.Lock()
        self._watches: set[asyncio.Task[None]] = set()
        self._stopping, self._over, self._ready = (asyncio.Event() for _ in range(3))
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
        except ray.exceptions.RayError as error:  # a node was lost during the start, for example
            cause = " ".join(str(error).split())[:600]
            self._error = StartError(f"The stack could not start on Ray: {cause}").as_json()
        owner.cancel()
        self._phase = "stopping"
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
        for part in self._parts.parts.values():
            self._watch(part)
        if any(part.shares_replica for part in self._parts.parts.values()):
            self._add_watch(self._watch_ranks())
        keeper = self._parts.record.keepers[self._parts.parts[SERVICES].node]
        self._secret = (await keeper.wait_until_joinable.remote(self._parts.parts[SERVICES].name))[
            "join"
        ]["secret"]
        self._phase = "ready"
        self._note("ready", seconds=round(time.time() - self._identity["since"], 3))
        self._ready.set()

    async def _watch_owner(self) -> None:
        """Stop the run when its owner dies; a detached run has none once it is ready."""
        import ray

        witness = self._witness
        with contextlib.suppress(ray.exceptions.RayError):
            await witness.wait.remote()
        if self._witness is witness:
            self._note("owner gone")
            self._fail("The process that owns the stack has ended.")

    def _fail(self, cause: str) -> None:
        if self._error is None and not self._stopping.is_set():
            self._error = StartError(cause).as_json()
        self._stopping.set()

    async def _take_down(self) -> None:
        """Stop all processes, then the keepers, then free the groups."""
        import ray

        for task in self._watches:
            task.cancel()
        record = self._parts.record
        keepers = list(record.keepers.values())
        stops = [keeper.stop.remote() for keeper in keepers]
        # A Keeper that died has no answer; the lifeline has told its supervisor to stop.
        await asyncio.gather(*stops, return_exceptions=True)
        for keeper in keepers:
            ray.kill(keeper)
        await asyncio.to_thread(cluster.remove_groups, list(record.groups))

    def _note(self, event: str, **details: Any) -> None:
        self._events.append({"time": time.time(), "event": event, **details})
        del self._events[:-1000]

    # --- lost parts ------------------------------------------------------------------------------

    def _watch(self, part: Part) -> None:
        self._add_watch(self._watch_part(part))

    def _add_watch(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _watch_part(self, part: Part) -> None:
        """Wait for the end of a part, which nobody has asked for; then heal the stack."""
        import ray

        where = part.describe(self._parts.addresses)
        keeper = self._parts.record.keepers[part.node]
        try:
            error = await keeper.watch.remote(part.name)
            cause = f"The supervisor of the engines of {where} ended. {error}".rstrip()
        except ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[:300]
            cause = f"The actor that ran the engines of {where} died: {text}"
        if self._stopping.is_set():
            return
        self._note("part lost", part=part.name, node=part.node, cause=cause)
        if part.number == SERVICES or self._spec.ray.on_node_lost == "fail":
            self._fail(cause)
            return
        async with self._healing:
            if part.number in self._parts.parts:
                await self._heal(part, cause)

    async def _heal(self, part: Part, cause: str) -> None:
        if await self._revive_keeper(part.node):
            await self._restart_part(part, cause)
            return
        self._parts.record.keepers.pop(part.node, None)
        self._lost.add(part.node)
        lost = [p for p in self._parts.parts.values() if p.node == part.node]
        replicas = list(dict.fromkeys(place for p in lost for place, _ in p.workers))
        self._note("node lost", node=part.node, replicas=[str(place) for place in replicas])
        # The ranks of these replicas on other nodes are worth nothing without the lost ones.
        others = [
            p
            for p in self._parts.parts.values()
            if p.shares_replica and any(place in replicas for place, _ in p.workers)
        ]
        gone = {p.number: p for p in (*lost, *others)}.values()
        await self._parts.remove(list(gone), replicas)
        self._displaced += replicas
        if len(self._displaced) == len(replicas):  # otherwise a task does this already
            self._add_watch(self._place_again())

    async def _revive_keeper(self, node: str) -> bool:
        """Return whether the node lives and has a Keeper, a new one if it must be."""
        deadline = time.monotonic() + NODE_SECONDS
        attempt: asyncio.Task[None] | None = None
        keeper = self._parts.record.keepers.get(node)
        if keeper is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_await(keeper.examine.remote()), 10.0)
                return True
        try:
            attempt = asyncio.create_task(self._parts.create_keeper(node))
            while time.monotonic() < deadline:
                await asyncio.wait({attempt}, timeout=0.5)
                if attempt.done():
                    return attempt.exception() is None
                nodes = await asyncio.to_thread(cluster.read_nodes)
                if node not in {entry.id for entry in nodes}:
                    return False
            return False
        finally:
            if attempt is not None:
                attempt.cancel()

    async def _restart_part(self, part: Part, cause: str) -> None:
        """Start a part again on its node until it runs."""
        import ray

        while True:
            again = self._parts.renew(part)
            try:
                await self._parts.launch(again, after=[part.name])
            except (RollwayError, ray.exceptions.RayError) as error:
                self._note("restart failed", part=again.name, error=str(error)[:600])
                if part.node not in {n.id for n in await asyncio.to_thread(cluster.read_nodes)}:
                    self._watch(again)  # finds out that the node is lost
                    return
                part = again
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._note("part restarted", part=again.name, cause=cause)
            self._watch(again)
            return

    async def _place_again(self) -> None:
        """Start lost replicas where there is room, and wait for room for the others."""
        import ray

        while self._displaced:
            nodes = await asyncio.to_thread(cluster.read_nodes)
            old = Placement(self._placement.services, tuple(self._displaced))
            again, waiting = place_again(self._spec, old, nodes, self._lost)
            reasons = [f"{entry.place}: {entry.reason}" for entry in waiting]
            if reasons != self._waiting:
                self._waiting = reasons
                self._note("waiting", replicas=reasons)
            if again:
                try:
                    parts = await self._parts.add(again)
                except (RollwayError, ray.exceptions.RayError) as error:
                    self._note("placing again failed", error=str(error)[:600])
                else:
                    placed = {(p.model, p.role, p.replica) for p in again}
                    self._displaced = [
                        p for p in self._displaced if (p.model, p.role, p.replica) not in placed
                    ]
                    self._note("placed again", replicas=[str(place) for place in again])
                    for part in parts:
                        self._watch(part)
            if self._displaced:
                await asyncio.sleep(RETRY_SECONDS)
        self._waiting = []

    async def _watch_ranks(self) -> None:
        """Restart the ranks of a replica over several nodes together.

        A rank that has died waits for its replica. The others are stopped; when all of them wait,
        all start again."""
        while True:
            await asyncio.sleep(_RANK_SECONDS)
            ranks: dict[tuple[str, int | None], list[tuple[Part, Any]]] = {}
            for part, state in await self._read_parts():
                for process in state.processes:
                    if process.nodes > 1:
                        key = process.model or "", process.replica
                        ranks.setdefault(key, []).append((part, process))
            for members in ranks.values():
                waiting = [process.state == WAITS_FOR_REPLICA for _, process in members]
                if not any(waiting) or len(members) < members[0][1].nodes:
                    continue
                method = "release_rank" if all(waiting) else "stop_rank"
                calls = [
                    getattr(self._parts.record.keepers[part.node], method).remote(
                        part.name, process.name
                    )
                    for (part, process), waits in zip(members, waiting, strict=True)
                    if all(waiting) or not waits
                ]
                await asyncio.gather(*calls, return_exceptions=True)

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

    async def stop(self) -> None:
        """Take the run down; return when nothing is left of it."""
        self._note("stop")
        self._stopping.set()
        await self._over.wait()

    async def read_state(self) -> bytes:
        """Return the state of the whole stack."""
        states = await self._read_parts()
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
        return StackState(
            name=spec.name,
            run_id=self._identity["run_id"],
            supervisor_pid=0,
            supervisor_start=0,
            run_dir="",
            log_dir="",
            phase="stopping" if self._phase == "stopped" else self._phase,  # type: ignore[arg-type]
            started_at=self._identity["since"],
            models=[model.name for model in spec.models],
            model_paths={model.name: model.path for model in spec.models},
            checkpoint_roots=[str(root) for root in spec.checkpoint_roots],
            timeouts=spec.timeouts.model_dump(),
            restarts=spec.restart.enabled,
            stop_seconds=spec.stop_seconds,
            ray_namespace=spec.ray.namespace,
            waiting=self._waiting,
        )

    async def _read_parts(self) -> list[tuple[Part, StackState]]:
        keepers = dict(self._parts.record.keepers)
        answers = await asyncio.gather(
            *(_await(keeper.read_states.remote()) for keeper in keepers.values()),
            return_exceptions=True,
        )
        by_name = {part.name: part for part in self._parts.parts.values()}
        states = [
            msgspec.json.decode(state, type=StackState)
            for answer in answers
            if not isinstance(answer, BaseException)
            for state in answer
        ]
        pairs = [(by_name[state.name], state) for state in states if state.name in by_name]
        return sorted(pairs, key=lambda pair: pair[0].number)

    async def read_events(self) -> list[dict[str, Any]]:
        """Return the history of the run: starts, losses, replacements."""
        return list(self._events)

    async def read_secret(self) -> str:
        """Return the secret that signs orders and offers. Who may call this may run code on the
        cluster."""
        return self._secret

    async def replace_worker(self, worker: Worker) -> bool:
        """Kill a worker so that its supervisor restarts it."""
        calls = [keeper.replace.remote(worker) for keeper in self._parts.record.keepers.values()]
        return any(a is True for a in await asyncio.gather(*calls, return_exceptions=True))

    async def read_log(self, process: str, lines: int, reader: str = "") -> list[str] | None:
        """Return the last lines of a process's log; with a `reader`, then what is new to it."""
        for keeper in self._parts.record.keepers.values():
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

    # --- the record of versions, and the lock of refits ------------------------------------------

    async def call_ledger(self, method: str, *arguments: Any) -> Any:
        """Read or write the versions of a model."""
        return getattr(self._ledger, method)(*arguments)

    async def lock(self, name: str, token: str, witness: Any) -> bool:
        """Wait for a lock; it is released when the witness dies."""
        return await self._ledger.lock(name, token, witness)

    async def unlock(self, name: str, token: str) -> None:
        self._ledger.unlock(name, token)


async def _await(ref: Any) -> Any:
    return await ref
