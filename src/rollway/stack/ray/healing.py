"""Keep the parts of a ready run alive: restart them, place them again, or end the run.

a part's Keeper or supervisor dies, its node lives     the part starts again there; if it does not,
                                                       its replicas are placed again
a node is lost                                         `replace`: its replicas are placed again,
                                                       or wait for room; `fail`: the run ends
part 0 is lost                                         the run ends with that cause
one rank of a replica over several nodes dies          all its ranks start again together
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rollway.errors import RollwayError, StartError
from rollway.spec import StackSpec
from rollway.stack.ray import cluster
from rollway.stack.ray.parts import SERVICES, Parts, StackPart
from rollway.stack.ray.placement import ReplicaPlace, place_again
from rollway.stack.state import WAITS_FOR_REPLICA, StackState

RETRY_SECONDS = 5.0
NODE_SECONDS = 60.0
"""How long a node may have no Keeper that answers, or no new one, and not be dead."""
_RANK_SECONDS = 1.0


class Healing:
    """Watches the parts of a run."""

    def __init__(self, spec: StackSpec, parts: Parts, note: Callable[[str, str], None]) -> None:
        self.parts = parts
        self.waiting: list[str] = []
        """Replicas that do not run at the moment, each with the reason."""
        self._spec = spec
        self._note = note
        self._lost: set[str] = set()
        self._displaced: list[ReplicaPlace] = []
        """Replicas that have no new place yet."""
        self._healing = asyncio.Lock()
        self._watches = asyncio.TaskGroup()

    async def run(self) -> None:
        """Watch all parts, also those to come; raise the cause when the run must end."""
        try:
            async with self._watches as watches:
                for part in self.parts.parts.values():
                    self.watch(part)
                watches.create_task(self._watch_ranks())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def watch(self, part: StackPart) -> None:
        self._watches.create_task(self._watch_part(part))

    async def _watch_part(self, part: StackPart) -> None:
        """Wait until a part ends without being stopped; then heal the stack."""
        import ray

        where = self.parts.describe(part.node)
        keeper = self.parts.keepers[part.node]
        try:
            error = await cluster.outlast(partial(keeper.watch.remote, part.name))
            cause = f"The supervisor of the engines of {where} ended. {error}".rstrip()
        except ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[:300]
            cause = f"The actor that ran the engines of {where} died: {text}"
        self._note("part lost", cause)
        if part.number == SERVICES or self._spec.ray.on_node_lost == "fail":
            raise StartError(cause)
        async with self._healing:
            if part.number in self.parts.parts:
                await self._heal(part, cause)

    async def _heal(self, part: StackPart, cause: str) -> None:
        """Start a lost part again on its node; if that cannot be, place its replicas again."""
        import ray

        where = self.parts.describe(part.node)
        if await self._revive_keeper(part.node):
            renewed = self.parts.renew(part)
            try:
                await self.parts.launch(renewed, after=[part.name])
            except (RollwayError, ray.exceptions.RayError) as error:
                self._note("restart failed", f"{where}: {error}"[:600])
                lost = [renewed]
            else:
                self._note("part restarted", f"{where}. {cause}")
                self.watch(renewed)
                return
        else:
            dead = self.parts.keepers.pop(part.node, None)
            if dead is not None:
                ray.kill(dead)  # or Ray would start it if the node came back
            self._lost.add(part.node)
            lost = [p for p in self.parts.parts.values() if p.node == part.node]
            self._note("node lost", where)
        replicas = list(dict.fromkeys(place for p in lost for place, _ in p.workers))
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
            self._watches.create_task(self._place_again())

    async def _revive_keeper(self, node: str) -> bool:
        """Return whether the node lives and has a Keeper, a new one if it must be."""
        keeper = self.parts.keepers.get(node)
        if keeper is not None:
            with contextlib.suppress(Exception):
                # Not `examine`, which ends a Keeper: this one may run other parts, which are well.
                answer = cluster.outlast(keeper.read_states.remote)
                await asyncio.wait_for(answer, NODE_SECONDS)
                return True
            self.parts.drop_keeper(node, keeper)
        attempt = asyncio.ensure_future(self.parts.create_keeper(node))
        deadline = time.monotonic() + NODE_SECONDS
        try:
            while time.monotonic() < deadline:
                await asyncio.wait({attempt}, timeout=0.5)
                if attempt.done():
                    return attempt.exception() is None
                nodes = await asyncio.to_thread(cluster.read_nodes)
                if node not in {entry.id for entry in nodes}:
                    return False
            return False
        finally:
            attempt.cancel()

    async def _place_again(self) -> None:
        """Start lost replicas where there is room, and wait for room for the others."""
        import ray

        while self._displaced:
            nodes = await asyncio.to_thread(cluster.read_nodes)
            living = [node for node in nodes if node.id not in self._lost]
            again, waiting = place_again(self._spec, self._displaced, living)
            if again:
                try:
                    parts = await self.parts.add(again)
                except (RollwayError, ray.exceptions.RayError) as error:
                    cause = str(error).partition("\n\n")[0]  # without the end of a log
                    why = f"it did not start, and is tried again: {cause}"
                    waiting += [f"{place}: {why}" for place in again]
                else:
                    placed = set(map(str, again))
                    self._displaced = [p for p in self._displaced if str(p) not in placed]
                    self._note("placed again", ", ".join(map(str, again)))
                    for part in parts:
                        self.watch(part)
            if waiting and waiting != self.waiting:
                self._note("waiting", "; ".join(waiting))
            self.waiting = waiting
            if self._displaced:
                await asyncio.sleep(RETRY_SECONDS)

    async def _watch_ranks(self) -> None:
        """Restart the ranks of a replica over several nodes together.

        A rank that has died waits for its replica. The others are stopped; when all of them wait,
        all start again."""
        while True:
            await asyncio.sleep(_RANK_SECONDS)
            if not any(part.shares_replica for part in self.parts.parts.values()):
                continue
            ranks: dict[tuple[str, int | None], list[tuple[StackPart, Any]]] = {}
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

    async def read_states(self) -> list[tuple[StackPart, StackState]]:
        """Return the states of all parts that answer."""
        answers = await self.parts.ask_keepers("read_states")
        by_name = {part.name: part for part in self.parts.parts.values()}
        states = [state for answer in answers.values() for state in answer]
        pairs = [(by_name[state.name], state) for state in states if state.name in by_name]
        return sorted(pairs, key=lambda pair: pair[0].number)
