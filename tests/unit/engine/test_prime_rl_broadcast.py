"""A worker's place in the group of prime-rl's trainer: joined in time, in step, or left."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine.foreign_senders import PrimeRlBroadcastReader, find_rank
from rollway.errors import WeightsError
from rollway.integrations.prime_rl.broadcast import CollectiveSender
from rollway.weights.offer import STILL, Offer
from rollway.weights.transports.group import Place, form_group
from tests.unit.weights.broadcast_peer import WEIGHTS, headers, join_offer, stage_offer
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")


@pytest.fixture
def sender() -> Iterator[CollectiveSender]:
    with CollectiveSender("127.0.0.1", 0, 2, 20) as opened:
        yield opened


class Peer:
    """Another worker, in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.unit.weights.broadcast_peer"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Peer]:
    other = Peer()
    yield other
    other.kill()


def join(reader: PrimeRlBroadcastReader, offer: Offer, rank: int = 0) -> None:
    """Join, and wait for the outcome as the fleet does."""
    reader.join(offer, rank, CPU)

    def has_ended() -> bool:
        try:
            reader.check_joined(offer.identity)
        except RuntimeError as error:
            if STILL in str(error):
                return False
            raise
        return True

    wait_until(has_ended, 30)


def receive(reader: PrimeRlBroadcastReader, offer: Offer) -> dict[str, torch.Tensor]:
    assert reader.headers(offer) == headers()
    return {name: tensor.clone() for name, tensor in reader.tensors(offer)}


def form(sender: CollectiveSender, reader: PrimeRlBroadcastReader, peer: Peer) -> Offer:
    offer = join_offer(sender.port, 3)
    peer.ask(join=offer.as_json(), rank=1)
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(sender.connect)
        join(reader, offer)
        connected.result(20)
    assert peer.answer() == {"joined": True}
    return offer


def start(work: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def test_two_processes_receive_the_same_bytes_again_and_again(
    sender: CollectiveSender, peer: Peer
) -> None:
    reader = PrimeRlBroadcastReader(headers())
    group = form(sender, reader, peer)
    for number in range(3):
        offer = stage_offer(group, number)
        peer.ask(stage=offer.as_json())
        sending = start(lambda: sender.send(0, WEIGHTS.items()))
        received = receive(reader, offer)
        sending.result(20)
        assert all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items())
        assert peer.answer() == {"digest": reader.get_digest(offer)} and reader.get_digest(offer)
        with pytest.raises(WeightsError, match="sent once"):
            receive(reader, offer)
    reader.close()
    with pytest.raises(WeightsError, match="this worker ends"):
        receive(reader, stage_offer(group, 9))


def test_a_broadcast_that_does_not_fit_leaves_the_group_in_step(
    sender: CollectiveSender, peer: Peer
) -> None:
    reader = PrimeRlBroadcastReader(headers())
    group = form(sender, reader, peer)
    for tensors, message in (({**WEIGHTS, "x": torch.ones(2)}, "x is not part"), (WEIGHTS, "")):
        offer = stage_offer(group, len(tensors))
        peer.ask(stage=offer.as_json())
        sending = start(lambda tensors=tensors: sender.send(0, tensors.items()))
        if message:
            with pytest.raises(WeightsError, match=message):
                receive(reader, offer)
            assert message in peer.answer()["error"]
        else:
            assert receive(reader, offer).keys() == WEIGHTS.keys()
            assert peer.answer()["digest"] == reader.get_digest(offer)
        sending.result(20)
    reader.close()


def test_a_peer_that_dies_ends_the_broadcast_for_all(sender: CollectiveSender, peer: Peer) -> None:
    reader = PrimeRlBroadcastReader(headers())
    group = form(sender, reader, peer)
    peer.kill()
    began = time.monotonic()
    sending = start(lambda: sender.send(0, WEIGHTS.items()))
    # What the fleet does when it notices that a worker is gone.
    threading.Timer(0.5, reader.release).start()
    with pytest.raises(WeightsError):
        receive(reader, stage_offer(group, 1))
        pytest.fail("gloo may deliver small messages although a rank is gone")
    with pytest.raises(WeightsError):
        sending.result(20)
    assert time.monotonic() - began < 20
    with pytest.raises(WeightsError, match=r"broke off|stopped"):
        receive(reader, stage_offer(group, 2))
    with pytest.raises(WeightsError):
        reader.check_joined(group.identity)


