"""Pull weights over real NIXL between real processes: exact, or refused in bounded time."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine import incoming
from rollway.errors import UsageError, WeightsError
from rollway.signed_calls import SECRET
from rollway.weights.layout import Slices
from rollway.weights.megatron.geometry import Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.offer import Offer
from rollway.weights.sources import HeldTensor, from_module
from rollway.weights.transports.nixl import NixlPublisher, NixlReader
from rollway.weights.transports.nixl import publisher as nixl_publisher
from rollway.weights.transports.nixl import reader as nixl_reader
from rollway.weights.transports.nixl.agent import (
    Agent,
    TimedOut,
    check_devices,
    choose_devices,
    import_nixl,
)
from rollway.weights.transports.nixl.catalog import CatalogServer
from tests.children import are_all_threads_stopped
from tests.tensors import receive, same
from tests.unit.weights.megatron_models import Experts, describe_as
from tests.unit.weights.megatron_plans import DENSE, MOE, model_of
from tests.unit.weights.nixl_pieces import hold_rows, hold_shards, nixl
from tests.unit.weights.nixl_source import CONTEXT, WORD, Trainer, tensors_of
from tests.waiting import stays, wait_until


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, WORD)


@pytest.fixture
def reader() -> Iterator[NixlReader]:
    with closing(NixlReader()) as reader:
        yield reader


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reader, "WINDOW_BYTES", 5000)


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(UsageError, match=r"pip install rollway\[nixl\]"):
        import_nixl()
    with pytest.raises(UsageError, match=r"pip install rollway\[nixl\]"):
        NixlPublisher()


@nixl
def test_versions_between_two_processes(reader: NixlReader) -> None:
    """Both ends are idle afterwards."""
    with Trainer() as trainer:
        for version in range(4):
            offer = trainer.publish(version)
            assert reader.headers(offer)["0.weight"].shape == (64, 96)
            assert same(receive(reader, offer), tensors_of(version))
            assert reader.moved.total() == offer.nbytes
        before = time.process_time()
        # A thread that polls all the time would take a core, or half of one that others use.
        assert trainer.ask("idle", 1.0) < 0.25
        assert time.process_time() - before < 0.25


@nixl
@pytest.mark.parametrize("nbytes", [1, 5000])
def test_small_windows_give_the_same_tensors(
    reader: NixlReader, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "WINDOW_BYTES", nbytes)
    with Trainer() as trainer:
        assert same(receive(reader, trainer.publish(0)), tensors_of(0))


@nixl
def test_a_tensor_is_not_overwritten_while_it_is_in_use(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "WINDOW_BYTES", 1)
    with Trainer() as trainer:
        wanted = tensors_of(0)
        for name, tensor in reader.tensors(trainer.publish(0)):
            assert stays(lambda: torch.equal(tensor, wanted[name]), 0.01)  # noqa: B023


@nixl
def test_pools_grow_with_the_model(reader: NixlReader) -> None:
    with Trainer() as trainer:
        for version, rows in enumerate((8, 64, 16, 256)):
            offer = trainer.publish(version, 6, rows)
            assert same(receive(reader, offer), tensors_of(version, 6, rows))


@nixl
def test_a_version_that_is_not_kept_is_refused(reader: NixlReader) -> None:
    with Trainer(keep=2) as trainer:
        offers = [trainer.publish(version) for version in range(3)]
        with pytest.raises(WeightsError, match=r"Version 0 is not kept any more \(kept: 1, 2\)"):
            receive(reader, offers[0])
        for version in (1, 2):
            assert same(receive(reader, offers[version]), tensors_of(version))


@nixl
def test_a_version_that_is_overwritten_meanwhile_is_refused(
    reader: NixlReader, small_windows: None
) -> None:
    with Trainer(keep=1) as trainer:
        offer = trainer.publish(0)
        tensors = reader.tensors(offer)
        next(tensors)
        trainer.publish(1)
        with pytest.raises(WeightsError, match=r"Version 0 could not be pulled: .*not what was"):
            for _ in tensors:
                pass


@nixl
def test_a_flipped_byte_in_the_source_is_detected(reader: NixlReader) -> None:
    with Trainer() as trainer:
        trainer.ask("adopt", 0)
        offer = trainer.ask("publish adopted", 0)
        assert same(receive(reader, offer), tensors_of(0))
        trainer.ask("flip", "3.weight")
        seen = []
        with pytest.raises(WeightsError, match=r"3.weight is not what was published"):
            for name, _ in reader.tensors(offer):
                seen.append(name)
        assert "2.norm" in seen and "3.weight" not in seen
        offer = trainer.ask("publish adopted", 1)  # as it is now
        assert receive(reader, offer)["3.weight"].shape == (64, 96)


@nixl
def test_a_trainer_that_dies_is_noticed_in_bounded_time(
    reader: NixlReader, small_windows: None
) -> None:
    with Trainer() as trainer:
        offer = trainer.publish(0)
        tensors = reader.tensors(offer)
        next(tensors)
        trainer.kill()
        began = time.monotonic()
        with pytest.raises(WeightsError, match=r"Version 0 could not be pulled: .*has ended"):
            for _ in tensors:
                pass
        assert time.monotonic() - began < 30
        with pytest.raises(WeightsError, match="does not answer"):
            reader.headers(offer)
    with Trainer() as trainer:  # the reader works with the next trainer
        assert same(receive(reader, trainer.publish(0)), tensors_of(0))


@nixl
def test_a_trainer_that_hangs_is_abandoned(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's address is not loopback's usual one, so reads go over the network, where a
    stopped process answers nobody who connects."""
    monkeypatch.setattr(nixl_reader, "READ_SECONDS", 2.0)
    with CatalogServer("127.0.0.2") as catalog, Trainer(catalog=catalog.url) as trainer:
        offer = trainer.publish(0)
        os.kill(trainer.process.pid or 0, signal.SIGSTOP)
        wait_until(lambda: are_all_threads_stopped(trainer.process.pid or 0))
        began = time.monotonic()
        with pytest.raises(WeightsError, match=r"sent nothing within 2 s"):
            receive(reader, offer)
        assert time.monotonic() - began < 30
        os.kill(trainer.process.pid or 0, signal.SIGCONT)
        assert same(receive(reader, offer), tensors_of(0))


