"""From the shards of a trainer's ranks to every parameter of every engine rank, byte by byte.

Real vLLM models without an engine stage what the ranks published, and swap. The truth is what
vLLM's own loader makes of the checkpoint.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rollway.engine import loading
from rollway.engine.incoming import Incoming
from rollway.engine.staging import Staging
from rollway.errors import WeightsError
from rollway.signed_calls import SECRET
from rollway.weights.megatron.geometry import Topology
from rollway.weights.offer import Offer
from rollway.weights.sources import HeldTensor, from_module
from rollway.weights.transports.base import Reader
from rollway.weights.transports.nixl import NixlPublisher, NixlReader
from rollway.weights.transports.nixl.catalog import CatalogServer
from rollway.weights.transports.shm import ShmPublisher, ShmReader, join_offers
from tests.unit.engine.staging import parameters_of, stage
from tests.unit.engine.vllm_models import Tensors, create_model, create_worker, use_ranks
from tests.unit.weights.fake_ranks import use_fake_rank
from tests.unit.weights.megatron_shards import held_by_ranks
from tests.unit.weights.nixl_pieces import nixl
from tests.unit.weights.nixl_source import WORD

DATA = Path(__file__).parents[2] / "data" / "megatron"
"""Golden checkpoints, whose Megatron shards are known to the byte (`test_megatron_golden.py`)."""
MESHES = {"dtensor-2x1": (2, 1), "dtensor-2x2": (2, 2)}
MEGATRON = {
    "megatron-tp2": Topology(tp=2),
    "megatron-pp2": Topology(pp=2),
    "megatron-ep2": Topology(ep=2),
}
SOURCES = [(k, s) for k in ("dense", "moe") for s in (*MESHES, *MEGATRON)]
SOURCES.remove(("dense", "megatron-ep2"))  # it has no experts
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_COLUMNS = ("o_proj", "down_proj")

Ranks = list[list[HeldTensor]]


def _shard(model: nn.Module, sizes: tuple[int, int]) -> None:
    """Apply tensor parallelism, and FSDP2 over it, as NeMo-RL's DTensor workers do."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    for name, module in model.named_modules() if sizes[1] > 1 else ():
        kind = name.rpartition(".")[2]
        if kind in (*_ROWS, *_COLUMNS):
            axis = 0 if kind in _ROWS else 1
            own = distribute_tensor(module.weight, mesh["tp"], [Shard(axis)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(own))
    for layer in model.get_submodule("model.layers"):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


@pytest.fixture(scope="module")
def dtensors() -> dict[tuple[str, str], Ranks]:
    """What the ranks of FSDP2 trainers hold."""
    shards: dict[tuple[str, str], Ranks] = {}
    for kind in ("dense", "moe"):
        for name, sizes in MESHES.items():
            world = sizes[0] * sizes[1]
            for rank in range(world):
                with use_fake_rank(rank, world):
                    model = AutoModelForCausalLM.from_pretrained(DATA / f"hf_{kind}")
                    _shard(model, sizes)
                    held = shards.setdefault((kind, name), [])
                    held.append(from_module(model))
    return shards


@pytest.fixture(scope="module", autouse=True)
def before_vllm(dtensors: dict[tuple[str, str], Ranks]) -> None:
    """Shard before vLLM has a process group: there is one default group in a process."""


class Reduction:
    """Sums over the ranks of an engine, which are threads here."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks, timeout=60)
        self._parts: list[torch.Tensor] = []

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        self._parts.append(part)
        self._barrier.wait()
        return torch.stack(self._parts).sum(dim=0)


def _publish(
    transport: str,
    ranks: Ranks,
    tp: int,
    directory: Path,
    cleanup: ExitStack,
    *,
    same_rank: bool = False,
) -> Offer:
    if transport == "shm":
        offers = []
        for held in ranks:
            shm = cleanup.enter_context(ShmPublisher(directory=directory))
            offers.append(shm.publish(3, held))
        return join_offers(offers)
    catalog, world = cleanup.enter_context(CatalogServer()), len(ranks)
    options: dict[str, Any] = {"catalog": catalog.url, "world": world, "engine_ranks": tp}
    options["same_rank"] = same_rank
    publishers = [
        cleanup.enter_context(NixlPublisher(rank=rank, **options)) for rank in range(world)
    ]
    for publisher, held in zip(publishers, ranks, strict=True):
        publisher.announce(3, held)
    return publishers[0].offer(3)


def _open_reader(transport: str, directory: Path, cleanup: ExitStack) -> Reader:
    reader: Reader = ShmReader(directory) if transport == "shm" else NixlReader()
    cleanup.callback(reader.close)
    return reader


def _load_by_vllm(model: Path, truth: Tensors) -> Tensors:
    loaded, _ = create_model(model)
    loaded.load_weights(iter(truth.items()))
    return parameters_of(loaded)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=nixl)])
@pytest.mark.parametrize(("kind", "source"), SOURCES, ids=lambda value: value)
def test_every_parameter_of_every_rank_is_the_checkpoints(
    kind: str,
    source: str,
    transport: str,
    tp: int,
    dtensors: dict[tuple[str, str], Ranks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, WORD)
    # vLLM packs experts for CPU after loading. On a GPU it leaves them as they are loaded, which
    # are the bytes to compare.
    monkeypatch.setattr(loading, "list_changed_layers", lambda _: {})
    model = DATA / f"hf_{kind}"
    truth = load_file(model / "model.safetensors")
    ranks = dtensors[kind, source] if source in MESHES else []
    ranks = ranks or held_by_ranks(model, truth, MEGATRON[source])
    assert len(ranks) > 1
    with ExitStack() as cleanup:
        offer = _publish(transport, ranks, tp, tmp_path, cleanup)
        assert offer.nbytes == sum(tensor.nbytes for tensor in truth.values())  # each byte once
        reduction = Reduction(tp) if tp > 1 else torch.clone
        stagings, expected, models = [], [], []
        for rank in range(tp):
            with use_ranks(tp, rank):
                expected.append(_load_by_vllm(model, truth))
                worker = create_worker(model)
                models.append(worker.model_runner.get_model())
                reader = _open_reader(transport, tmp_path, cleanup)
                headers = reader.headers(offer)
                incoming = Incoming(worker, reader, offer, headers, reduction)
                stagings.append(Staging(incoming, headers, []))
                report = stage(stagings[-1])
                assert report["state"] == "ready", report["error"]
        with ThreadPoolExecutor(tp) as pool:
            list(pool.map(Staging.swap, stagings))
        for served, wanted in zip(models, expected, strict=True):
            actual = parameters_of(served)
            assert actual.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(actual[name], tensor), name


@nixl
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_like_rank_reads_from_like_rank(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two engine ranks has all it needs from one of two tensor-parallel Megatron ranks,
    replicated tensors too."""
    monkeypatch.setenv(SECRET, WORD)
    monkeypatch.setattr(loading, "list_changed_layers", lambda _: {})
    model = DATA / f"hf_{kind}"
    truth = load_file(model / "model.safetensors")
    ranks = held_by_ranks(model, truth, MEGATRON["megatron-tp2"])
    with ExitStack() as cleanup:
        offer = _publish("nixl", ranks, 2, tmp_path, cleanup, same_rank=True)
        for rank in range(2):
            with use_ranks(2, rank):
                worker = create_worker(model)
                reader = _open_reader("nixl", tmp_path, cleanup)
                assert isinstance(reader, NixlReader)
                reader.rank = rank
                headers = reader.headers(offer)
                incoming = Incoming(worker, reader, offer, headers, torch.clone)
                incoming.restrict()
                parts = {name: tensor.clone() for name, tensor in incoming.tensors()}
            assert [source[:8] for source in reader.moved] == [f"trainer{rank}"]
            for name, part in parts.items():
                box = incoming.slices.boxes.get(name)
                assert torch.equal(part, truth[name] if box is None else truth[name][box.slices])


@nixl
@pytest.mark.parametrize(("source", "tp"), [("megatron-tp2", 1), ("megatron-pp2", 2)])
def test_another_ranks_card_is_not_used_where_like_ranks_read(
    source: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, WORD)
    model = DATA / "hf_dense"
    truth = load_file(model / "model.safetensors")
    ranks = held_by_ranks(model, truth, MEGATRON[source])
    with ExitStack() as cleanup:
        offer = _publish("nixl", ranks, tp, tmp_path, cleanup, same_rank=True)
        reader = _open_reader("nixl", tmp_path, cleanup)
        reader.headers(offer)
        refusal = r"Rank 0 of the engine would read model\.\S+ through .* rank of the trainer \(1\)"
        with pytest.raises(WeightsError, match=refusal) as caught:
            list(reader.tensors(offer))
        assert "same_rank_only" in caught.value.hint
        offer = _publish("nixl", ranks, tp, tmp_path, cleanup)
        assert len(list(reader.tensors(offer))) == len(truth)
