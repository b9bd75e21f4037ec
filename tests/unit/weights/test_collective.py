"""The collective transport between processes: exact, bounded in time, and without traces."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import Offer
from rollway.weights.transports import collective
from rollway.weights.transports.collective import CollectivePublisher, CollectiveReader
from tests.unit.weights.collective_peer import Facts, awkward_tensors, facts
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
BUCKET = 1 << 20


class Peer:
    """A process that receives offers."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.weights.collective_peer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, offer: Offer, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"offer": offer.as_json(), **request}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        reply: dict[str, Any] = json.loads(line)
        return reply

    def receive(self, offer: Offer, **request: Any) -> dict[str, Any]:
        self.ask(offer, **request)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Peers:
    """Kept between tests, since a process takes seconds to import torch."""

    def __init__(self) -> None:
        self._all = [Peer(), Peer()]
        for peer in self._all:
            peer.answer()

    def __getitem__(self, index: int) -> Peer:
        if self._all[index].process.poll() is not None:
            self._all[index].close()
            self._all[index] = Peer()
            self._all[index].answer()
        return self._all[index]

    def __iter__(self) -> Iterator[Peer]:
        return iter([self[0], self[1]])

    def close(self) -> None:
        for peer in self._all:
            peer.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    both = Peers()
    yield both
    both.close()


def wait_for_threads_to_end() -> None:
    """Wait for groups that broke off, which are released later, within a time limit."""
    ours = ("rollway-collective", "rollway-group")
    wait_until(lambda: not any(t.name.startswith(ours) for t in threading.enumerate()), 15)


@pytest.fixture
def publisher() -> Iterator[CollectivePublisher]:
    with CollectivePublisher(bucket_bytes=BUCKET, init_seconds=10, step_seconds=10) as opened:
        yield opened
    assert not dist.is_initialized()
    wait_for_threads_to_end()


def all_facts(tensors: dict[str, torch.Tensor]) -> Facts:
    return dict(map(facts, tensors.items()))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def many(size: int = 300_000, count: int = 24) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((size,), float(number)) for number in range(count)}


def store_of(offer: Offer) -> dist.PrefixStore:
    """Connect to the store, as anybody who knows the offer can."""
    host, port = offer.where["host"], offer.where["port"]
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(offer.where["prefix"], store)


def wait_until_joined(offer: Offer) -> None:
    store = store_of(offer)
    wait_until(lambda: store.add("joined", 0) > 0)


def test_two_receivers_get_exact_bytes_of_one_version_after_the_other(
    peers: Peers, publisher: CollectivePublisher
) -> None:
    opened = []
    for version in (1, 2, 3):
        tensors = awkward_tensors(version)
        publisher.expect(2)
        offer = publisher.publish(version, tensors.items())
        assert (offer.transport, offer.version, offer.repeatable) == ("collective", version, False)
        for peer in peers:
            peer.ask(offer)
        answers = [peer.answer() for peer in peers]
        publisher.wait(version)
        for answer in answers:
            assert answer["error"] == ""
            assert answer["received"] == all_facts(tensors)
            assert list(answer["received"]) == list(tensors)
            assert not answer["default_group"]
        opened.append([open_files(), *(answer["open"] for answer in answers)])
    assert opened[1] == opened[2]


def test_the_default_group_of_a_trainer_is_left_alone(peers: Peers, tmp_path: Path) -> None:
    trainer = Peer(str(tmp_path / "store"))
    try:
        offer = msgspec.convert(trainer.answer(), Offer)
        for peer in peers:
            peer.ask(offer)
        for peer in peers:
            assert peer.answer()["received"] == all_facts(awkward_tensors(1))
        assert trainer.answer() == {"ok": True}
        assert trainer.process.wait(20) == 0
    finally:
        trainer.close()


def test_a_receiver_that_never_joins_stops_all_in_time(peers: Peers) -> None:
    with CollectivePublisher(init_seconds=1.5) as publisher:
        before = open_files()
        publisher.expect(2)
        offer = publisher.publish(4, awkward_tensors(4).items())
        began = time.monotonic()
        answer = peers[0].receive(offer)
        with pytest.raises(WeightsError, match=r"1 of 2 receivers joined within 1\.5 s") as caught:
            publisher.wait(4)
        assert "reaches this address" in caught.value.hint
        assert "1 of 2 receivers" in answer["error"]
        assert time.monotonic() - began < 6
        assert open_files() <= before
        # Nothing is in the way of the next one.
        publisher.expect(1)
        offer = publisher.publish(5, awkward_tensors(5).items())
        assert peers[0].receive(offer)["received"] == all_facts(awkward_tensors(5))
        publisher.wait(5)


def test_a_receiver_that_is_killed_ends_the_transfer_soon(
    peers: Peers, publisher: CollectivePublisher
) -> None:
    publisher.expect(2)
    offer = publisher.publish(1, many().items())
    before = open_files()
    dead, alive = peers
    began = time.monotonic()
    dead.ask(offer, die_at="layer.5")
    answer = alive.receive(offer)
    assert answer["error"] and time.monotonic() - began < 10
    with pytest.raises(WeightsError, match="some receivers have not reported"):
        publisher.wait(1)
    wait_for_threads_to_end()
    assert open_files() <= before
    publisher.expect(2)
    offer = publisher.publish(2, many(100).items())
    for peer in peers:
        peer.ask(offer)
    assert [peer.answer()["received"] for peer in peers] == [all_facts(many(100))] * 2
    publisher.wait(2)


