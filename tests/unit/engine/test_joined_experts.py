"""Experts that transformers 5 has joined are refused with the way to publish them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollway.engine import worker as engine
from rollway.errors import UsageError
from rollway.weights.checkpoint import differences, refuse_differences
from rollway.weights.sources import from_module
from tests.unit.engine.vllm_models import (
    create_worker,
    headers_of,
    pack,
    use_ranks,
    write_model,
)


def test_named_parameters_of_a_mixture_of_experts_are_refused_with_the_fix(tmp_path: Path) -> None:
    served = headers_of(write_model("qwen3-moe", tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    joined = headers_of({name: p.detach() for name, p in model.named_parameters()})
    assert any(name.endswith("experts.gate_up_proj") for name in joined)
    fix = r"Publish `rollway\.from_module\(model\)` instead of `model\.named_parameters\(\)`"
    with use_ranks():
        worker = create_worker(tmp_path)
        with pytest.raises(RuntimeError, match=fix):
            engine._refuse_unverifiable(worker, joined, "rollway_stage", from_files=False)
        alone = headers_of({held.shard.name: held.tensor for held in from_module(model)})
        engine._refuse_unverifiable(worker, alone, "rollway_stage", from_files=False)
    with pytest.raises(UsageError, match="does not fit") as refusal:
        refuse_differences(differences(joined, served), "version 3")
    assert "from_module" in str(refusal.value)
    assert not differences(alone, served)


@pytest.mark.parametrize(
    ("kind", "unpacked"), [("qwen3-moe", "model.layers.0.mlp.experts"), ("qwen3-tied", "lm_head")]
)
def test_a_checkpoint_that_vllm_alone_would_load_wrong_is_refused(
    kind: str, unpacked: str, tmp_path: Path
) -> None:
    """Callers have vLLM reload a checkpoint that cannot be verified: on CPU it packs neither
    experts nor a tied head."""
    new = headers_of(write_model(kind, tmp_path))
    new["model.layers.0.mlp.experts.gate_up_proj"] = new["model.norm.weight"]
    with use_ranks():
        worker = create_worker(tmp_path)
        pack(worker)
        with pytest.raises(RuntimeError, match=f"does not pack {unpacked}.* again") as refusal:
            engine._refuse_unverifiable(worker, new, "rollway_stage")
    assert not isinstance(refusal.value, NotImplementedError)


def test_another_checkpoint_that_cannot_be_verified_is_left_to_vllm(tmp_path: Path) -> None:
    new = headers_of(write_model("qwen3", tmp_path))
    new["other"] = new["model.norm.weight"]
    with use_ranks():
        worker = create_worker(tmp_path)
        pack(worker)
        with pytest.raises(NotImplementedError, match="tensors like other"):
            engine._refuse_unverifiable(worker, new, "rollway_stage")
