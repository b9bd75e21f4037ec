"""The checkpoint engine in the policy's ranks: what a version has besides the policy's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rollway.integrations.nemo_rl import publish
from rollway.integrations.nemo_rl.publish import Engine, PublishOptions
from rollway.weights.offer import parse_offer
from rollway.weights.transports import group as broadcasts
from rollway.weights.transports.shm import ShmReader

WEIGHTS = {"model.w": torch.randn(4, 4), "draft.fc.weight": torch.randn(2, 4)}
SCALES = {"model.layers.0.self_attn.k_scale": 0.25}


def make_engine(rank: int, directory: Path, method: str = "shm") -> Engine:
    options = PublishOptions(
        method=method,
        stack="s",
        secret="s" * 32,
        model=str(directory),
        admin_urls=("http://127.0.0.1:1",),
    ).as_plain()
    engine = Engine(1 << 20, **{k: v for k, v in options.items() if k != "bucket_bytes"})
    engine.init_policy_process_group(worker_rank=rank, train_world_size=2)
    return engine


def send(engine: Engine) -> None:
    asyncio.run(engine.send_weights(iter(WEIGHTS.items())))


def test_a_version_has_the_draft_model_and_the_scales(tmp_path: Path) -> None:
    first, second = make_engine(0, tmp_path), make_engine(1, tmp_path)
    for engine in (first, second):
        engine.begin(3, 1, SCALES)
        send(engine)
        assert engine.count_drafts() == 1
    assert second.take_offer() is None
    raw = first.take_offer()
    assert raw is not None
    reader = ShmReader()
    try:
        received = {name: t.clone() for name, t in reader.tensors(parse_offer(raw))}
    finally:
        reader.close()
    expected = {**WEIGHTS, f"kv_scale.{next(iter(SCALES))}": torch.tensor([0.25])}
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], expected[name]) for name in expected)
    first.begin(4, 1)  # the next version has no scales
    send(first)
    raw = first.take_offer()
    assert raw is not None and parse_offer(raw).nbytes == sum(t.nbytes for t in WEIGHTS.values())
    assert first.count_drafts() == 1
    first.finalize()


def test_scales_are_where_the_weights_are() -> None:
    ((name, scale),) = publish.make_scale_tensors(SCALES, torch.device("meta"))
    assert name.startswith("kv_scale.") and scale.device.type == "meta"
    assert list(publish.make_scale_tensors({}, None)) == []


class FakeGroup:
    """Stands in for a group of NCCL's, which needs GPUs: it keeps what is broadcast."""

    device = torch.device("cpu")

    def __init__(self, unique_id: bytes, rank: int, world: int) -> None:
        assert rank == 0
        self.formed = unique_id, world
        self.chunks: list[Any] = []

    def broadcast(self, flat: torch.Tensor, seconds: float) -> FakeGroup:
        self.chunks.append(flat.clone())
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.formed = b"", 0


def test_the_first_rank_sends_to_workers_without_the_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[FakeGroup] = []

    class FakeNccl(FakeGroup):
        def __init__(self, unique_id: bytes, rank: int, world: int, **_: Any) -> None:
            super().__init__(unique_id, rank, world)
            groups.append(self)

        @staticmethod
        def make_id() -> bytes:
            return b"i" * broadcasts.ID_BYTES

    monkeypatch.setattr(broadcasts, "Nccl", FakeNccl)
    first, second = (make_engine(rank, tmp_path, "nccl") for rank in (0, 1))
    for engine in (first, second):
        engine.begin(0, 0, is_listing=True)
        send(engine)
    assert first.list_tensors()[1] == ("draft.fc.weight", "float32", [2, 4], 32)
    told = first.make_id()
    assert told is not None and second.make_id() is None
    for engine in (first, second):
        engine.join_group(told["nccl_unique_id_b64"], 5)
        engine.begin(0, 0)
        send(engine)
    (group,) = groups  # of the first rank alone
    assert group.formed == (b"i" * broadcasts.ID_BYTES, 5)
    sent = torch.cat(group.chunks)
    assert torch.equal(sent.view(torch.float32), torch.cat([t.view(-1) for t in WEIGHTS.values()]))
    assert first.take_offer() is None
    for engine in (first, second):
        engine.complete(0)
        engine.cancel()
        engine.finalize()
    assert group.formed == (b"", 0)  # it has left