@nixl
@pytest.mark.parametrize("fault", ["dies", "times out"])
def test_a_read_ahead_that_fails_unseen_does_not_disturb_the_next_version(
    reader: NixlReader, small_windows: None, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given up this version meanwhile, so nobody asks for the result of the read."""
    started: list[Any] = []
    ended: list[Any] = []
    read = Agent.read

    def count(*args: Any) -> None:
        started.append(args)
        # A stand-in: a stopped process still answers the reads that its kernel serves.
        if len(started) == 3 and fault == "times out":
            raise TimedOut("sent nothing")
        read(*args)
        ended.append(args)

    with Trainer() as trainer, monkeypatch.context() as patch:
        patch.setattr(Agent, "read", count)
        tensors = reader.tensors(trainer.publish(0))
        assert next(tensors)[0] == "0.weight"  # all of the first window
        wait_until(lambda: len(ended) == 2)
        connections = reader._connections
        if fault == "dies":
            trainer.kill()
        assert next(tensors)[0] == "0.norm"  # the third window is being read
        wait_until(lambda: len(started) == 3)
        tensors.close()  # type: ignore[attr-defined]
    with Trainer() as other:
        assert same(receive(reader, other.publish(1)), tensors_of(1))
    # A read that timed out may still write, so its buffers are never used again.
    assert (reader._connections is connections) == (fault == "dies")


@nixl
def test_a_receiver_serves_others_when_the_trainer_dies(
    reader: NixlReader, small_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second is the one that reads from the trainer, and the first does not wait for long.
    monkeypatch.setattr(nixl_reader, "WAIT_SECONDS", 0.5)
    with (
        CatalogServer() as catalog,
        Trainer(catalog=catalog.url, fanout=True) as trainer,
        closing(NixlReader()) as second,
    ):
        offer = trainer.publish(0)
        tensors = second.tensors(offer)
        name, tensor = next(tensors)
        received = {name: tensor.clone()}
        assert same(receive(reader, offer), tensors_of(0))
        trainer.kill()
        for name, tensor in tensors:  # the rest comes from the first receiver
            assert name not in received
            received[name] = tensor.clone()
        assert same(received, tensors_of(0))
        reader.close()
        second.close()
        with pytest.raises(WeightsError):
            receive(second, offer)


@nixl
def test_other_weights_than_were_offered_are_refused(reader: NixlReader) -> None:
    with Trainer() as trainer:
        offer = trainer.publish(0)
        other = Offer("nixl", 0, "0" * 32, offer.nbytes, offer.where)
        with pytest.raises(WeightsError, match="not what was offered"):
            reader.headers(other)


# --- ranks of a trainer, as agents of one process ------------------------------------------------


def publish_and_receive(
    hold: Callable[[dict[str, torch.Tensor]], list[list[HeldTensor]]],
    model: dict[str, torch.Tensor],
    rounds: int = 1,
) -> None:
    """Publish from all ranks, some rounds, and receive with one reader."""
    world = len(hold(model))
    first = NixlPublisher(world=world)
    url = first.catalog_url
    others = [NixlPublisher(catalog=url, rank=rank, world=world) for rank in range(1, world)]
    ranks = [first, *others]
    with closing(NixlReader()) as reader:
        for version in range(rounds):
            values = {name: tensor + version for name, tensor in model.items()}
            for publisher, held in zip(ranks, hold(values), strict=True):
                publisher.announce(version, held)
            assert same(receive(reader, ranks[-1].offer(version)), values)
    for publisher in reversed(ranks):
        publisher.close()


@nixl
@pytest.mark.parametrize(
    ("topology", "experts"),
    [
        (Topology(tp=2), Experts.GROUPED),
        (Topology(tp=2, pp=2, ep=2, world=4), Experts.SEQUENTIAL),
        (Topology(tp=4, etp=4), Experts.LEGACY),
        (Topology(tp=2), None),
    ],
)
def test_megatron_ranks_give_hugging_face_tensors(
    topology: Topology, experts: Experts | None
) -> None:
    """Fused, interleaved, padded, transposed and replicated tensors are read as planned."""
    config = MOE if experts else DENSE
    arrays, headers = model_of(config)
    names, kind = NameMap.from_hf_config(config), experts or Experts.GROUPED
    described = describe_as(headers, names, topology, padded_vocab=32, experts=kind)
    model = {name: torch.from_numpy(array) for name, array in arrays.items()}
    publish_and_receive(lambda values: hold_shards(values, described), model, rounds=3)


@nixl
def test_fsdp_ranks_give_hugging_face_tensors() -> None:
    model = {name: torch.from_numpy(array) for name, array in model_of(MOE)[0].items()}
    publish_and_receive(lambda values: hold_rows(values, 3), model, rounds=2)
    publish_and_receive(lambda values: hold_rows(values, 1), model)


@nixl
def test_ranks_publish_what_they_hold_of_a_module(reader: NixlReader) -> None:
    """One rank publishes each replica; a rank that owns nothing still announces."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    with NixlPublisher(world=3) as first:
        others = [NixlPublisher(catalog=first.catalog_url, rank=r, world=3) for r in (1, 2)]
        for rank, publisher in enumerate([first, *others]):
            publisher.announce(0, [] if rank == 2 else from_module(module, replica=(rank, 2)))
        tensors = receive(reader, first.offer(0))
        assert same(tensors, {name: p.detach() for name, p in module.named_parameters()})
        for publisher in others:
            publisher.close()


@nixl
def test_a_dead_receiver_does_not_disturb_others(reader: NixlReader) -> None:
    with Trainer(keep=1) as trainer:
        near, far = CONTEXT.Pipe()
        other = CONTEXT.Process(target=_receive_one, args=(far, trainer.publish(0)), daemon=True)
        other.start()
        assert near.recv() == "0.weight"
        other.kill()
        other.join()
        assert same(receive(reader, trainer.publish(1)), tensors_of(1))


def _receive_one(pipe: Connection, offer: Offer) -> None:
    os.environ[SECRET] = WORD
    nixl_reader.WINDOW_BYTES = 5000
    tensors = NixlReader().tensors(offer)
    pipe.send(next(tensors)[0])
    pipe.recv()  # until it is killed


@nixl
def test_a_missing_rank_is_reported_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_publisher, "RANKS_SECONDS", 0.2)
    with (
        NixlPublisher(world=2) as publisher,
        pytest.raises(WeightsError, match=r"1 of 2 ranks .* waited for 0.2 s"),
    ):
        publisher.publish(0, tensors_of(0).items())