def test_a_trainer_that_is_gone_is_noticed_at_once_and_another_group_can_form(peer: Peer) -> None:
    reader = PrimeRlBroadcastReader(headers())
    first = CollectiveSender("127.0.0.1", 0, 2, 20)
    group = form(first, reader, peer)
    began = time.monotonic()
    threading.Timer(0.3, first.close).start()
    peer.ask(stage=stage_offer(group, 1).as_json())
    with pytest.raises(WeightsError):
        receive(reader, stage_offer(group, 1))
    assert "error" in peer.answer()
    with pytest.raises(WeightsError, match="the last broadcast broke off"):
        receive(reader, stage_offer(group, 2))
    assert time.monotonic() - began < 10
    with CollectiveSender("127.0.0.1", 0, 2, 20) as second:
        group = form(second, reader, peer)
        offer = stage_offer(group, 2)
        peer.ask(stage=offer.as_json())
        sending = start(lambda: second.send(0, WEIGHTS.items()))
        assert receive(reader, offer).keys() == WEIGHTS.keys()
        assert peer.answer()["digest"] == reader.get_digest(offer)
        sending.result(20)
        reader.close()


def test_without_a_trainer_the_wait_is_bounded_and_can_be_given_up() -> None:
    reader = PrimeRlBroadcastReader(headers())
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="No trainer listens"):
        join(reader, join_offer(9, 2, seconds=0.5))
    assert time.monotonic() - began < 10
    offer = join_offer(9, 2, seconds=600)
    reader.join(offer, 0, CPU)
    reader.leave(offer.identity)
    with pytest.raises(WeightsError, match="not asked to join"):
        reader.check_joined(offer.identity)
    wait_until(lambda: not any(t.name == "rollway-background" for t in threading.enumerate()), 10)


def test_a_discarded_version_ends_a_wait_for_the_trainer(
    sender: CollectiveSender, peer: Peer
) -> None:
    reader = PrimeRlBroadcastReader(headers())
    group = form(sender, reader, peer)
    began = time.monotonic()
    threading.Timer(0.3, reader.release).start()
    with pytest.raises(WeightsError, match="discarded"):
        receive(reader, stage_offer(group, 1))
    assert time.monotonic() - began < 10
    with pytest.raises(WeightsError, match="broke off"):
        receive(reader, stage_offer(group, 2))


def test_an_offer_of_something_else_is_refused() -> None:
    reader = PrimeRlBroadcastReader(headers())
    offer = Offer("prime_rl_broadcast", 0, "0" * 32, 0, {"place": {"host": "a b"}})
    with pytest.raises(WeightsError, match="describes no"):
        reader.join(offer, 0, CPU)
    with pytest.raises(WeightsError, match="describes no"):
        reader.headers(offer)


def test_vllms_own_rendezvous_is_joined() -> None:
    """prime-rl's trainer serves its store by vLLM's class, which waits for all ranks."""
    utils = pytest.importorskip("vllm.distributed.utils")
    store, port = _serve_by_vllm(utils)
    reader = PrimeRlBroadcastReader(headers())
    offer = join_offer(port, 2)
    reader.join(offer, 0, CPU)
    group = store.result(20)
    place = Place(host="127.0.0.1", port=port, receivers=1, init_seconds=20, step_seconds=20)
    trainer = form_group(place, 0, group.store, CPU, lambda: None)
    join(reader, offer)
    trainer.close()
    reader.close()


def _serve_by_vllm(utils: Any) -> tuple[Future[Any], int]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    create = utils.StatelessProcessGroup.create
    return start(lambda: create("127.0.0.1", port, 0, 2, store_timeout=20)), port


@pytest.mark.parametrize(
    ("tp", "pp", "pcp", "dp", "worker_rank", "expected"),
    [
        (1, 1, 1, 0, 0, 0),
        (2, 1, 1, 0, 1, 1),
        (2, 2, 1, 0, 3, 3),
        (2, 1, 1, 3, 1, 7),
        (2, 1, 1, 1, 3, 3),  # an executor that counts ranks over all of DP
        (2, 2, 2, 1, 5, 13),
    ],
)
def test_ranks_follow_from_the_topology(
    tp: int, pp: int, pcp: int, dp: int, worker_rank: int, expected: int
) -> None:
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        prefill_context_parallel_size=pcp,
        data_parallel_index=dp,
    )
    assert find_rank(parallel, worker_rank) == expected


def test_all_ranks_of_a_fleet_are_different() -> None:
    """Two workers with DP 2 x TP 2 x PP 2: ranks 1 to 16, each once."""
    parallel = {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1}
    ranks = [
        1 + first + find_rank(
            SimpleNamespace(tensor_parallel_size=2, data_parallel_index=dp, **parallel), rank
        )
        for first in (0, 8)
        for dp in range(2)
        for rank in range(4)
    ]  # fmt: skip
    assert sorted(ranks) == list(range(1, 17))
