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
from collections import defaultdict
from typing import Any

from rollway.errors import RollwayError, StartError
from rollway.observe.record import Recorder
from rollway.spec import StackSpec
from rollway.stack.ray import cluster
from rollway.stack.ray.healing import Healing
from rollway.stack.ray.parts import SERVICES, Parts
from rollway.stack.ray.placement import Placement
from rollway.stack.state import StackState, choose_record_dir, home

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
        self._freed: list[str] = []
        self._stopping, self._over, self._ready = (asyncio.Event() for _ in range(3))
        record = choose_record_dir(self._spec, run_id)
        self._recorder = (
            Recorder(home() / record, "head", stack=self._spec.name, run=run_id) if record else None
        )
        self._healing = Healing(self._spec, self._parts, self._note)
        self._me.run.remote()  # before any call of the driver, which may die at once

    # --- the life of the run ---------------------------------------------------------------------

    async def run(self) -> None:
        """Start the stack, watch it until it is to stop, and leave nothing behind."""
        import ray

        works = (self._serve(), self._watch_owner(), self._stopping.wait())
        tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors and not self._stopping.is_set():
            error = errors[0]
            if not isinstance(error, RollwayError):  # whatever it is, the run must be taken down
                cause = " ".join(str(error).split())[:600] or type(error).__name__
                error = StartError(f"The stack failed on Ray: {cause}")
            self._error = error.as_json()
        self._phase = "stopping"
        self._ready.set()
        if self._recorder is not None:  # before the parts end, of which one may remove the record
            await asyncio.to_thread(self._recorder.close)
        await self._take_down()
        self._phase = "stopped"
        self._over.set()
        # Calls that wait for the end get their answer first. (`exit_actor` would wait for all
        # calls of this actor, also for those that wait for its end.)
        await asyncio.sleep(_LAST_CALL_SECONDS)
        ray.kill(self._me)

    async def _serve(self) -> None:
        """Start the stack and keep it alive; raise the cause when it cannot be."""
        await self._parts.start(self._placement)
        self._phase = "ready"
        self._note("ready")
        self._ready.set()
        await self._healing.run()

    async def _watch_owner(self) -> None:
        """Raise when the owner dies; a detached run has none once it is ready."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            await cluster.outlast(self._witness.wait.remote)
        if self._witness is None:
            await asyncio.Event().wait()
        self._note("owner gone")
        raise StartError("The process that owns the stack has ended.")

    def _note(self, event: str, detail: str = "") -> None:
        """Add an event to the run's record, on this node."""
        if self._recorder is not None:
            self._recorder.event(event, detail)

    async def _take_down(self) -> None:
        """Stop all processes, then the keepers, then free the groups."""
        import ray

        keepers = list(self._parts.keepers.values())
        stops = [cluster.outlast(keeper.stop.remote) for keeper in keepers]
        # A Keeper that died has no answer; the lifeline has told its supervisor to stop.
        await asyncio.gather(*stops, return_exceptions=True)
        for keeper in keepers:
            ray.kill(keeper)
        self._freed = await self._parts.groups.remove_all()

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
        self._note("stop")
        self._stopping.set()
        await self._over.wait()
        return self._freed

    async def read_state(self) -> StackState:
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
        return merged

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

    async def read_secret(self) -> str:
        """Return the secret that signs orders and offers. Every caller may run code on
        the cluster anyway."""
        return str(self._parts.join.get("join", {}).get("secret", ""))

    async def ask_keepers(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the answers of all Keepers that answer, by their nodes."""
        return await self._parts.ask_keepers(method, *arguments)

    # --- the record of versions, and the lock of refits ------------------------------------------

    async def call_ledger(self, method: str, *arguments: Any) -> Any:
        """Read or write the versions of a model; wait for a lock, or release it."""
        return await getattr(self._ledger, method)(*arguments)


class Ledger:
    """What all processes that use the stack share: the versions of its models, and locks. In
    memory: it ends with the run, as the versions do."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[int, str]] = {}
        self._claims: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._holds: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        """Who holds a lock or waits for it, by the caller's token; and whether it holds."""

    async def put(self, model: str, version: int, path: str) -> None:
        self._current[model] = version, path

    async def get(self, model: str) -> tuple[int, str] | None:
        return self._current.get(model)

    async def claim(self, model: str, version: int, identity: str) -> None:
        self._claims[model][version] = identity

    async def claims(self, model: str) -> dict[int, str]:
        return self._claims[model]

    async def lock(self, name: str, token: str, witness: Any) -> bool:
        """Wait for a lock, which `unlock` or the death of the witness releases; return False if
        either came first."""
        if token not in self._holds:  # a call may be repeated after a break of the network
            is_held = asyncio.Event()
            task = asyncio.create_task(self._hold(name, witness, is_held))
            self._holds[token] = task, is_held
            task.add_done_callback(lambda _: self._holds.pop(token, None))
        task, is_held = self._holds[token]
        turn = asyncio.ensure_future(is_held.wait())
        await asyncio.wait({task, turn}, return_when=asyncio.FIRST_COMPLETED)
        turn.cancel()
        return is_held.is_set()

    async def _hold(self, name: str, witness: Any, is_held: asyncio.Event) -> None:
        death = asyncio.ensure_future(cluster.outlast(witness.wait.remote))
        try:
            async with self._locks[name]:
                if not death.done():
                    is_held.set()
                    await asyncio.wait({death})
        finally:
            death.cancel()

    async def unlock(self, token: str) -> None:
        """Release a lock, or give up waiting for it."""
        if token in self._holds:
            self._holds[token][0].cancel()