@nixl
def test_a_rank_closes_after_the_catalog_has_ended() -> None:
    """Ranks close in any order, and rank 0 has the catalog."""
    first = NixlPublisher(world=2)
    second = NixlPublisher(catalog=first.catalog_url, rank=1, world=2)
    second.announce(0, tensors_of(0).items())
    first.close()
    second.close()


def test_replicas_that_differ_are_refused() -> None:
    with (
        NixlPublisher(world=2) as first,
        NixlPublisher(catalog=first.catalog_url, rank=1, world=2) as second,
    ):
        first.announce(0, [("norm", torch.ones(4))])
        second.announce(0, [("norm", torch.tensor([1.0, 1, 1, 2]))])
        with pytest.raises(WeightsError, match="different values of norm"):
            first.offer(0)


@nixl
def test_a_restricted_reader_moves_only_its_tensors(reader: NixlReader) -> None:
    """As with expert parallelism: a receiver reads its own experts and nothing of the others."""
    with Trainer() as trainer:
        offer = trainer.publish(0)
        others = [name for name in reader.headers(offer) if not name.startswith("2.")]
        slices = Slices(dict.fromkeys(others), {}, {name: name for name in others})
        assert reader.restrict(offer, slices) == slices
        tensors = receive(reader, offer)
        assert tensors.keys() == {"2.weight", "2.norm"}
        assert torch.equal(tensors["2.weight"], tensors_of(0)["2.weight"])
        assert reader.moved.total() == 64 * 96 * 2 + 33 * 4
        assert reader.restrict(offer, Slices()) == Slices()
        assert same(receive(reader, offer), tensors_of(0))


