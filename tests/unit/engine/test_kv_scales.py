"""Scales of a quantised KV cache, in vLLM's own attention layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine.companions import KvScales, restore_scales, split_headers
from rollway.weights.checkpoint import TensorHeader
from tests.unit.engine.staging import FakeReader, is_serving, parameters_of, stage, start_staging
from tests.unit.engine.vllm_models import Tensors, create_worker, headers_of, use_ranks, write_model

SCALE = TensorHeader("F32", (1,), "")
KEYS, VALUES = "model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"
QUERIES = "model.layers.{}.self_attn.attn.q_scale"


def make_scales(start: float = 0.25) -> Tensors:
    """Scales of two layers, under the names that NeMo-RL gives them."""
    names = [name.format(layer) for layer in (0, 1) for name in (QUERIES, KEYS, VALUES)]
    return {
        f"kv_scale.{name}": torch.tensor([start + number / 100])
        for number, name in enumerate(names)
    }


def make_worker(directory: Path, cache: str = "fp8", kind: str = "qwen3") -> tuple[Any, Tensors]:
    tensors = write_model(kind, directory)
    with use_ranks():
        return create_worker(directory, cache), tensors


def read_scales(worker: Any) -> dict[str, list[float]]:
    """Return the scales of each layer wherever a backend may look for them."""
    layers = {
        name: layer
        for name, layer in worker.model_runner.get_model().named_modules()
        if hasattr(layer, "_k_scale")
    }
    return {
        name: [
            *(float(getattr(layer, f"_{kind}_scale")) for kind in "qkv"),
            *(getattr(layer, f"_{kind}_scale_float") for kind in "qkv"),
            *(float(getattr(layer, f"_{kind}_scale_cpu")) for kind in "kv"),
        ]
        for name, layer in layers.items()
    }


def list_expected(scales: Tensors, layer: int) -> list[float]:
    query, key, value = (
        float(scales[f"kv_scale.{name.format(layer)}"]) for name in (QUERIES, KEYS, VALUES)
    )
    return [query, key, value, query, key, value, key, value]


@pytest.mark.parametrize("has_sums", [False, True])
def test_scales_are_set_with_the_weights_of_their_version(tmp_path: Path, has_sums: bool) -> None:
    worker, tensors = make_worker(tmp_path)
    scales = make_scales()
    reader = FakeReader({**scales, **tensors}, has_sums=has_sums)
    with use_ranks():
        staging = start_staging(worker, reader)
        assert stage(staging)["state"] == "ready"
        assert set(read_scales(worker)["model.layers.0.self_attn.attn"]) == {1.0}  # not yet
        staging.swap()
    for layer in (0, 1):
        held = read_scales(worker)[f"model.layers.{layer}.self_attn.attn"]
        assert held == list_expected(scales, layer)
    expected = parameters_of(worker.model_runner.get_model())
    # The next version has none, and vLLM, which sets 1 where it loads a layer, does not decide.
    with use_ranks():
        later = start_staging(worker, FakeReader(tensors))
        assert stage(later)["state"] == "ready"
        worker.model_runner.get_model().model.layers[0].self_attn.attn._k_scale.fill_(1.0)
        later.swap()
    assert read_scales(worker)["model.layers.0.self_attn.attn"] == list_expected(scales, 0)
    assert is_serving(worker, expected)


def test_a_worker_without_such_a_cache_refuses_scales(tmp_path: Path) -> None:
    worker, _ = make_worker(tmp_path, "auto")
    _, _, scales = split_headers(headers_of(make_scales()))
    with pytest.raises(RuntimeError, match=r"is not quantised; start it with kv-cache-dtype fp8"):
        KvScales(worker, scales)
    restore_scales(worker)  # and has none to restore


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    worker, _ = make_worker(tmp_path)
    _, _, scales = split_headers(headers_of(make_scales()))
    few = {name: header for name, header in scales.items() if name != VALUES.format(1)}
    with pytest.raises(RuntimeError, match=r"no v_scale for model\.layers\.1\.self_attn\.attn"):
        KvScales(worker, few)
    for unknown in (KEYS.format(2), "model.layers.0.mlp.k_scale", "k_scale"):
        with pytest.raises(RuntimeError, match=r"is no scale of a quantised layer"):
            KvScales(worker, {**scales, unknown: SCALE})
    for wrong in (TensorHeader("F32", (2,), ""), TensorHeader("I64", (1,), "")):
        with pytest.raises(RuntimeError, match="a scale is one float"):
            KvScales(worker, {**scales, KEYS.format(0): wrong})
    without_queries = {name: header for name, header in scales.items() if "q_scale" not in name}
    KvScales(worker, without_queries)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_not_staged(tmp_path: Path, value: float) -> None:
    worker, tensors = make_worker(tmp_path)
    scales = make_scales() | {f"kv_scale.{KEYS.format(1)}": torch.tensor([value])}
    with use_ranks():
        report = stage(start_staging(worker, FakeReader({**tensors, **scales})))
    assert report["state"] == "failed" and "a scale is a positive number" in report["error"]


def test_scales_in_captured_graphs_are_refused(tmp_path: Path) -> None:
    """A stand-in for FlashInfer, which needs a GPU: it computes with copies of the scales."""
    worker, _ = make_worker(tmp_path)
    _, _, scales = split_headers(headers_of(make_scales()))
    impl = SimpleNamespace(bmm1_scale=0.5, bmm2_scale=0.5)
    worker.model_runner.get_model().model.layers[0].self_attn.attn.impl = impl
    worker.model_config.enforce_eager = False
    with pytest.raises(RuntimeError, match="in its captured graphs"):
        KvScales(worker, scales)
    worker.model_config.enforce_eager = True
    cache = KvScales(worker, scales)
    for name, tensor in make_scales().items():
        cache.keep(name.removeprefix("kv_scale."), tensor)
    cache.install()
    assert impl.bmm1_scale is None and impl.bmm2_scale is None
