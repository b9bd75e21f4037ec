"""Packed layers on CPU: a worker that vLLM reloaded serves what a fresh worker would serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from rollway.engine.incoming import Incoming, find_slices
from rollway.engine.layers import explain_no_reload
from rollway.engine.staging import Staging
from rollway.weights.planning.targets import engine_ranks
from rollway.weights.transports.base import Reader
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader
from tests.unit.engine.staging import FakeReader, make_offer, stage
from tests.unit.engine.vllm_models import (
    CONFIGS,
    Tensors,
    change,
    create_worker,
    headers_of,
    pack,
    use_ranks,
    write_model,
)

TP = 2


def start_packed(directory: Path, tensors: Tensors) -> Any:
    """Return a worker that has just started with these tensors."""
    worker = create_worker(directory)
    worker.model_runner.get_model().load_weights(iter(tensors.items()))
    pack(worker)
    return worker


def start_staging(
    worker: Any,
    tensors: Tensors,
    reduced: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> Staging:
    reader, offer = FakeReader(tensors, has_sums=True), make_offer(tensors)
    headers = reader.headers(offer)
    incoming = Incoming(worker, reader, offer, headers, reduced)
    return Staging(incoming, headers, [])


def refit(staging: Staging) -> dict[str, Any]:
    report = stage(staging)
    assert report["state"] == "ready", report["error"]
    return staging.swap()


def compute(worker: Any) -> dict[str, torch.Tensor]:
    """Return what each layer computes with, or a product where its weights are packed."""
    held: dict[str, torch.Tensor] = {}
    for name, module in worker.model_runner.get_model().named_modules():
        held |= {f"{name}.{k}": p.detach() for k, p in module.named_parameters(recurse=False)}
        if hasattr(module, "cpu_linear"):
            kinds = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(module, kind) for kind in kinds if hasattr(module, kind))
            x = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
            held[f"{name} times x"] = module.cpu_linear(x, module.weight, None)
    return held


def assert_same(worker: Any, fresh: Any) -> None:
    served, expected = compute(worker), compute(fresh)
    assert served.keys() == expected.keys() and any("times x" in name for name in served)
    for name, tensor in expected.items():
        assert torch.equal(served[name], tensor), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_reloaded_worker_serves_what_a_fresh_one_would(kind: str, tmp_path: Path) -> None:
    tensors = write_model(kind, tmp_path)
    with use_ranks():
        worker = start_packed(tmp_path, tensors)
        for version in range(1, 4):
            tensors = change(tensors, version)
            result = refit(start_staging(worker, tensors))
            assert result["strategy"] == "reload"
            assert result["seconds"].keys() == {"reload", "verify"}
            assert_same(worker, start_packed(tmp_path, tensors))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "odd"])
def test_each_rank_proves_the_part_that_it_packed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of a part are no whole words of eight bytes, but those of all are."""
    sizes = {"hidden_size": 32, "intermediate_size": 6, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    odd = Qwen3Config(vocab_size=250, **sizes, **heads, dtype="float32")
    monkeypatch.setitem(CONFIGS, "odd", lambda: odd)
    tensors = write_model(kind, tmp_path)
    new, sums = change(tensors, 1, 0.5), list[torch.Tensor]()

    def note(local: torch.Tensor) -> torch.Tensor:
        sums.append(local)
        raise InterruptedError  # the other ranks are not there yet

    workers = []
    for rank in range(TP):
        with use_ranks(TP, rank):
            workers.append(start_packed(tmp_path, tensors))
            with pytest.raises(InterruptedError):
                refit(start_staging(workers[rank], new, note))
    for rank in range(TP):
        with use_ranks(TP, rank):
            refit(start_staging(workers[rank], new, lambda _: sum(sums)))  # type: ignore[arg-type,return-value]
            assert_same(workers[rank], start_packed(tmp_path, new))
            with pytest.raises(RuntimeError, match="parameters differ from the checkpoint"):
                refit(start_staging(workers[rank], new, lambda local: local))


def test_a_packed_rank_receives_only_its_part(tmp_path: Path) -> None:
    tensors = write_model("qwen3", tmp_path)
    with use_ranks(TP):
        worker = create_worker(tmp_path)
        model = worker.model_runner.get_model()
        rank = engine_ranks(worker.model_config.hf_config.to_dict(), TP)[0]
        before = find_slices(rank, headers_of(tensors), model)
        pack(worker)
    assert find_slices(rank, headers_of(tensors), model) == before
    assert len(before.boxes) == len([name for name in tensors if "norm" not in name])


@pytest.mark.parametrize("name", ["mlp.experts.3.down_proj", "self_attn.k_proj"])
def test_a_bit_that_vllm_loaded_wrong_is_reported(name: str, tmp_path: Path) -> None:
    tensors = write_model("qwen3-moe", tmp_path)
    with use_ranks():
        worker = start_packed(tmp_path, tensors)
        load = worker.reload_weights

        def flip(weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            damaged = dict(weights_iterator)
            damaged[f"model.layers.1.{name}.weight"].view(torch.int32)[3, 3] ^= 1
            load(iter(damaged.items()))

        worker.reload_weights = flip
        with pytest.raises(RuntimeError, match=r"1 of .* parameters differ from the checkpoint"):
            refit(start_staging(worker, change(tensors, 1)))


def test_a_layer_that_vllm_did_not_load_is_reported(tmp_path: Path) -> None:
    tensors = write_model("qwen3", tmp_path)
    with use_ranks():
        worker = start_packed(tmp_path, tensors)
        load = worker.reload_weights
        worker.reload_weights = lambda weights_iterator: load(
            (name, tensor) for name, tensor in weights_iterator if "layers.1.mlp.down" not in name
        )
        with pytest.raises(RuntimeError, match=r"1 of .*layers\.1\.mlp\.down_proj\.weight"):
            refit(start_staging(worker, change(tensors, 1)))


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_a_reload_that_breaks_off_is_repaired_by_the_next_refit(kind: str, tmp_path: Path) -> None:
    tensors = write_model(kind, tmp_path)

    def break_off(
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            if "layers.1." in name:
                raise InterruptedError

    with use_ranks():
        worker = start_packed(tmp_path, tensors)
        model, load = worker.model_runner.get_model(), worker.reload_weights
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        worker.reload_weights = lambda weights_iterator: load(break_off(weights_iterator))
        with pytest.raises(InterruptedError):
            refit(start_staging(worker, change(tensors, 1, 0.5)))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        worker.reload_weights = load
        tensors = change(tensors, 2, 0.5)
        refit(start_staging(worker, tensors))
        assert_same(worker, start_packed(tmp_path, tensors))


def test_experts_that_vllm_would_not_pack_are_refused(tmp_path: Path) -> None:
    """Only unquantised experts without adapters are packed again."""
    tensors = write_model("qwen3-moe", tmp_path)
    with use_ranks():
        worker = start_packed(tmp_path, tensors)
    model = worker.model_runner.get_model()
    assert explain_no_reload(model) == ""
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            module.quant_method = torch.nn.Identity()
    assert "vLLM packs the experts of model.layers.0.mlp.experts" in explain_no_reload(model)


def test_vllm_alone_packs_no_experts_and_no_tied_head(tmp_path: Path) -> None:
    """The controls: what `watch_loading` is needed for."""
    for kind, fault in (("qwen3-moe", "must match the size"), ("qwen3-tied", "lm_head times x")):
        tensors = write_model(kind, tmp_path)
        with use_ranks():
            worker = start_packed(tmp_path, tensors)
            tensors = change(tensors, 1)
            with pytest.raises((RuntimeError, AssertionError), match=fault):
                worker.reload_weights(iter(tensors.items()))
                assert_same(worker, start_packed(tmp_path, tensors))


def test_a_delta_is_received_whole(tmp_path: Path) -> None:
    """Packed layers have no places where changed elements could be written."""
    tensors = write_model("qwen3", tmp_path)
    publisher = DeltaPublisher(tmp_path / "deltas", snapshot_every=100)
    reader: Reader = DeltaReader()
    with use_ranks():
        worker = start_packed(tmp_path, tensors)
        for version in range(1, 4):
            tensors = change(tensors, version)
            offer = publisher.publish(version, tensors.items())
            headers = reader.headers(offer)
            incoming = Incoming(worker, reader, offer, headers, torch.clone)
            result = refit(Staging(incoming, headers, []))
            assert result["strategy"] == "reload" and "no patch, because" in result["reason"]
            assert_same(worker, start_packed(tmp_path, tensors))
