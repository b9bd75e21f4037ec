"""Weights from verl's iterators to a pool: streamed, exact, and with the cause when it fails.

The pool is a stand-in that reads what it is offered, as a worker would.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollway.engine.receivers import Receiver, receiver_for
from rollway.errors import UsageError, WeightsError
from rollway.integrations.verl.options import WeightOptions
from rollway.integrations.verl.settings import tied_names
from rollway.integrations.verl.stream import Stream
from rollway.integrations.verl.updates import About, Publishing
from rollway.weights.offer import Offer, parse_offer
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher, CudaIpcReader
from rollway.weights.transports.shm import ShmPublisher, ShmReader

Tensors = dict[str, torch.Tensor]
HERE = "10.0.0.1"


def tensors(seed: int, count: int = 5) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.bfloat16)
    return {
        f"w{n}": torch.randn(3, n + 1, generator=generator).to(kinds[n % 2]) for n in range(count)
    }


def plain(given: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from given.items()


async def later(given: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for one in given.items():
        await asyncio.sleep(0)
        yield one


def same(left: Tensors, right: Tensors) -> bool:
    return list(left) == list(right) and all(
        one.dtype == right[name].dtype and torch.equal(one, right[name])
        for name, one in left.items()
    )


@dataclass
class Pool:
    """Its methods are called as Ray's are."""

    model: Path
    address: str = HERE
    receivers: int = 1
    version: int = 0
    served: Tensors = field(default_factory=dict)
    kept: dict[str, Receiver] = field(default_factory=dict)
    fails: bool = False
    tied: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self, f"do_{name}"))

    async def do_about(self) -> About:
        there = frozenset({self.address})
        return About("verl-p", "", str(self.model), there, self.receivers, self.tied)

    async def do_next_version(self) -> int:
        return self.version + 1

    async def do_refit(self, offer: dict[str, Any], step: int | None) -> dict[str, float]:
        self.version += 1
        if self.fails:
            raise WeightsError("A worker said no.")
        self.served = await asyncio.to_thread(self._read, parse_offer(offer))
        return {"seconds": 0.5}

    def _read(self, offer: Offer) -> Tensors:
        receiver = receiver_for(offer, self.kept)
        return {name: tensor.clone() for name, tensor in receiver.tensors(offer)}


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Pool(tmp_path / "model")


def publishing(weights: str, tmp_path: Path, address: str = HERE) -> Publishing:
    options = WeightOptions(weights=weights, weights_dir=tmp_path / "published")  # type: ignore[arg-type]
    return Publishing(options, bucket_bytes=64, address=address)


@pytest.mark.parametrize("iterator", [plain, later])
@pytest.mark.parametrize("weights", ["auto", "shm", "cuda_ipc", "files", "delta", "collective"])
async def test_every_transport_brings_what_either_iterator_has(
    tmp_path: Path, pool: Pool, weights: str, iterator: Callable[[Tensors], Any]
) -> None:
    sender = publishing(weights, tmp_path)
    for step in (1, 2, 3):
        given = tensors(step)
        assert await sender.send(iterator(given), pool, step) == {"seconds": 0.5}
        assert same({name: pool.served[name] for name in given}, given)
        assert pool.served.keys() == given.keys()


async def test_a_head_that_is_the_embedding_is_sent_once(tmp_path: Path, pool: Pool) -> None:
    """A state dict names it twice, the files of the model do not, and engines go by the files."""
    both = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    config = pool.model / "config.json"
    save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, pool.model / "model.safetensors")
    assert tied_names(pool.model) == frozenset()
    config.write_text('{"tie_word_embeddings": true}')
    pool.tied = tied_names(pool.model)
    await publishing("shm", tmp_path).send(plain(both), pool, 1)
    assert pool.served.keys() == {"model.embed_tokens.weight"}
    save_file(both, pool.model / "model.safetensors")
    assert tied_names(pool.model) == frozenset()


async def test_a_run_has_a_directory_of_its_own_that_goes_with_it(
    tmp_path: Path, pool: Pool
) -> None:
    sender = publishing("files", tmp_path)
    await sender.send(plain(tensors(1)), pool, 1)
    (there,) = (tmp_path / "published").iterdir()
    assert [path.name for path in there.iterdir()] == ["v1"] and there.name == "verl-p"
    assert sender._guard is not None
    sender._guard.close()  # as when the process ends
    await until(lambda: not there.exists())


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.02)


async def test_an_engine_that_lost_all_takes_changes_from_a_snapshot_on(
    tmp_path: Path, pool: Pool
) -> None:
    sender = publishing("delta", tmp_path)
    for step in (1, 2, 3):
        pool.kept.clear()  # it was started anew
        await sender.send(plain(tensors(step)), pool, step)
        assert same(pool.served, tensors(step))