@nixl
def test_wrong_use_is_refused() -> None:
    with pytest.raises(UsageError, match="At least one"):
        NixlPublisher(0)
    with pytest.raises(UsageError, match="no rank 2"):
        NixlPublisher(rank=2, world=2)
    with pytest.raises(UsageError, match="needs the catalog of rank 0"):
        NixlPublisher(rank=1, world=2)
    with NixlPublisher() as publisher:
        for none in (None, []):
            with pytest.raises(UsageError, match="no tensors"):
                publisher.publish(0, none)
        publisher.publish(3, [("a", torch.ones(2))])
        with pytest.raises(UsageError, match="cannot follow"):
            publisher.publish(3, [("a", torch.ones(2))])
        with pytest.raises(UsageError, match="not contiguous"):
            publisher.adopt([("a", torch.ones(4, 4).t())])


def test_an_unknown_network_device_is_refused(tmp_path: Path) -> None:
    for device in ("infiniband/mlx5_0", "net/eth0"):
        (tmp_path / device).mkdir(parents=True)
    check_devices(["mlx5_0:1", "eth0"], tmp_path)
    with pytest.raises(UsageError, match=r"no network device mlx5_7:1. It has eth0, mlx5_0"):
        check_devices(["mlx5_0:1", "mlx5_7:1"], tmp_path)


def test_memory_of_a_gpu_leaves_by_the_cards_of_its_numa_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here, and no InfiniBand: what the kernel shows of them is files."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def place(device: str, node: object) -> None:
        (tmp_path / device).mkdir(parents=True, exist_ok=True)
        (tmp_path / device / "numa_node").write_text(f"{node}\n")

    for name, node in (("mlx5_0", 0), ("mlx5_1", 1), ("mlx5_2", 1), ("mlx5_3", "?")):
        place(f"class/infiniband/{name}/device", node)
    gpu = torch.device("cuda", 3)
    assert choose_devices("auto", gpu, tmp_path) == ()  # the machine does not say where it is
    place("bus/pci/devices/0000:9a:00.0", 1)
    assert choose_devices("auto", gpu, tmp_path) == ("mlx5_1:1", "mlx5_2:1")
    assert choose_devices("off", gpu, tmp_path) == ()
    assert choose_devices("mlx5_0", gpu, tmp_path) == ("mlx5_0:1",)
    assert choose_devices("mlx5_0:2", gpu, tmp_path) == ("mlx5_0:2",)
    assert choose_devices("auto", torch.device("cpu"), tmp_path) == ()
    place("bus/pci/devices/0000:9a:00.0", -1)  # a machine without NUMA
    assert choose_devices("auto", gpu, tmp_path) == ()


@nixl
def test_a_publisher_can_be_pinned_to_a_network_device(reader: NixlReader) -> None:
    with Trainer(net_devices=("lo",)) as trainer:
        assert same(receive(reader, trainer.publish(0)), tensors_of(0))


@nixl
def test_a_worker_receives_by_nixl() -> None:
    with Trainer() as trainer:
        offer = trainer.publish(0)
        kept: dict[str, Any] = {}
        receiver = incoming.get_reader(offer, kept)
        assert receiver is incoming.get_reader(offer, kept)
        assert set(receiver.headers(offer)) == set(tensors_of(0))
        assert same({n: t.clone() for n, t in receiver.tensors(offer)}, tensors_of(0))
