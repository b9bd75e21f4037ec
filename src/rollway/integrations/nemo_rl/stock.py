"""Refits of workers without Rollway's extension: `cluster.weight_sync.method: nccl`.

    driver (`StockWire`)                    policy's rank 0          every worker (Dynamo's routes)
    once:
      what do you export?      ──────────►  walk through the weights
    each refit, in the pause:
      all paused? if the fleet changed, form a group:
                               ──────────►  join                     init_weights_update_group
      all in it? all started?  ───────────────────────────────────►  start_weight_update
      receive                  ───────────────────────────────────►  update_weights
      send                     ──────────►  broadcast
      finish                   ───────────────────────────────────►  finish_weight_update
    verify by a canary, resume

`weights/transports/vllm_group.py` has the messages. What such workers load is not compared with
what was sent; a canary asks whether all of them answer alike.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import NoSuchMethod, StageReply
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.integrations.nemo_rl.publish import DRAFT

INIT_METHOD = "init_weight_transfer_engine"
START_METHOD, UPDATE_METHOD = "start_weight_update", "update_weights"
FINISH_METHOD = "finish_weight_update"
GATHER_SECONDS = 60.0
"""How long a paused worker waits for the others."""

Call = Callable[..., list[Any]]
"""Calls a method of all ranks of the policy, and returns their answers."""


class StockWire:
    """The group of a policy's first rank and all ranks of a fleet's engines."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tensors: list[tuple[str, str, list[int], int]] = []
        self._members: set[int] = set()
        """The instance ids of the workers in the group."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for *_, nbytes in self._tensors)

    async def prepare(self, fleet: Fleet) -> StockUpdate:
        """Return the update that receives the next version.

        Raises:
            UsageError: the policy exports what such workers cannot load.
        """
        if not self._tensors:
            self._tensors = await asyncio.to_thread(self._list_tensors)
        names, dtypes, shapes, _ = zip(*self._tensors, strict=True)
        info = {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}
        return StockUpdate(info, self, fleet.admin)

    async def form(self, admin: DynamoAdmin, workers: Sequence[Worker]) -> None:
        """Form a group with these workers, if it has not formed."""
        if {worker.instance_id for worker in workers} == self._members:
            return
        self._members = set()
        seats, world = [], 1
        for worker in workers:
            seats.append(world)
            world += worker.world_size
        group = next(each for each in await self._run("make_id") if each is not None)
        unique_id = group["nccl_unique_id_b64"]
        joining = self._submit("join_group", nccl_unique_id_b64=unique_id, world=world)
        joins = [
            admin.init_group(
                worker,
                {"init_info": {**group, "rank_offset": first, "world_size": world}},
                method=INIT_METHOD,
            )
            for worker, first in zip(workers, seats, strict=True)
        ]
        await asyncio.gather(*joins)
        await asyncio.wrap_future(joining)
        self._members = {worker.instance_id for worker in workers}

    def start_sending(self) -> Future[list[Any]]:
        def send() -> list[Any]:
            self._call("begin", version=0, receivers=0)
            return self._call("send_weights_via_checkpoint_engine", kv_scales=None)

        return _start_thread(send)

    def forget(self) -> None:
        """Form a new group before the next version: this one may be stuck in a broadcast."""
        self._members = set()

    def _list_tensors(self) -> list[tuple[str, str, list[int], int]]:
        self._call("begin", version=0, receivers=0, is_listing=True)
        self._call("send_weights_via_checkpoint_engine", kv_scales=None)
        tensors = [tuple(info) for info in self._call("list_tensors")[0]]
        drafts = [name for name, *_ in tensors if name.startswith(DRAFT)]
        if drafts:
            raise UsageError(
                f"The policy exports a draft model ({drafts[0]}), which workers without Rollway's "
                "extension load in an update of its own.",
                "Give the workers the extension and use another method, or set "
                "policy.draft.enabled to false.",
            )
        return tensors

    def _submit(self, method: str, **kwargs: Any) -> Future[list[Any]]:
        return _start_thread(partial(self._call, method, **kwargs))

    async def _run(self, method: str, **kwargs: Any) -> list[Any]:
        return await asyncio.wrap_future(self._submit(method, **kwargs))


def _start_thread(call: Callable[[], list[Any]]) -> Future[list[Any]]:
    """Run a call beside this thread. One that waits for a lost rank does not keep the driver."""
    future: Future[list[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever waits for it raises it)
            future.set_exception(error)

    Thread(target=run, name="rollway-nccl", daemon=True).start()
    return future


@dataclass(slots=True)
class _Round:
    """Workers that receive one broadcast together."""

    workers: dict[int, Worker]
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    arrived: dict[str, set[int]] = field(default_factory=dict)
    failure: str = ""
    sending: Future[list[Any]] | None = None

    async def gather(self, step: str, worker: Worker, seconds: float) -> bool:
        """Wait until all workers have come to this step; return whether this was the last."""
        arrived = self.arrived.setdefault(step, set())
        arrived.add(worker.instance_id)
        is_last = arrived == self.workers.keys()
        async with self.changed:
            self.changed.notify_all()
            is_over = self.changed.wait_for(lambda: self.failure or arrived == self.workers.keys())
            try:
                await asyncio.wait_for(is_over, seconds)
            except TimeoutError:
                missing = ", ".join(map(str, sorted(self.workers.keys() - arrived)))
                self.failure = self.failure or f"workers {missing} are not {step}"
        if self.failure:
            raise AdminError(f"The broadcast did not begin: {self.failure}.")
        return is_last

    async def fail(self, cause: str) -> None:
        async with self.changed:
            self.failure = self.failure or cause
            self.changed.notify_all()


@dataclass(slots=True)
class StockUpdate:
    """The next broadcast. Workers that become ready while a refit runs get one of their own."""

    info: dict[str, Any]
    """Names, dtypes and shapes: vLLM's NCCLWeightTransferUpdateInfo."""
    wire: StockWire
    admin: DynamoAdmin
    """For calls to all workers."""
    repeatable: bool = True
    """While the refit runs: afterwards the trainer changes its weights."""
    may_equal: bool = True
    """NeMo-RL's first refit sends what the engines have loaded from the checkpoint."""
    identity: str = field(default_factory=lambda: secrets.token_hex(16))
    gather_seconds: float = GATHER_SECONDS
    _ready: dict[int, Worker] = field(default_factory=dict)
    """Workers that passed the preflight and have not begun to receive."""
    _round: _Round | None = None

    async def prepare(self) -> None:
        """Do nothing: the policy's tensors are known."""

    async def stage(self, admin: DynamoAdmin, worker: Worker, *, needs_label: bool) -> StageReply:
        raise NoSuchMethod("NeMo-RL's own collective sends the weights in the pause.")

    async def check_foreign(self, worker: Worker, why: NoSuchMethod) -> None:
        """Note that the worker is ready: the next broadcast waits for it. Which tensors fit, the
        engine finds out when it loads them."""
        self._ready[worker.instance_id] = worker

    async def check_unchanged(self) -> None:
        """Do nothing: the weights are in the trainer until they are sent."""

    async def load(self, admin: DynamoAdmin, worker: Worker, label: int) -> None:
        """Receive the broadcast. A worker that waits in it for another never comes back, so nobody
        begins before everybody can."""
        current = self._join_round(worker)
        seconds = self.gather_seconds
        try:
            if await current.gather("paused", worker, seconds):
                await self.wire.form(self.admin, list(current.workers.values()))
            await current.gather("in the group", worker, seconds)
            await admin.call(worker, START_METHOD, {})
            await current.gather("started", worker, seconds)
        except BaseException as error:
            await current.fail(f"{worker}: {error}")
            raise
        if current.sending is None:
            current.sending = self.wire.start_sending()
        await admin.update_distributed(worker, label, UPDATE_METHOD, {"update_info": self.info})
        await asyncio.wrap_future(current.sending)
        await admin.update_distributed(worker, label, FINISH_METHOD, {})

    def close(self) -> None:
        """End the version: a worker that joins from now on gets the next one."""
        self.repeatable = False

    def _join_round(self, worker: Worker) -> _Round:
        """Return the round of a worker: the first that comes takes all that are ready into it."""
        if self._round is None or worker.instance_id not in self._round.workers:
            self._round, self._ready = _Round(self._ready), {}
        return self._round
