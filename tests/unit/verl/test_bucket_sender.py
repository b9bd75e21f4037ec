"""The assignment of sockets, when every rank of a trainer sends to the engine beside it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rollway.errors import UsageError, WeightsError
from rollway.fleet.admin import StageReply
from rollway.fleet.workers import Worker
from rollway.integrations.verl.verl_buckets import BucketSender, BucketUpdate, make_bucket_update
from rollway.weights.offer import read_offer


class Admin:
    """Notes which sockets each worker is offered."""

    def __init__(self) -> None:
        self.offers: dict[int, list[str]] = {}

    async def stage(self, worker: Worker, order: dict[str, Any]) -> StageReply:
        offer = read_offer(order["offer"], "secret")
        self.offers[worker.instance_id] = offer.where["sockets"]
        return StageReply(0, [{"state": "ready"}] * worker.world_size)


def make_update(tmp_path: Path, sockets: list[str]) -> BucketUpdate:
    save_file({"a": torch.zeros(4), "b": torch.zeros(2).half()}, tmp_path / "model.safetensors")
    return make_bucket_update(3, sockets, tmp_path, "secret")


async def test_every_rank_of_every_engine_has_a_sender(tmp_path: Path) -> None:
    update, admin = make_update(tmp_path, ["s0", "s1", "s2", "s3"]), Admin()
    workers = [Worker(number, "m", "http://x", world_size=2) for number in (9, 4)]
    for worker in (*workers, workers[0]):
        await update.stage(cast(Any, admin), worker, needs_label=True)
    assert admin.offers == {9: ["s0", "s1"], 4: ["s2", "s3"]}
    assert (update.offer.nbytes, update.repeatable) == (20, False)
    with pytest.raises(UsageError, match="4 ranks of the trainer send weights"):
        more = Worker(5, "m", "http://x", world_size=2)
        await update.stage(cast(Any, admin), more, needs_label=True)


def test_every_update_has_another_identity(tmp_path: Path) -> None:
    assert make_update(tmp_path, ["s"]).identity != make_update(tmp_path, ["s"]).identity


async def test_if_the_engines_refused_their_reason_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refuses:
        async def remote(self, sockets: list[str], step: int | None) -> dict[str, float]:
            raise UsageError("The model is another one.")

    async def fail(self: BucketSender, weights: Any) -> None:
        raise WeightsError("Rank 0's engine did not receive its weights.")

    monkeypatch.setattr(BucketSender, "send", fail)
    pool = SimpleNamespace(receive_buckets=Refuses())
    with pytest.raises(UsageError, match="another one"):
        await BucketSender("j", 0, 2, 1).send_as_first(iter([]), pool, 1)


async def test_the_pool_is_called_before_the_sender_blocks_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[str]] = []

    async def reply() -> dict[str, float]:
        return {"seconds": 1.0}

    class Pool:
        def remote(self, sockets: list[str], step: int | None) -> Any:
            calls.append(sockets)  # Ray sends a call at once, not when its result is awaited
            return reply()

    async def send(self: BucketSender, weights: Any) -> None:
        assert calls  # verl's sender waits here without giving way to other tasks

    monkeypatch.setattr(BucketSender, "send", send)
    pool = SimpleNamespace(receive_buckets=Pool())
    figures = await BucketSender("j", 0, 2, 1).send_as_first(iter([]), pool, 1)
    assert figures == {"seconds": 1.0}
