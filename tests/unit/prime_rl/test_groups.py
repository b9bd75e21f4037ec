"""The group of prime-rl's trainer and the fleet: who joins as which rank, and what is refused.

The workers are stand-ins that answer as a test says; tests/unit/engine has the real receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rollway.errors import AdminError, RefitError, Unreachable, UsageError
from rollway.fleet.admin import RefitRefused, StageReply
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.broadcast import BroadcastSender
from rollway.integrations.prime_rl.directories import BroadcastRules
from rollway.integrations.prime_rl.groups import (
    JOIN_METHOD,
    JOINED_METHOD,
    LEAVE_METHOD,
    Broadcaster,
    BroadcastType,
    GroupUpdate,
    InitRequest,
    read_arguments,
    read_request,
)
from rollway.integrations.prime_rl.memory import LoadedAdapter, Memory
from rollway.integrations.prime_rl.updates import WeightUpdates
from rollway.weights.offer import STILL, Offer, read_offer
from tests.unit.prime_rl.fakes import FakeFleet
from tests.unit.weights.broadcast_peer import WEIGHTS

BODY = {
    "host": "10.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 5, "timeout": 60,
    "quantize_in_weight_transfer": False,
}  # fmt: skip
WORKERS = [Worker(7, "m", "http://a", world_size=2), Worker(9, "m", "http://b"),
           Worker(11, "m", "http://c", world_size=2)]  # fmt: skip


class FakeAdmin:
    """Workers that join, or fail, and that stage with a digest."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, Mapping[str, Any]]] = []
        self.errors: dict[tuple[int, str], str] = {}
        self.digests: dict[int, str] = {}
        self.staged: dict[int, asyncio.Event] = {}
        self.discarded: list[int] = []
        self.silent = 0

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        if worker.instance_id == self.silent:
            raise AdminError("No answer.") from Unreachable("it hangs")
        self.calls.append((worker.instance_id, method, arguments))
        if error := self.errors.get((worker.instance_id, method)):
            raise AdminError(error)

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        if event := self.staged.get(worker.instance_id):
            await event.wait()
            raise AdminError("The version was discarded.")
        if error := self.errors.get((worker.instance_id, "stage")):
            raise AdminError(error)
        digest = self.digests.get(worker.instance_id, "d")
        return StageReply(0, [{"state": "ready", "digest": digest}] * worker.world_size)

    async def discard(self, worker: Worker, identity: str) -> None:
        self.discarded.append(worker.instance_id)
        self.staged[worker.instance_id].set()

    def list_methods(self, method: str) -> list[int]:
        return [instance for instance, called, _ in self.calls if called == method]


class GroupFleet(FakeFleet):
    def __init__(self, workers: list[Worker] = WORKERS) -> None:
        super().__init__()
        self.admin = FakeAdmin()
        self.listed = list(workers)

    async def workers(self, *, fresh: bool = True) -> list[Worker]:
        return self.listed


def make(
    fleet: GroupFleet, file: Path | None = None, kind: BroadcastType = "auto"
) -> WeightUpdates:
    memory = Memory(file, "r")
    broadcaster = Broadcaster(cast(Fleet, fleet), memory, "secret" * 8, lambda: 100, kind)
    return WeightUpdates(cast(Fleet, fleet), BroadcastRules(), memory, broadcaster=broadcaster)


async def init(updates: WeightUpdates, **more: Any) -> None:
    await updates.init_broadcaster(lambda: read_request({**BODY, **more}))


async def test_ranks_follow_those_of_the_workers_before() -> None:
    fleet = GroupFleet()
    await init(make(fleet))
    seats = {}
    for instance, method, arguments in fleet.admin.calls:
        if method == JOIN_METHOD:
            offer = read_offer(arguments["offer"], "secret" * 8)
            seats[instance] = offer.where["first_rank"]
            assert offer.where["place"]["receivers"] == 5
            assert offer.where["place"]["step_seconds"] == 60
    assert seats == {7: 0, 9: 2, 11: 3}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"inference_world_size": 1}, "inference_world_size is 1, and the fleet has 3 workers"),
        ({"quantize_in_weight_transfer": True}, "quantised twice"),
        ({"session_id": "x"}, "nixl"),
    ],
)
async def test_a_refusal_is_a_4xx_and_the_answer_of_the_next_pause(more: Any, message: str) -> None:
    fleet = GroupFleet()
    updates = make(fleet, kind="nccl")
    with pytest.raises((Refused, UsageError), match=message) as caught:
        await init(updates, **more)
    assert getattr(caught.value, "status", 400) in (400, 409)
    assert not fleet.admin.list_methods(JOIN_METHOD)
    with pytest.raises(Refused, match=message):
        updates.pause()
    updates.pause()


@pytest.mark.parametrize("more", [{"port": 0}, {"host": "a b"}, {"timeout": -1}])
async def test_what_is_no_request_blocks_no_pause(more: Any) -> None:
    updates = make(GroupFleet(), kind="nccl")
    with pytest.raises(UsageError, match="no request to form a group"):
        await init(updates, **more)
    updates.pause()


