"""The choice of a transport, and publishers that keep one contract."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from rollway.engine.incoming import get_reader
from rollway.errors import UsageError
from rollway.signed_calls import SECRET
from rollway.weights.layout import Box, Piece, Shard
from rollway.weights.sources import HeldTensor, from_module
from rollway.weights.transports.base import Publisher
from rollway.weights.transports.choose import (
    AutomaticPublisher,
    Destination,
    choose_transport,
    open_publisher,
)
from tests.checkpoints import write_checkpoint

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
IMPORT_NIXL = "rollway.weights.transports.nixl.agent.import_nixl"
HERE = Destination("s", "secret", "/model")
ELSEWHERE = dataclasses.replace(HERE, addresses=frozenset({"10.0.0.1", "10.0.0.2"}))


def half() -> HeldTensor:
    box = Box((0, 0), (2, 4))
    shard = Shard("w", "F32", (4, 4), box)
    return HeldTensor(shard, torch.ones(2, 4), [Piece("w", (4, 4), box, (0, 0))], True)


@pytest.mark.parametrize(
    ("on_gpu", "is_sharded", "transport"),
    [(False, False, "shm"), (True, False, "cuda_ipc"), (True, True, "shm")],
)
def test_on_one_machine_memory_is_shared(on_gpu: bool, is_sharded: bool, transport: str) -> None:
    choice = choose_transport("auto", HERE, on_gpu=on_gpu, is_sharded=is_sharded)
    assert choice.transport == transport and "machine" in choice.reason


def test_between_machines_a_directory_is_used_or_nixl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_transport("auto", ELSEWHERE, directory=tmp_path).transport == "files"
    monkeypatch.setattr(IMPORT_NIXL, lambda: None)
    assert choose_transport("auto", ELSEWHERE).transport == "nixl"
    sharded = choose_transport("auto", ELSEWHERE, directory=tmp_path, is_sharded=True)
    assert sharded.transport == "nixl"  # a directory of checkpoints holds whole tensors

    def missing() -> None:
        raise UsageError("NIXL is not installed.")

    monkeypatch.setattr(IMPORT_NIXL, missing)
    with pytest.raises(UsageError, match="no transport that reaches them"):
        choose_transport("auto", ELSEWHERE)


def test_a_requested_transport_must_reach_the_engines() -> None:
    assert choose_transport("collective", ELSEWHERE).transport == "collective"
    for transport in ("shm", "cuda_ipc"):
        with pytest.raises(UsageError, match="memory of one machine"):
            open_publisher(transport, ELSEWHERE)  # type: ignore[arg-type]
    for transport in ("files", "delta"):
        with pytest.raises(UsageError, match="needs a directory"):
            open_publisher(transport, HERE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no option kept"):
        open_publisher("shm", HERE, kept=3)
    with pytest.raises(UsageError, match="Transports differ"):
        open_publisher("auto", HERE, keep=3)


def test_automatic_decides_at_the_first_publish(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(4, 3)
    with open_publisher("auto", HERE) as publisher:
        assert isinstance(publisher, AutomaticPublisher) and publisher.choice is None
        with pytest.raises(UsageError, match="no tensors"):
            publisher.publish(1)
        with caplog.at_level(logging.INFO):
            offer = publisher.publish(1, module.named_parameters())
        assert publisher.choice is not None and publisher.choice.transport == offer.transport
        assert publisher.choice.reason in caplog.text
        received = dict(get_reader(offer, {}).tensors(offer))
        assert torch.equal(received["weight"], module.weight)
        publisher.adopt(module.named_parameters())
        assert publisher.publish(2).identity == offer.identity
        publisher.wait(2)
        publisher.cancel()


def test_shards_go_by_a_transport_that_carries_them() -> None:
    with open_publisher("auto", HERE) as publisher:
        assert publisher.publish(1, [half()]).where.keys() == {"ranks"}


@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        "cuda_ipc",
        "files",
        "delta",
        "collective",
        pytest.param(
            "nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")
        ),
    ],
)
def test_every_publisher_keeps_the_contract(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, HERE.secret)
    destination = dataclasses.replace(HERE, model=write_checkpoint(tmp_path / "model"))
    module = torch.nn.Linear(4, 3)
    with open_publisher(
        transport,  # type: ignore[arg-type]
        destination,
        directory=tmp_path / "versions",
        temporary=True,
    ) as publisher:
        assert isinstance(publisher, Publisher) and publisher.transport == transport
        with pytest.raises(UsageError, match="no tensors"):
            publisher.publish(1)
        with pytest.raises(UsageError, match=r"A Linear has no names.*named_parameters"):
            publisher.publish(1, module)  # type: ignore[arg-type]
        offers = {}
        sources = (module.named_parameters(), from_module(module), module.state_dict())
        for version, source in enumerate(sources, 1):
            publisher.expect(1)
            offers[version] = offer = publisher.publish(version, source)
            reader = get_reader(offer, {})
            assert reader.headers(offer).keys() == {"weight", "bias"}
            received = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
            assert torch.equal(received["weight"], module.weight)
            publisher.wait(version)
            reader.release()
            reader.close()
        assert len({offer.identity for offer in offers.values()}) == 1
        if transport in ("shm", "nixl"):
            publisher.adopt(module.named_parameters())
            assert publisher.publish(4).identity == offers[1].identity
        else:
            with pytest.raises(UsageError, match="cannot adopt"):
                publisher.adopt(module.named_parameters())
        if transport not in ("shm", "nixl"):
            with pytest.raises(UsageError, match="only a part of w"):
                publisher.publish(5, [half()])
        publisher.cancel()
    assert not (tmp_path / "versions").exists()


def test_deltas_within_one_machine_are_not_compressed(tmp_path: Path) -> None:
    changed = torch.zeros(10_000, dtype=torch.int16)
    sizes = []
    for number, (destination, temporary) in enumerate(
        ((HERE, True), (HERE, False), (ELSEWHERE, True))
    ):
        options = {"directory": tmp_path / str(number), "temporary": temporary}
        with open_publisher("delta", destination, **options) as publisher:  # type: ignore[arg-type]
            publisher.publish(1, [("a", torch.zeros_like(changed))])
            changed[::30] = 1
            publisher.publish(2, [("a", changed)])
            changed.zero_()
            sizes.append((tmp_path / str(number) / "v2" / "delta").stat().st_size)
    assert sizes[0] > 600 and max(sizes[1:]) < 100
