"""Refits of workers without Rollway's extension: `cluster.weight_sync.method: nccl`.

    driver (`StockWire`)                    policy's rank 0          every worker (Dynamo's routes)
    once, and whenever the fleet changed:
      what do you export?      ──────────►  walk through the weights
      form a group             ──────────►  join                     init_weights_update_group
    each refit, in the pause:
      all paused?  all started?  ─────────────────────────────────►  start_weight_update
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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import AdminAPI, StageReply
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.fleet.updates import Preflight
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollway-nccl")
        self._tensors: list[tuple[str, str, list[int], int]] = []
        self._members: dict[int, int] = {}
        """The instance ids of the workers in the group, and the first rank of each."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for *_, nbytes in self._tensors)

    async def prepare(self, fleet: Fleet) -> StockUpdate:
        """Form a group with the workers that are there, if it has not formed, and return the update
        that receives the next version.

        Raises:
            UsageError: the policy exports what such workers cannot load.
            AdminError: a worker did not join.
        """
        if not self._tensors:
            self._tensors = await asyncio.to_thread(self._list_tensors)
        workers = await fleet.workers()
        if {worker.instance_id for worker in workers} != self._members.keys():
            await self._form(fleet, workers)
        names, dtypes, shapes, _ = zip(*self._tensors, strict=True)
        info = {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}
        return StockUpdate(info, frozenset(self._members), self._start_sending)

    def forget(self) -> None:
        """Form a new group before the next version: this one may be stuck in a broadcast."""
        self._members = {}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

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

    async def _form(self, fleet: Fleet, workers: list[Worker]) -> None:
        self._members = {}
        if not workers or any(worker.error for worker in workers):
            raise UsageError("Not every worker answers, so no group can form.")
        seats, world = {}, 1
        for worker in workers:
            seats[worker.instance_id] = world
            world += worker.world_size
        group = next(each for each in await self._run("make_id") if each is not None)
        unique_id = group["nccl_unique_id_b64"]
        joining = self._submit("join_group", nccl_unique_id_b64=unique_id, world=world)
        joins = [
            fleet.admin.init_group(
                worker,
                {"init_info": {**group, "rank_offset": first, "world_size": world}},
                method=INIT_METHOD,
            )
            for worker, first in zip(workers, seats.values(), strict=True)
        ]
        await asyncio.gather(*joins)
        await asyncio.wrap_future(joining)
        self._members = seats

    def _start_sending(self) -> Future[list[Any]]:
        def send() -> list[Any]:
            self._call("begin", version=0, receivers=0)
            return self._call("send_weights_via_checkpoint_engine", kv_scales=None)

        return self._thread.submit(send)

    def _submit(self, method: str, **kwargs: Any) -> Future[list[Any]]:
        return self._thread.submit(self._call, method, **kwargs)

    async def _run(self, method: str, **kwargs: Any) -> list[Any]:
        return await asyncio.wrap_future(self._submit(method, **kwargs))


@dataclass(slots=True)
class StockUpdate:
    """The next broadcast, for the workers that are in the group."""

    info: dict[str, Any]
    """Names, dtypes and shapes: vLLM's NCCLWeightTransferUpdateInfo."""
    members: frozenset[int]
    send: Callable[[], Future[list[Any]]]
    """Starts the broadcast."""
    repeatable: bool = False
    identity: str = field(default_factory=lambda: secrets.token_hex(16))
    gather_seconds: float = GATHER_SECONDS
    _arrived: dict[str, set[int]] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _failure: str = ""
    _sending: Future[list[Any]] | None = None

    async def prepare(self) -> None:
        """Do nothing: the policy's tensors are known."""

    async def preflight(
        self, admin: AdminAPI, worker: Worker, *, needs_label: bool = False
    ) -> Preflight:
        if worker.instance_id not in self.members:
            return Preflight(True, StageReply(None, []))  # left alone, like one that starts
        return Preflight(verifies_itself=False)

    def is_staged_in(self, worker: Worker) -> bool:
        return False

    async def check_unchanged(self) -> None:
        """Do nothing: the weights are in the trainer until they are sent."""

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        """Receive the broadcast. A worker that waits in it for another never comes back, so nobody
        begins before everybody can."""
        try:
            await self._gather("paused", worker)
            await admin.call(worker, START_METHOD, {})
            await self._gather("started", worker)
        except BaseException as error:
            async with self._changed:
                self._failure = self._failure or f"{worker}: {error}"
                self._changed.notify_all()
            raise
        if self._sending is None:
            self._sending = self.send()
        await admin.update_distributed(worker, version, UPDATE_METHOD, {"update_info": self.info})
        await asyncio.wrap_future(self._sending)
        await admin.update_distributed(worker, version, FINISH_METHOD, {})

    async def discard(self, admin: AdminAPI, worker: Worker) -> None:
        """Do nothing: nothing is staged."""

    async def _gather(self, step: str, worker: Worker) -> None:
        """Wait until all workers of the group have come to this step."""
        arrived = self._arrived.setdefault(step, set())
        arrived.add(worker.instance_id)
        async with self._changed:
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: arrived >= self.members or self._failure)
            try:
                await asyncio.wait_for(is_over, self.gather_seconds)
            except TimeoutError:
                missing = ", ".join(map(str, sorted(self.members - arrived)))
                self._failure = self._failure or f"workers {missing} are not {step}"
        if self._failure:
            raise AdminError(f"The broadcast did not begin: {self._failure}.")