def test_a_receiver_that_refuses_a_tensor_stops_all_at_once(
    peers: Peers, publisher: CollectivePublisher
) -> None:
    publisher.expect(2)
    offer = publisher.publish(1, many().items())
    peers[0].ask(offer, break_at="layer.3")
    peers[1].ask(offer)
    assert "does not fit here" in peers[0].answer()["error"]
    assert peers[1].answer()["error"] != ""
    with pytest.raises(WeightsError, match="the worker stopped receiving") as caught:
        publisher.wait(1)
    assert f"process {peers[0].process.pid} " in str(caught.value)
    assert f"process {peers[1].process.pid} " not in str(caught.value)


def test_a_stranger_that_joins_is_an_error_on_both_sides(peers: Peers) -> None:
    with CollectivePublisher(init_seconds=2, step_seconds=5) as publisher:
        publisher.expect(1)
        offer = publisher.publish(1, many(1000).items())
        store_of(offer).add("joined", 1)
        began = time.monotonic()
        assert "one more" in peers[0].receive(offer)["error"]
        with pytest.raises(WeightsError, match="one more"):
            publisher.wait(1)
        assert time.monotonic() - began < 12


def test_a_list_of_tensors_that_was_not_offered_is_refused(publisher: CollectivePublisher) -> None:
    offer = publisher.publish(1, many(10).items())
    room = store_of(offer)
    raw = room.get("manifest/0")
    room.set("manifest/0", raw.replace(b"layer.1", b"layer.x"))
    with pytest.raises(WeightsError, match="is gone"):
        list(CollectiveReader().tensors(offer))


def test_tensors_that_change_after_they_were_published_are_refused(
    peers: Peers, publisher: CollectivePublisher
) -> None:
    tensors = many()
    offer = publisher.publish(1, tensors.items())
    tensors["layer.7"][5] += 1
    assert "layer.7 of version 1 is not what was published" in peers[0].receive(offer)["error"]
    with pytest.raises(WeightsError, match=r"layer\.7"):
        publisher.wait(1)


@pytest.mark.parametrize("earlier", ["", "receiver 1 broke off"])
def test_the_publishers_own_error_is_told_before_it_leaves_the_group(
    earlier: str, publisher: CollectivePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Failing:
        def broadcast(self, flat: torch.Tensor) -> None:
            if earlier:
                room.set("failed", earlier)
            raise torch.OutOfMemoryError("out of memory")

        def close(self) -> None:
            told.append(room.get("failed").decode() if room.check(["failed"]) else "nothing")

    monkeypatch.setattr(collective, "form_group", lambda *_: Failing())
    offer = publisher.publish(1, many(10).items())
    room = store_of(offer)
    room.add("left", 1)
    room.add("joined", 1)
    with pytest.raises(WeightsError, match=f"{earlier}.*out of memory"):
        publisher.wait(1)
    assert told == [earlier or "out of memory"]


def test_a_publisher_that_closes_stops_its_receivers(peers: Peers) -> None:
    publisher = CollectivePublisher(init_seconds=60)
    publisher.expect(2)
    offer = publisher.publish(1, many(10).items())
    peers[0].ask(offer)
    wait_until_joined(offer)
    began = time.monotonic()
    publisher.close()
    assert "cancelled" in peers[0].answer()["error"]
    with pytest.raises(WeightsError, match="cancelled"):
        publisher.wait(1)
    assert time.monotonic() - began < 10
    with pytest.raises(WeightsError, match="Nobody offers version 1"):
        CollectiveReader().manifest(offer)


def test_the_next_version_waits_for_the_one_being_sent(peers: Peers) -> None:
    with CollectivePublisher(init_seconds=2) as publisher:
        publisher.expect(1)
        first = publisher.publish(1, many(10).items())
        threading.Timer(0.3, peers[0].ask, (first,)).start()
        second = publisher.publish(2, many(20).items())  # returns when the first has arrived
        assert peers[0].answer()["received"] == all_facts(many(10))
        assert peers[0].receive(second)["received"] == all_facts(many(20))
        publisher.wait(2)
        publisher.publish(3, many(10).items())
        with pytest.raises(WeightsError, match="Version 3 did not reach all receivers"):
            publisher.publish(4, many(10).items())  # nobody joined the one before
        fourth = publisher.publish(4, many(10).items())
        assert peers[0].receive(fourth)["received"] == all_facts(many(10))
        publisher.wait(4)


def test_the_number_of_receivers_may_change_with_each_version(peers: Peers) -> None:
    counts = iter((1, 2))
    with CollectivePublisher(init_seconds=10, receivers=lambda: next(counts)) as publisher:
        for version in (1, 2):
            offer = publisher.publish(version, many(10).items())
            for peer in list(peers)[:version]:
                peer.ask(offer)
            for peer in list(peers)[:version]:
                assert peer.answer()["received"] == all_facts(many(10))
            publisher.wait(version)


def test_a_publisher_that_dies_is_noticed(peers: Peers, tmp_path: Path) -> None:
    trainer = Peer(str(tmp_path / "store"))
    offer = msgspec.convert(trainer.answer(), Offer)
    peers[0].ask(offer)
    wait_until_joined(offer)
    trainer.close()
    answer = peers[0].answer()
    assert "went away" in answer["error"]
    assert answer["seconds"] < 10


def test_wrong_use_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="no address"):
        CollectivePublisher(host="0.0.0.0")
    with CollectivePublisher() as publisher:
        with pytest.raises(UsageError, match="no tensors"):
            publisher.publish(1, [])
        with pytest.raises(UsageError, match="at least one receiver"):
            publisher.expect(0)
            publisher.publish(1, many(1).items())
        with pytest.raises(UsageError, match="Cannot listen"):
            CollectivePublisher(host="192.0.2.1").publish(1, many(1).items())
