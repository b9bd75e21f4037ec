"""How workers stage weights while they generate, and what foreign workers may load instead."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollway.errors import AdminError, RollwayError, Unreachable, UsageError, WeightsError
from rollway.fleet.admin import NoSuchMethod, StageReply
from rollway.fleet.updates import FromDisk, Offered, stage
from rollway.fleet.workers import Worker
from rollway.weights.checkpoint import TensorHeader, publish_checkpoint
from rollway.weights.offer import Offer, read_offer
from rollway.weights.transports.files import FilesPublisher, FilesReader
from tests.checkpoints import write_checkpoint

OFFER = Offer("shm", 3, "a" * 32, 10, {"slot": "x"})
SIGNED = OFFER.sign("secret")
WORKER = Worker(7, "m", "http://w", world_size=2)


class Admin:
    """A worker with two ranks: `states` are what they report, order after order; without any it is
    a foreign one."""

    def __init__(self, *states: Sequence[str]) -> None:
        self.states = list(states)
        self.orders: list[Mapping[str, Any]] = []

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        if not self.states:
            raise NoSuchMethod("It takes no orders.")
        self.orders.append(order)
        assert read_offer(order["offer"], "secret").identity == order["identity"]
        ranks = [{"state": state, "error": "no room"} for state in self.states.pop(0)]
        return StageReply(4, ranks)


async def stage_in(admin: Admin, **options: Any) -> StageReply:
    return await stage(admin, WORKER, SIGNED, **options)  # type: ignore[arg-type]


async def test_a_worker_needs_one_order_and_answers_with_its_label() -> None:
    admin = Admin(["ready", "ready"])
    assert (await stage_in(admin)).label == 4
    assert len(admin.orders) == 1


async def test_an_order_whose_ranks_are_not_done_is_repeated() -> None:
    """Nothing is raised in the engine meanwhile: every exception in an engine method is an error
    with a stack trace in its log."""
    admin = Admin(["running", "ready"], ["ready", "ready"])
    await stage_in(admin)
    assert len(admin.orders) == 2


async def test_a_worker_that_is_still_starting_stages_nothing() -> None:
    admin = Admin([])
    assert (await stage_in(admin, needs_label=True)).ranks == []
    assert admin.orders[0]["needs_label"] is True


async def test_a_rank_that_failed_to_stage_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no room"):
        await stage_in(Admin(["ready", "failed"]))


@pytest.mark.parametrize(("is_lost", "kind"), [(False, UsageError), (True, AdminError)])
async def test_a_refusal_is_a_usage_error_and_a_lost_answer_is_none(
    is_lost: bool, kind: type[Exception]
) -> None:
    class Refusing(Admin):
        async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
            cause = Unreachable("no answer") if is_lost else None
            raise AdminError("w of version 3 changed while it was read.") from cause

    admin: Any = Refusing()
    with pytest.raises(RollwayError, match="changed while it was read") as failure:
        await Offered(OFFER, "secret").stage(admin, WORKER, needs_label=False)
    assert type(failure.value) is kind


async def test_staging_has_a_time_limit() -> None:
    with pytest.raises(UsageError, match="has not got the weights within 0 s"):
        await stage_in(Admin(*[["running", "running"]] * 9), seconds=0.0)


async def test_published_weights_are_only_for_managed_workers() -> None:
    """A foreign one stages nothing, and the error says why it is one."""
    admin: Any = Admin()
    update = Offered(OFFER, "secret")
    with pytest.raises(NoSuchMethod) as why:
        await update.stage(admin, WORKER, needs_label=False)
    with pytest.raises(UsageError, match="cannot stage weights: It takes no orders") as error:
        await update.check_foreign(WORKER, why.value)
    assert "docs/fleet.md" in error.value.hint


@pytest.mark.parametrize("is_managed", [True, False])
async def test_weights_are_hashed_only_for_workers_that_do_not_compare_them(
    tmp_path: Path, is_managed: bool
) -> None:
    model = write_checkpoint(tmp_path / "model")
    offer = FilesPublisher(tmp_path / "versions", model).publish(1, [("a", torch.ones(4))])
    path = Path(str(offer.where["path"]))
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "model.safetensors").write_bytes(raw)
    update = FromDisk(path, secret="secret")
    await update.prepare()
    if is_managed:  # the worker compares each tensor with its sum, and refuses
        admin: Any = Admin(["ready", "ready"])
        await update.stage(admin, WORKER, needs_label=False)
        with pytest.raises(WeightsError, match="a changed after it was published"):
            list(FilesReader().tensors(offer))
    else:
        with pytest.raises(UsageError, match="corrupt"):
            await update.check_foreign(WORKER, NoSuchMethod("It takes no orders."))


async def test_other_tensors_than_the_served_ones_are_refused_for_a_foreign_worker(
    tmp_path: Path,
) -> None:
    """It would load what fits, and report success."""
    served = {"lost": TensorHeader("F32", (2,), "model.safetensors")}
    update = FromDisk(write_checkpoint(tmp_path / "model"), served=served)
    await update.prepare()
    with pytest.raises(UsageError, match="lost"):
        await update.check_foreign(WORKER, NoSuchMethod("It takes no orders."))


async def test_a_checkpoint_without_sums_is_hashed_before_anything_else(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        shutil.copytree(write_checkpoint(tmp_path / "model"), directory, dirs_exist_ok=True)

    path = publish_checkpoint(tmp_path / "v1", write)
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "model.safetensors").write_bytes(raw)
    with pytest.raises(UsageError, match="corrupt"):
        await FromDisk(path, secret="secret").prepare()