async def test_adapters_and_groups_exclude_each_other() -> None:
    updates = make(GroupFleet())
    updates.memory.record.adapters["r"] = LoadedAdapter(1, "/x")
    with pytest.raises(Refused, match="adapters are loaded"):
        await init(updates)
    updates.memory.record.adapters.clear()
    await updates.refuse_adapters()
    await init(updates)
    with pytest.raises(Refused, match="whole models"):
        await updates.refuse_adapters()


async def test_one_worker_that_fails_ends_the_wait_of_the_others() -> None:
    fleet = GroupFleet()
    fleet.admin.errors[9, JOINED_METHOD] = "it cannot reach the trainer"
    for other in (7, 11):
        fleet.admin.errors[other, JOINED_METHOD] = f"{STILL} the group"
    updates = make(fleet)
    with pytest.raises(UsageError, match="cannot reach the trainer"):
        await init(updates)
    assert sorted(fleet.admin.list_methods(LEAVE_METHOD)) == [7, 9, 11]
    assert updates.memory.record.group is None
    with pytest.raises(Refused, match="cannot reach the trainer"):
        updates.pause()


async def test_equal_requests_form_one_group_and_a_dead_trainer_another() -> None:
    fleet = GroupFleet()
    updates = make(fleet)
    # One request for each worker, as discovery of single workers sends them.
    await asyncio.gather(*(init(updates, rank_offset=offset) for offset in (0, 2, 3)))
    await init(updates)
    assert len(fleet.admin.list_methods(JOIN_METHOD)) == 3
    fleet.admin.errors[9, JOINED_METHOD] = "The trainer is gone."
    with pytest.raises(UsageError, match="gone"):
        await init(updates)
    assert len(fleet.admin.list_methods(JOIN_METHOD)) == 6


async def test_an_update_comes_over_the_group_and_a_restart_asks_for_the_same(
    tmp_path: Path,
) -> None:
    fleet, file = GroupFleet(), tmp_path / "state"
    updates = make(fleet, file)
    await init(updates)
    updates.pause()
    assert await updates.update("out/broadcasts/step_3") == 1
    (_, first, options) = fleet.refits[0]
    assert isinstance(first, GroupUpdate) and first.seats == {7, 9, 11}
    assert options["mode"] == "in-flight" and updates.memory.record.step == 3

    # The server is restarted before its answer arrived, and is asked again.
    restarted = make(fleet, file)
    assert await restarted.update("out/broadcasts/step_3") == 1
    assert len(fleet.refits) == 1

    # It is killed in the next update: workers are told to receive the same broadcast, not another.
    await restarted.resume()
    restarted.pause()
    fleet.fail = asyncio.CancelledError()  # type: ignore[assignment]
    with pytest.raises(asyncio.CancelledError):
        await restarted.update("out/broadcasts/step_4")
    fleet.fail = None
    again = make(fleet, file)
    assert again.memory.record.phase == "failed"
    assert await again.update("out/broadcasts/step_4") == 2
    identities = [refit[1].identity for refit in fleet.refits]  # type: ignore[attr-defined]
    assert identities[1] == identities[2] != identities[0]

    # The same directory after another pause is another broadcast.
    await again.resume()
    again.pause()
    assert await again.update("out/broadcasts/step_4") == 3


async def test_a_failure_is_final_since_a_broadcast_is_sent_once() -> None:
    fleet = GroupFleet()
    updates = make(fleet)
    await init(updates)
    updates.pause()
    fleet.fail = RefitError("worker 9 failed", report=None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="worker 9 failed") as caught:
        await updates.update("step_1")
    assert caught.value.status == 409
    with pytest.raises(Refused, match="stays paused"):
        await updates.resume()


async def test_a_worker_that_left_is_named_before_anything_is_touched() -> None:
    fleet = GroupFleet()
    updates = make(fleet)
    await init(updates)
    updates.pause()
    fleet.listed = WORKERS[1:]
    with pytest.raises(Refused, match=r"1 of 3 workers have left.*example 7"):
        await updates.update("step_1")
    assert not fleet.refits
    await updates.resume()


async def test_types_of_the_server() -> None:
    updates = make(GroupFleet(), kind="filesystem")
    with pytest.raises(Refused, match="--weight-broadcast filesystem"):
        await init(updates)
    updates = make(GroupFleet(), kind="nccl")
    updates.pause()
    with pytest.raises(Refused, match="No group has formed"):
        await updates.update("step_1")


async def test_files_are_read_again_once_the_trainer_of_the_group_is_gone(tmp_path: Path) -> None:
    fleet, file = GroupFleet(), tmp_path / "state"
    updates = make(fleet, file)
    await init(updates)
    updates.pause()
    await updates.update("step_1")
    say_gone(fleet, *WORKERS)
    assert await updates.update("step_1") == 1, "what the group sent last stays its own"
    await updates.resume()

    # The next run broadcasts files, which prime-rl does not announce; the server was restarted.
    updates = make(fleet, file)
    updates.rules = BroadcastRules([tmp_path], tmp_path, marker_seconds=0.0)
    directory = BroadcastSender(tmp_path).send(0, WEIGHTS.items())
    (tmp_path / "broadcasts" / "step_9").mkdir()
    (tmp_path / "broadcasts" / "step_9" / "STABLE").touch()
    updates.pause()
    with pytest.raises(Refused, match=r"lacks weight files.*needs /init_broadcaster") as caught:
        await updates.update("broadcasts/step_9")
    assert caught.value.status == 400 and len(fleet.refits) == 1
    assert await updates.update("broadcasts/step_0") == 2
    assert fleet.refits[1][1] == directory
    await updates.refuse_adapters()