class GatherFailed(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("weights", ["shm", "cuda_ipc", "files", "delta", "collective"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_failing_iterator_ends_both_sides_with_its_cause(
    tmp_path: Path, pool: Pool, weights: str, asynchronous: bool, at: int
) -> None:
    def breaking(given: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for number, one in enumerate(given.items()):
            if number == at:
                raise GatherFailed("a rank died")
            yield one

    async def breaking_later(given: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for one in breaking(given):
            yield one

    sender = publishing(weights, tmp_path)
    await sender.send(plain(tensors(1)), pool, 1)
    iterator = breaking_later if asynchronous else breaking
    with pytest.raises(GatherFailed, match="a rank died"):
        await asyncio.wait_for(sender.send(iterator(tensors(2)), pool, 2), 10)
    await asyncio.wait_for(sender.send(plain(tensors(3)), pool, 3), 10)  # and goes on
    assert same(pool.served, tensors(3))


@pytest.mark.parametrize("iterator", [plain, later])
async def test_a_failing_publisher_lets_the_other_ranks_end_their_gathers(
    tmp_path: Path, pool: Pool, iterator: Callable[[Tensors], Any]
) -> None:
    gathered: list[str] = []

    async def noted() -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for name, tensor in Stream(iterator(tensors(1)))._each:
            gathered.append(name)
            yield name, tensor

    class Broken:
        def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Offer:
            next(iter(tensors))
            raise WeightsError("The disk is full.")

    sender = publishing("shm", tmp_path)
    sender._publisher = Broken()
    with pytest.raises(WeightsError, match="disk is full"):
        await asyncio.wait_for(sender.send(noted(), pool, 1), 10)
    assert gathered == list(tensors(1))


async def test_a_refit_that_fails_ends_a_broadcast(tmp_path: Path, pool: Pool) -> None:
    sender = publishing("collective", tmp_path)
    pool.fails = True
    with pytest.raises(WeightsError, match="said no"):
        await asyncio.wait_for(sender.send(plain(tensors(1)), pool, 1), 10)
    pool.fails = False
    await until(lambda: not [t for t in threading.enumerate() if "collective" in t.name])
    await asyncio.wait_for(sender.send(plain(tensors(2)), pool, 2), 10)
    assert same(pool.served, tensors(2))


async def test_an_update_that_is_cancelled_ends_its_publisher() -> None:
    ended = threading.Event()

    def slow(coming: Iterator[tuple[str, Any]]) -> None:
        try:
            for _ in coming:
                time.sleep(0.02)
        finally:
            ended.set()

    given = {str(number): torch.zeros(1) for number in range(10_000)}
    task = asyncio.ensure_future(Stream(plain(given)).through(slow))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 5)


async def test_a_slow_publisher_is_not_run_ahead_of() -> None:
    asked = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal asked
        for one in tensors(1, 20).items():
            asked += 1
            yield one

    def slow(coming: Iterator[tuple[str, Any]]) -> list[int]:
        ahead = []
        for taken, _ in enumerate(coming, 1):
            time.sleep(0.005)
            ahead.append(asked - taken)
        return ahead

    stream = Stream(counted())
    assert (await stream.first() or ("",))[0] == "w0"
    assert await stream.through(slow) == [0] * 20


def at_once(publish: Callable[[int, Iterable[tuple[str, torch.Tensor]]], Offer]) -> int:
    """How many of a generator's tensors there are at a time, at most, while it is published."""
    there: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def fresh() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            tensor = torch.full((8,), float(number))
            there.add(tensor)
            gc.collect()
            most = max(most, len(there))
            yield str(number), tensor
            del tensor

    publish(1, fresh())
    return most


def test_publishers_keep_no_more_than_they_must(tmp_path: Path) -> None:
    with ShmPublisher(directory=tmp_path) as shm:
        assert at_once(shm.publish) <= 2
    with CudaIpcPublisher(bucket_bytes=1536, directory=tmp_path) as ipc:  # three tensors' worth
        assert at_once(ipc.publish) <= 4


shapes = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@hypothesis_settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(versions=st.lists(shapes, min_size=1, max_size=4), bucket=st.integers(1, 2000))
def test_what_arrives_is_what_was_sent_whatever_grows(
    tmp_path: Path, versions: list[list[int]], bucket: int
) -> None:
    """Versions of other sizes than the last one: slots grow, and buckets are made anew."""
    ours, theirs = ShmReader(tmp_path), CudaIpcReader(tmp_path)
    with (
        ShmPublisher(directory=tmp_path, keep=1) as shm,
        CudaIpcPublisher(bucket_bytes=bucket, directory=tmp_path) as ipc,
    ):
        for version, sizes in enumerate(versions, 1):
            sent = {f"w{n}": torch.randn(size) for n, size in enumerate(sizes)}
            offer = shm.publish(version, iter(sent.items()))
            assert same({n: t.clone() for n, t in ours.tensors(offer)}, sent)
            offer = ipc.publish(version, iter(sent.items()))
            assert same({n: t.clone() for n, t in theirs.tensors(offer)}, sent)


async def test_memory_of_one_machine_is_not_offered_to_another(tmp_path: Path, pool: Pool) -> None:
    sender = publishing("shm", tmp_path, address="10.0.0.2")
    coming = plain(tensors(1))
    with pytest.raises(UsageError, match="memory of one machine"):
        await sender.send(coming, pool, 1)
    assert not pool.served
    assert list(coming) == []  # other ranks do not wait for this one


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    twice = [("a", torch.zeros(2)), ("b", torch.zeros(200)), ("a", torch.ones(2))]
    with (
        ShmPublisher(directory=tmp_path) as shm,
        CudaIpcPublisher(bucket_bytes=512, directory=tmp_path) as ipc,
    ):
        for publisher in (shm, ipc):
            with pytest.raises(UsageError, match="a came twice"):
                publisher.publish(1, twice)
