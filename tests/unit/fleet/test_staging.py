"""How a refit waits for workers that stage weights while they generate."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollway.errors import AdminError, UsageError, WeightsError
from rollway.fleet import admin as admin_module
from rollway.fleet.admin import NoSuchMethod, NoSuchOrder, StageReply
from rollway.fleet.updates import FromDisk, Offered, stage
from rollway.fleet.workers import Worker
from rollway.weights.checkpoint import publish_checkpoint
from rollway.weights.offer import Offer, read_offer
from rollway.weights.transports.files import FilesPublisher, FilesReader
from tests.checkpoints import write_checkpoint

OFFER = Offer("shm", 3, "a" * 32, 10, {"slot": "x"})
SIGNED = OFFER.sign("secret")
WORKER = Worker(7, "m", "http://w", world_size=2)


class Admin:
    """The staging methods of a worker with two ranks. `answers` are those of `rollway_staged`, and
    `states` those of a worker that takes the order to stage."""

    def __init__(
        self, *answers: str | None, notifications: int = 2, states: Sequence[Sequence[str]] = ()
    ) -> None:
        self.answers = list(answers)
        self.states = list(states)
        self.notifications = notifications
        self.calls: list[str] = []
        self.offer: Offer | None = None

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        self.calls.append(method)
        if method == "rollway_stage":
            self.offer = read_offer(arguments["offer"], "secret")
            for _ in range(self.notifications):
                with socket.socket(socket.AF_UNIX) as client:
                    client.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(client, f"\0{arguments['tell']}")
            return
        answer = self.answers.pop(0)
        if answer is not None:
            raise AdminError(answer)

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        if not self.states:
            raise NoSuchOrder("an older worker")
        self.calls.append("stage")
        assert read_offer(order["offer"], "secret").identity == order["identity"]
        ranks = [{"state": state, "error": "no room"} for state in self.states.pop(0)]
        return StageReply(4, ranks)


async def test_a_worker_that_notifies_is_polled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only a notification ends the wait before an hour.
    monkeypatch.setattr(admin_module, "ASK_SECONDS", 3600.0)
    admin = Admin(None)
    await asyncio.wait_for(stage(admin, WORKER, SIGNED), 30)  # type: ignore[arg-type]
    assert admin.calls == ["rollway_stage", "rollway_staged"]
    assert admin.offer is not None and admin.offer.identity == OFFER.identity


async def test_a_worker_that_takes_orders_needs_one_call_with_its_label() -> None:
    admin = Admin(states=[["ready", "ready"]])
    preflight = await stage(admin, WORKER, SIGNED)  # type: ignore[arg-type]
    assert preflight.verifies_itself and not preflight.is_starting
    assert preflight.reply is not None and preflight.reply.label == 4
    assert admin.calls == ["stage"]


async def test_an_order_whose_ranks_are_not_done_is_repeated() -> None:
    """Nothing is raised in the engine meanwhile: every exception in an engine method is an error
    with a stack trace in its log."""
    admin = Admin(states=[["running", "ready"], ["ready", "ready"]])
    await stage(admin, WORKER, SIGNED)  # type: ignore[arg-type]
    assert admin.calls == ["stage", "stage"]


async def test_a_worker_that_is_still_starting_is_left_alone() -> None:
    preflight = await stage(Admin(states=[[]]), WORKER, SIGNED, needs_label=True)  # type: ignore[arg-type]
    assert preflight.is_starting


async def test_a_rank_that_failed_to_stage_is_a_usage_error() -> None:
    admin = Admin(states=[["ready", "failed"]])
    with pytest.raises(UsageError, match="no room"):
        await stage(admin, WORKER, SIGNED)  # type: ignore[arg-type]


@pytest.mark.parametrize("notifications", [0, 1])
async def test_a_worker_that_cannot_notify_is_polled_repeatedly(notifications: int) -> None:
    admin = Admin("refused: still staging version 3.", None, notifications=notifications)
    await stage(admin, WORKER, SIGNED)  # type: ignore[arg-type]
    assert admin.calls == ["rollway_stage", "rollway_staged", "rollway_staged"]


async def test_a_refusal_is_a_usage_error() -> None:
    admin = Admin("worker 7 refused: w of version 3 changed while it was read.")
    with pytest.raises(UsageError, match="changed while it was read"):
        await Offered(OFFER, "secret").preflight(admin, WORKER)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_order", [True, False])
async def test_staging_has_a_time_limit(by_order: bool) -> None:
    states = [["running", "running"]] * 9 if by_order else []
    admin = Admin(*["still staging"] * 9, states=states)
    with pytest.raises(UsageError, match="has not got the weights within 0 s"):
        await stage(admin, WORKER, SIGNED, seconds=0.0)  # type: ignore[arg-type]


async def test_the_error_names_a_worker_that_cannot_stage() -> None:
    class Foreign(Admin):
        async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
            raise NoSuchMethod("It has none.")

    with pytest.raises(UsageError, match="cannot stage weights: It has none"):
        await Offered(OFFER, "secret").preflight(Foreign(), WORKER)  # type: ignore[arg-type]


async def test_an_offer_is_discarded_by_its_identity() -> None:
    calls = []

    class Recording(Admin):
        async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
            calls.append((method, arguments))

    await Offered(OFFER, "secret").discard(Recording(), WORKER)  # type: ignore[arg-type]
    assert calls == [("rollway_unstage", {"identity": OFFER.identity})]


class FileAdmin:
    """A worker that stages checkpoints, or one that cannot."""

    def __init__(self, *, can_stage: bool) -> None:
        self.can_stage = can_stage

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        if not self.can_stage:
            raise NoSuchMethod("an older worker")
        return StageReply(4, [{"state": "ready", "error": ""}])


@pytest.mark.parametrize("can_stage", [True, False])
async def test_weights_are_hashed_only_for_workers_that_do_not_compare_them(
    tmp_path: Path, can_stage: bool
) -> None:
    model = write_checkpoint(tmp_path / "model")
    offer = FilesPublisher(tmp_path / "versions", model).publish(1, [("a", torch.ones(4))])
    path = Path(str(offer.where["path"]))
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "model.safetensors").write_bytes(raw)
    update = FromDisk(path, secret="secret")
    await update.prepare()
    admin: Any = FileAdmin(can_stage=can_stage)
    if can_stage:  # the worker compares each tensor with its sum, and refuses
        assert (await update.preflight(admin, WORKER)).verifies_itself
        with pytest.raises(WeightsError, match="a changed after it was published"):
            list(FilesReader().tensors(offer))
    else:
        with pytest.raises(UsageError, match="corrupt"):
            await update.preflight(admin, WORKER)


async def test_a_checkpoint_without_sums_is_hashed_before_anything_else(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        shutil.copytree(write_checkpoint(tmp_path / "model"), directory, dirs_exist_ok=True)

    path = publish_checkpoint(tmp_path / "v1", write)
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "model.safetensors").write_bytes(raw)
    with pytest.raises(UsageError, match="corrupt"):
        await FromDisk(path, secret="secret").prepare()
