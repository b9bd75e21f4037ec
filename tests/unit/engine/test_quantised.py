"""A quantised model refuses published tensors with the reason; it loads checkpoints instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine import worker as engine
from rollway.weights.checkpoint import TensorHeader

NEW = {"fc.weight": TensorHeader("F32", (2, 2), "")}


def make_worker(quantization: str | None) -> Any:
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 2, bias=False)})
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        model_config=SimpleNamespace(quantization=quantization, enforce_eager=True, use_mla=False),
        vllm_config=SimpleNamespace(lora_config=None),
    )


@pytest.fixture(autouse=True)
def use_single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_find_reduction", lambda: torch.clone)


def test_an_offer_is_refused_with_the_reason_and_the_fix() -> None:
    with pytest.raises(RuntimeError, match=r"quantised \(fp8\).*refit from a checkpoint directory"):
        engine._refuse_unverifiable(make_worker("fp8"), NEW, "rollway_stage", from_files=False)
    engine._refuse_unverifiable(make_worker(None), NEW, "rollway_stage", from_files=False)


def test_a_checkpoint_is_left_to_the_engine_and_the_canary() -> None:
    """The fleet knows this message from a worker without this class, and calls it a foreign one."""
    message = "Method 'rollway_stage' is not implemented for quantised models"
    with pytest.raises(NotImplementedError, match=message):
        engine._refuse_unverifiable(make_worker("fp8"), NEW, "rollway_stage")


def test_an_offer_with_unknown_tensors_is_refused() -> None:
    other = {**NEW, "other.weight": NEW["fc.weight"]}
    with pytest.raises(RuntimeError, match="tensors like other"):
        engine._refuse_unverifiable(make_worker(None), other, "x", from_files=False)
