"""What a worker is started with: its dtype, and the profile of a machine without GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollway.spec import load_spec
from rollway.stack import preset
from rollway.stack.preset import UNIPROCESS, Defaults, get_worker_defaults


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(preset, "list_gpus", list)

    def make(**model: Any) -> Defaults:
        spec = load_spec({"name": "t", "models": [{"path": "org/model", **model}]})
        return get_worker_defaults(spec, spec.models[0])

    return make


def test_the_model_runs_in_the_engines_process(defaults: Any) -> None:
    assert defaults().args["distributed-executor-backend"] == UNIPROCESS


@pytest.mark.parametrize("model", [{"tensor_parallel": 2}, {"args": {"pipeline-parallel-size": 2}}])
def test_several_ranks_are_several_processes(defaults: Any, model: dict[str, Any]) -> None:
    assert "distributed-executor-backend" not in defaults(**model).args


def test_nothing_is_compiled_unless_the_user_says_so(defaults: Any) -> None:
    assert defaults().env["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in defaults(args={"enforce-eager": None}).env
    assert "TORCH_COMPILE_DISABLE" not in defaults(args={"enforce-eager": False}).env


@pytest.mark.parametrize(
    ("config", "tensors", "served"),
    [
        ({"dtype": "float32"}, torch.bfloat16, "float32"),
        ({"torch_dtype": "float32"}, torch.bfloat16, "float32"),
        ({"text_config": {"dtype": "float32"}}, torch.bfloat16, "float32"),
        ({}, torch.float32, "float32"),
        ({"dtype": "bfloat16"}, torch.float32, None),
        ({}, torch.bfloat16, None),
        ({"dtype": "float32", "quantization_config": {}}, torch.float32, None),
    ],
)
def test_a_float32_checkpoint_is_served_in_float32(
    defaults: Any, tmp_path: Path, config: dict[str, Any], tensors: torch.dtype, served: str | None
) -> None:
    """By default vLLM rounds it to bfloat16; it serves all others in their own dtype."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2, dtype=tensors)}, tmp_path / "model.safetensors")
    assert defaults(path=str(tmp_path)).args.get("dtype") == served
    assert "dtype" not in defaults(path=str(tmp_path), args={"quantization": "fp8"}).args


def test_the_users_dtype_wins(defaults: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    args = defaults(path=str(tmp_path)).args
    assert preset.merge_args(args, {"dtype": "bfloat16"})["dtype"] == "bfloat16"
    assert "dtype" not in preset.merge_args(args, {"dtype": None})