async def test_a_group_is_kept_while_one_worker_may_be_in_it() -> None:
    fleet = GroupFleet()
    updates = make(fleet)
    await init(updates)
    updates.pause()
    say_gone(fleet, *WORKERS[1:])
    await updates.update("step_1")
    assert isinstance(fleet.refits[0][1], GroupUpdate)
    await updates.resume()
    updates.pause()
    fleet.admin.silent = WORKERS[0].instance_id
    await updates.update("step_2")
    assert isinstance(fleet.refits[1][1], GroupUpdate)


async def test_a_type_that_was_named_decides_also_without_a_trainer() -> None:
    fleet = GroupFleet()
    updates = make(fleet, kind="nccl")
    await init(updates)
    say_gone(fleet, *WORKERS)
    updates.pause()
    await updates.update("step_1")
    assert isinstance(fleet.refits[0][1], GroupUpdate)


def say_gone(fleet: GroupFleet, *workers: Worker) -> None:
    for worker in workers:
        fleet.admin.errors[worker.instance_id, JOINED_METHOD] = "The trainer is gone."


async def test_nixl_is_served_where_the_trainer_publishes_by_rollway(tmp_path: Path) -> None:
    fleet = GroupFleet()
    updates = make(fleet)
    updates.rules = BroadcastRules([tmp_path], tmp_path, marker_seconds=0.0)
    await init(updates, session_id="s1")
    assert not fleet.admin.calls and updates.memory.record.session == "s1"
    offer = Offer("nixl", 7, "0" * 32, 100, {"catalog": "x"})
    sender = BroadcastSender(tmp_path)
    sender.send_offer(1, offer)
    sender.send_offer(2, msgspec.structs.replace(offer, transport="shm"))
    sender.send(3, WEIGHTS.items())
    updates.pause()
    assert await updates.update("broadcasts/step_1") == 1
    assert fleet.refits[0][1] == offer
    with pytest.raises(UsageError, match="by shm, not by nixl"):
        await updates.update("broadcasts/step_2")
    with pytest.raises(Refused, match="ModelExpress") as caught:
        await updates.update("broadcasts/step_3")
    assert caught.value.status == 409 and len(fleet.refits) == 1


def test_arguments_of_the_engine_method_by_generation() -> None:
    plain = ["h", 1, 0, 1, 60, "default"]
    assert read_arguments(plain) == InitRequest("h", 1, 1, 60.0)
    assert read_arguments(["h", 1, 0, 1, 60, False, "default"]) == InitRequest("h", 1, 1, 60.0)
    assert read_arguments(["h", 1, 0, 1, 60, True, "default"]).quantize_in_weight_transfer
    with pytest.raises(UsageError, match="no request"):
        read_arguments(["h"])


async def make_update(fleet: GroupFleet) -> GroupUpdate:
    updates = make(fleet)
    await init(updates)
    assert updates.broadcaster is not None
    return await updates.broadcaster.make_update("step_1")


async def stage(update: GroupUpdate, fleet: GroupFleet, worker: Worker) -> StageReply:
    return await update.stage(cast(Any, fleet.admin), worker, needs_label=True)


async def test_ranks_must_have_received_the_same_bytes() -> None:
    fleet = GroupFleet()
    update = await make_update(fleet)
    with pytest.raises(RefitRefused):
        await update.check_unchanged()
    for worker in WORKERS:
        await stage(update, fleet, worker)
    await update.check_unchanged()
    fleet.admin.digests[9] = "other"
    await stage(update, fleet, WORKERS[1])
    with pytest.raises(RefitRefused, match="different bytes"):
        await update.check_unchanged()
    fleet.admin.digests[9] = ""
    await stage(update, fleet, WORKERS[1])
    with pytest.raises(RefitRefused, match="no memory"):
        await update.check_unchanged()


async def test_a_worker_that_joined_after_the_group_is_left_alone() -> None:
    fleet = GroupFleet()
    update = await make_update(fleet)
    assert (await stage(update, fleet, Worker(99, "m", "http://d"))).ranks == []


async def test_a_worker_that_fails_stops_the_others_with_its_cause() -> None:
    fleet = GroupFleet()
    update = await make_update(fleet)
    update.settle_seconds = 0.01
    fleet.admin.staged = {7: asyncio.Event(), 11: asyncio.Event()}
    fleet.admin.errors[9, "stage"] = "its memory is full"
    answers = await asyncio.gather(
        *(stage(update, fleet, worker) for worker in WORKERS), return_exceptions=True
    )
    assert all("its memory is full" in str(answer) for answer in answers), answers
    assert sorted(fleet.admin.discarded) == [7, 11]
