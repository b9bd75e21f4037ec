"""Weights from verl's iterators to a pool: streamed, exact, and with the cause of a failure.

The pool is a stand-in that reads each offer, as a worker would.
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

from rollway.engine.incoming import get_reader
from rollway.errors import UsageError, WeightsError
from rollway.integrations.verl import weights as verl_weights
from rollway.integrations.verl.spec import WeightOptions, find_tied_names
from rollway.integrations.verl.verl_buckets import WeightStream, iterate
from rollway.integrations.verl.weights import PoolInfo, UpdateReply, WeightSender
from rollway.weights.offer import Offer, parse_offer
from rollway.weights.transports.base import Reader
from rollway.weights.transports.choose import Destination, open_publisher
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher, CudaIpcReader
from rollway.weights.transports.shm import ShmPublisher, ShmReader
from tests.tensors import same
from tests.waiting import stays, wait_until_async

Tensors = dict[str, torch.Tensor]
HERE = "10.0.0.1"


def make_tensors(seed: int, count: int = 5) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16)
    return {
        f"w{n}": torch.randn(3, n + 1, generator=generator).to(dtypes[n % 2]) for n in range(count)
    }


def plain(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


async def asynchronous(tensors: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for pair in tensors.items():
        await asyncio.sleep(0)  # it really suspends, as a gather over a network does
        yield pair


def are_equal(left: Tensors, right: Tensors) -> bool:
    """Return whether the tensors and their order are the same."""
    return list(left) == list(right) and same(left, right)


@dataclass
class Pool:
    """A stand-in for a pool's handle: methods are called as Ray's are, and recorded."""

    model: Path
    address: str = HERE
    receivers: int = 1
    outdated_receivers: int | None = None
    """The number that `info` returns, if it is not the true one."""
    version: int = 0
    served: Tensors = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    fails: bool = False
    refuses: bool = False
    tied: frozenset[str] = frozenset()
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        method = {"info": self._info, "refit": self._refit}[name]
        self.calls.append(name)
        return SimpleNamespace(remote=method)

    def _describe(self, receivers: int) -> PoolInfo:
        destination = Destination("verl-p", "", str(self.model), frozenset({self.address}))
        return PoolInfo(destination, receivers, self.version + 1, self.tied)

    async def _info(self) -> PoolInfo:
        return self._describe(self.outdated_receivers or self.receivers)

    async def _refit(self, offer: dict[str, Any], step: int | None) -> UpdateReply:
        parsed = parse_offer(offer)
        assert parsed.version == self.version + 1
        if self.refuses or parsed.where.get("receivers", self.receivers) != self.receivers:
            return UpdateReply(self._describe(self.receivers), accepted=False)
        self.version += 1
        if self.fails:
            raise WeightsError("A worker refused.")
        self.served = await asyncio.to_thread(self._read, parsed)
        return UpdateReply(self._describe(self.receivers), figures={"seconds": 0.5})

    def _read(self, offer: Offer) -> Tensors:
        reader = get_reader(offer, self.readers)
        return {name: tensor.clone() for name, tensor in reader.tensors(offer)}


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Pool(tmp_path / "model")


def make_sender(weights: str, tmp_path: Path, address: str = HERE) -> WeightSender:
    options = WeightOptions(weights=weights, weights_dir=tmp_path / "published")  # type: ignore[arg-type]
    return WeightSender(options, bucket_bytes=64, address=address)


@pytest.mark.parametrize("iterator", [plain, asynchronous])
@pytest.mark.parametrize("weights", ["auto", "shm", "cuda_ipc", "files", "delta", "collective"])
async def test_every_transport_sends_the_tensors_of_either_iterator(
    tmp_path: Path, pool: Pool, weights: str, iterator: Callable[[Tensors], Any]
) -> None:
    sender = make_sender(weights, tmp_path)
    for step in (1, 2, 3):
        tensors = make_tensors(step)
        assert await sender.send(iterator(tensors), pool, step) == {"seconds": 0.5}
        assert are_equal({name: pool.served[name] for name in tensors}, tensors)
        assert pool.served.keys() == tensors.keys()
    assert pool.calls == ["info", "refit", "refit", "refit"]  # one call for each update


async def test_a_broadcast_for_the_wrong_number_of_receivers_is_published_again(
    tmp_path: Path, pool: Pool
) -> None:
    sender = make_sender("collective", tmp_path)
    pool.outdated_receivers = 3
    for step in (1, 2):
        await asyncio.wait_for(sender.send(plain(make_tensors(step)), pool, step), 20)
        assert are_equal(pool.served, make_tensors(step))
    assert pool.calls == ["info", "refit", "refit", "refit"]  # the new number is remembered


async def test_receivers_that_change_twice_in_one_update_are_an_error(
    tmp_path: Path, pool: Pool
) -> None:
    sender = make_sender("collective", tmp_path)
    pool.refuses = True
    with pytest.raises(WeightsError, match="changed twice"):
        await asyncio.wait_for(sender.send(plain(make_tensors(1)), pool, 1), 20)
    assert pool.calls == ["info", "refit", "refit"]
    pool.refuses = False
    await asyncio.wait_for(sender.send(plain(make_tensors(2)), pool, 2), 20)
    assert are_equal(pool.served, make_tensors(2))


async def test_a_head_that_is_the_embedding_is_sent_once(tmp_path: Path, pool: Pool) -> None:
    """A state dict names it twice, the files of the model once, and engines follow the files."""
    both = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    config = pool.model / "config.json"
    save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, pool.model / "model.safetensors")
    assert find_tied_names(pool.model) == frozenset()
    config.write_text('{"tie_word_embeddings": true}')
    pool.tied = find_tied_names(pool.model)
    await make_sender("shm", tmp_path).send(plain(both), pool, 1)
    assert pool.served.keys() == {"model.embed_tokens.weight"}
    save_file(both, pool.model / "model.safetensors")
    assert find_tied_names(pool.model) == frozenset()


@pytest.mark.parametrize("weights", ["files", "delta"])
async def test_each_run_has_a_temporary_directory(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    publishers = []

    def open_and_record(*arguments: Any, **options: Any) -> Any:
        publishers.append(open_publisher(*arguments, **options))
        return publishers[-1]

    monkeypatch.setattr(verl_weights, "open_publisher", open_and_record)
    await make_sender(weights, tmp_path).send(plain(make_tensors(1)), pool, 1)
    (directory,) = (tmp_path / "published").iterdir()
    assert directory.name == "verl-p" and any(directory.iterdir())
    publishers[0].close()  # the end of the process does the same
    await wait_until_async(lambda: not directory.exists())


async def test_a_restarted_engine_receives_deltas_from_a_snapshot_on(
    tmp_path: Path, pool: Pool
) -> None:
    sender = make_sender("delta", tmp_path)
    for step in (1, 2, 3):
        pool.readers.clear()  # as in a worker that restarted
        await sender.send(plain(make_tensors(step)), pool, step)
        assert are_equal(pool.served, make_tensors(step))


class GatherFailed(Exception):
    pass


@pytest.mark.parametrize("failing_at", [0, 1, 3])
@pytest.mark.parametrize("weights", ["shm", "cuda_ipc", "files", "delta", "collective"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_failing_iterator_ends_both_sides_with_its_cause(
    tmp_path: Path, pool: Pool, weights: str, is_async: bool, failing_at: int
) -> None:
    def fail(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(tensors.items()):
            if number == failing_at:
                raise GatherFailed("a rank died")
            yield pair

    async def fail_async(tensors: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in fail(tensors):
            yield pair

    sender = make_sender(weights, tmp_path)
    await sender.send(plain(make_tensors(1)), pool, 1)
    iterator = fail_async if is_async else fail
    with pytest.raises(GatherFailed, match="a rank died"):
        await asyncio.wait_for(sender.send(iterator(make_tensors(2)), pool, 2), 10)
    await asyncio.wait_for(sender.send(plain(make_tensors(3)), pool, 3), 10)
    assert are_equal(pool.served, make_tensors(3))


@pytest.mark.parametrize("iterator", [plain, asynchronous])
async def test_a_failing_publisher_does_not_keep_the_other_ranks_waiting(
    tmp_path: Path,
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    iterator: Callable[[Tensors], Any],
) -> None:
    gathered: list[str] = []

    async def record() -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for name, tensor in iterate(iterator(make_tensors(1))):
            gathered.append(name)
            yield name, tensor

    def fail(_: ShmPublisher, version: int, tensors: Iterable[tuple[str, Any]]) -> Offer:
        next(iter(tensors))
        raise WeightsError("The disk is full.")

    monkeypatch.setattr(ShmPublisher, "publish", fail)
    with pytest.raises(WeightsError, match="disk is full"):
        await asyncio.wait_for(make_sender("shm", tmp_path).send(record(), pool, 1), 10)
    assert gathered == list(make_tensors(1))


async def test_a_dead_pool_does_not_keep_the_other_ranks_waiting(tmp_path: Path) -> None:
    async def fail() -> PoolInfo:
        raise RuntimeError("The actor died.")

    weights = plain(make_tensors(1))
    dead_pool = SimpleNamespace(info=SimpleNamespace(remote=fail))
    with pytest.raises(RuntimeError, match="actor died"):
        await make_sender("shm", tmp_path).send(weights, dead_pool, 1)
    assert list(weights) == []


async def test_a_failed_refit_ends_a_broadcast(tmp_path: Path, pool: Pool) -> None:
    sender = make_sender("collective", tmp_path)
    pool.fails = True
    with pytest.raises(WeightsError, match="worker refused"):
        await asyncio.wait_for(sender.send(plain(make_tensors(1)), pool, 1), 10)
    pool.fails = False
    await wait_until_async(lambda: not [t for t in threading.enumerate() if "collective" in t.name])
    await asyncio.wait_for(sender.send(plain(make_tensors(2)), pool, 2), 10)
    assert are_equal(pool.served, make_tensors(2))
    assert pool.calls == ["info", "refit", "info", "refit"]


async def test_cancelling_an_update_ends_its_publisher() -> None:
    started, ended = threading.Event(), threading.Event()

    def publish_slowly(pairs: Iterator[tuple[str, Any]]) -> None:
        try:
            for _ in pairs:
                started.set()
                time.sleep(0.02)  # all of them would take minutes
        finally:
            ended.set()

    async def send() -> None:
        tensors = {str(number): torch.zeros(1) for number in range(10_000)}
        async with WeightStream(plain(tensors)) as stream:
            await stream.feed(publish_slowly)

    task = asyncio.ensure_future(send())
    assert await asyncio.to_thread(started.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 60)


async def test_tensors_are_gathered_only_when_the_publisher_requests_them() -> None:
    gathered = 0

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal gathered
        for pair in make_tensors(1, 20).items():
            gathered += 1
            yield pair

    def publish_slowly(pairs: Iterator[tuple[str, Any]]) -> int:
        received = 0

        def is_level() -> bool:
            return gathered == received

        for _ in pairs:
            received += 1
            assert stays(is_level, 0.005)
        return received

    async with WeightStream(gather()) as stream:
        assert await stream.feed(publish_slowly) == 20


def count_in_memory(publish: Callable[[int, Iterable[tuple[str, torch.Tensor]]], Offer]) -> int:
    """Return how many of a generator's tensors exist at a time, at most, while it is published."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def make_new() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            tensor = torch.full((8,), float(number))
            alive.add(tensor)
            gc.collect()
            most = max(most, len(alive))
            yield str(number), tensor
            del tensor

    publish(1, make_new())
    return most


