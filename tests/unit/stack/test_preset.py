"""The CPU profile: what a worker is started with on a machine without GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from rollway.config import load_spec
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
