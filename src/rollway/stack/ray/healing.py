"""Keep the parts of a ready run alive: restart them, place them again, or end the run.

a part's Keeper or supervisor dies, its node lives     the part starts again there
a node is lost                                         `replace`: its replicas are placed again,
                                                       or wait for room; `fail`: the run ends
part 0 is lost                                         the run ends with that cause
one rank of a replica over several nodes dies          all its ranks start again together
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from rollway.config import StackSpec
from rollway.errors import RollwayError
from rollway.stack.ray import cluster
from rollway.stack.ray.parts import SERVICES, Part, Parts
from rollway.stack.ray.placement import Placement, ReplicaPlace, place_again
from rollway.stack.state import WAITS_FOR_REPLICA, StackState

RETRY_SECONDS = 5.0
NODE_SECONDS = 60.0
"""How long a node may neither run a new Keeper nor be dead."""
_RANK_SECONDS = 1.0


class Events:
    """The history of a run, as far as memory should hold it."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def note(self, event: str, **details: Any) -> None:
        self.entries.append({"time": time.time(), "event": event, **details})
        del self.entries[:-1000]


class Healing:
    """Watches the parts of a run."""

    def __init__(
        self, spec: StackSpec, parts: Parts, services: str, events: Events,
        fail: Callable[[str], None], is_stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.parts = parts
        self._without_room: list[str] = []
        self._failures: dict[str, str] = {}
        """Why replicas did not start again, by the replica."""
        self._spec = spec
        self._services = services
        self._events = events
        self._fail = fail
        self._is_stopping = is_stopping
        self._lost: set[str] = set()
        self._displaced: list[ReplicaPlace] = []
        """Replicas of lost nodes that have no new place yet."""
        self._healing = asyncio.Lock()
        self._watches: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> list[str]:
        """Replicas that do not run at the moment, each with the reason."""
        return [*self._without_room, *self._failures.values()]

    def start(self) -> None:
        """Watch all parts that there are."""
        for part in self.parts.parts.values():
            self.watch(part)
        self._add(self._watch_ranks())

    def cancel(self) -> None:
        for task in list(self._watches):
            task.cancel()

    def watch(self, part: Part) -> None:
        self._add(self._watch_part(part))

    def _add(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._watches.add(task)

        def end(_: object) -> None:
            self._watches.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                # Nobody would heal the stack any more, and nobody would know.
                self._fail(f"The stack is no longer watched: {error!r}")

        task.add_done_callback(end)

    async def _watch_part(self, part: Part) -> None:
        """Wait until a part ends without being stopped; then heal the stack."""
        import ray

        where = part.describe(self.parts.addresses)
        keeper = self.parts.keepers[part.node]
        try:
            error = await cluster.outlast(partial(keeper.watch.remote, part.name))
            cause = f"The supervisor of the engines of {where} ended. {error}".rstrip()
        except ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[:300]
            cause = f"The actor that ran the engines of {where} died: {text}"
        if self._is_stopping():
            return
        self._events.note("part lost", part=part.name, node=part.node, cause=cause)
        if part.number == SERVICES or self._spec.ray.on_node_lost == "fail":
            self._fail(cause)
            return
        async with self._healing:
            if part.number in self.parts.parts:
                await self._heal(part, cause)

    async def _heal(self, part: Part, cause: str) -> None:
        import ray

        if await self._revive_keeper(part.node):
            await self._restart_part(part, cause)
            return
        dead = self.parts.keepers.pop(part.node, None)
        if dead is not None:
            ray.kill(dead)  # or Ray would start it if the node came back
        self._lost.add(part.node)
        lost = [p for p in self.parts.parts.values() if p.node == part.node]
        replicas = list(dict.fromkeys(place for p in lost for place, _ in p.workers))
        self._events.note("node lost", node=part.node, replicas=[str(place) for place in replicas])
        # The ranks of these replicas on other nodes are worth nothing without the lost ones.
        others = [
            p
            for p in self.parts.parts.values()
            if p.shares_replica and any(place in replicas for place, _ in p.workers)
        ]
        gone = {p.number: p for p in (*lost, *others)}.values()
        await self.parts.remove(list(gone), replicas)
        self._displaced += replicas
        if len(self._displaced) == len(replicas):  # otherwise a task does this already
            self._add(self._place_again())

    async def _revive_keeper(self, node: str) -> bool:
        """Return whether the node lives and has a Keeper, a new one if it must be."""
        deadline = time.monotonic() + NODE_SECONDS
        attempt: asyncio.Task[None] | None = None
        keeper = self.parts.keepers.get(node)
        if keeper is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(cluster.get_result(keeper.examine.remote()), 10.0)
                return True
        try:
            attempt = asyncio.create_task(self.parts.create_keeper(node))
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

        replicas = [place for place, _ in part.workers]
        while True:
            renewed = self.parts.renew(part)
            try:
                await self.parts.launch(renewed, after=[part.name])
            except (RollwayError, ray.exceptions.RayError) as error:
                self._events.note("restart failed", part=renewed.name, error=str(error)[:600])
                self._note_failures(replicas, error)
                if part.node not in {n.id for n in await asyncio.to_thread(cluster.read_nodes)}:
                    self._note_failures(replicas, None)
                    self.watch(renewed)  # finds out that the node is lost
                    return
                part = renewed
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._note_failures(replicas, None)
            self._events.note("part restarted", part=renewed.name, cause=cause)
            self.watch(renewed)
            return

    def _note_failures(self, replicas: Sequence[ReplicaPlace], error: Exception | None) -> None:
        """Remember why these replicas did not start; None if they did."""
        for name in map(str, replicas):
            self._failures.pop(name, None)
            if error is not None:
                cause = str(error).partition("\n\n")[0]  # without the end of a log
                self._failures[name] = f"{name}: it did not start, and is tried again: {cause}"

    async def _place_again(self) -> None:
        """Start lost replicas where there is room, and wait for room for the others."""
        import ray

        while self._displaced:
            nodes = await asyncio.to_thread(cluster.read_nodes)
            old = Placement(self._services, tuple(self._displaced))
            again, waiting = place_again(self._spec, old, nodes, self._lost)
            reasons = [f"{entry.place}: {entry.reason}" for entry in waiting]
            if reasons != self._without_room:
                self._without_room = reasons
                if reasons:
                    self._events.note("waiting", replicas=reasons)
            if again:
                try:
                    parts = await self.parts.add(again)
                except (RollwayError, ray.exceptions.RayError) as error:
                    self._events.note("placing again failed", error=str(error)[:600])
                    self._note_failures(again, error)
                else:
                    self._note_failures(again, None)
                    placed = {(p.model, p.role, p.replica) for p in again}
                    self._displaced = [
                        p for p in self._displaced if (p.model, p.role, p.replica) not in placed
                    ]
                    self._events.note("placed again", replicas=[str(place) for place in again])
                    for part in parts:
                        self.watch(part)
            if self._displaced:
                await asyncio.sleep(RETRY_SECONDS)
        self._without_room = []

    async def _watch_ranks(self) -> None:
        """Restart the ranks of a replica over several nodes together.

        A rank that has died waits for its replica. The others are stopped; when all of them wait,
        all start again."""
        while True:
            await asyncio.sleep(_RANK_SECONDS)
            if not any(part.shares_replica for part in self.parts.parts.values()):
                continue
            ranks: dict[tuple[str, int | None], list[tuple[Part, Any]]] = {}
            for part, state in await self.read_states():
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
                    getattr(self.parts.keepers[part.node], method).remote(part.name, process.name)
                    for (part, process), waits in zip(members, waiting, strict=True)
                    if all(waiting) or not waits
                ]
                await asyncio.gather(*calls, return_exceptions=True)

    async def read_states(self) -> list[tuple[Part, StackState]]:
        """Return the states of all parts that answer."""
        keepers = dict(self.parts.keepers)
        answers = await asyncio.gather(
            *(cluster.get_result(keeper.read_states.remote()) for keeper in keepers.values()),
            return_exceptions=True,
        )
        by_name = {part.name: part for part in self.parts.parts.values()}
        states = [
            msgspec.json.decode(state, type=StackState)
            for answer in answers
            if not isinstance(answer, BaseException)
            for state in answer
        ]
        pairs = [(by_name[state.name], state) for state in states if state.name in by_name]
        return sorted(pairs, key=lambda pair: pair[0].number)