def test_publishers_keep_few_tensors_in_memory(tmp_path: Path) -> None:
    with ShmPublisher(directory=tmp_path) as shm:
        assert count_in_memory(shm.publish) <= 2
    with CudaIpcPublisher(bucket_bytes=1536, directory=tmp_path) as ipc:  # three tensors' worth
        assert count_in_memory(ipc.publish) <= 4


shapes = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@hypothesis_settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(versions=st.lists(shapes, min_size=1, max_size=4), bucket=st.integers(1, 2000))
def test_received_tensors_equal_the_sent_ones_when_sizes_change(
    tmp_path: Path, versions: list[list[int]], bucket: int
) -> None:
    """Versions differ in size from the last one, so slots grow and buckets are replaced."""
    shm_reader, ipc_reader = ShmReader(tmp_path), CudaIpcReader(tmp_path)
    with (
        ShmPublisher(directory=tmp_path, keep=1) as shm,
        CudaIpcPublisher(bucket_bytes=bucket, directory=tmp_path) as ipc,
    ):
        for version, sizes in enumerate(versions, 1):
            sent = {f"w{n}": torch.randn(size) for n, size in enumerate(sizes)}
            offer = shm.publish(version, iter(sent.items()))
            assert are_equal({n: t.clone() for n, t in shm_reader.tensors(offer)}, sent)
            offer = ipc.publish(version, iter(sent.items()))
            assert are_equal({n: t.clone() for n, t in ipc_reader.tensors(offer)}, sent)


async def test_memory_of_one_machine_is_not_offered_to_another(tmp_path: Path, pool: Pool) -> None:
    sender = make_sender("shm", tmp_path, address="10.0.0.2")
    weights = plain(make_tensors(1))
    with pytest.raises(UsageError, match="memory of one machine"):
        await sender.send(weights, pool, 1)
    assert not pool.served
    assert list(weights) == []  # other ranks do not wait for this one


def test_a_repeated_name_is_refused(tmp_path: Path) -> None:
    pairs = [("a", torch.zeros(2)), ("b", torch.zeros(200)), ("a", torch.ones(2))]
    with (
        ShmPublisher(directory=tmp_path) as shm,
        CudaIpcPublisher(bucket_bytes=512, directory=tmp_path) as ipc,
    ):
        for publisher in (shm, ipc):
            with pytest.raises(UsageError, match="a came twice"):
                publisher.publish(1, pairs)
