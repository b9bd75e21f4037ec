"""A worker with a tiny model; and what vLLM and the worker's extension change in their process is
undone, because other tests share this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway import signed_calls
from tests.unit.engine.staging import parameters_of
from tests.unit.engine.vllm_models import (
    Tensors,
    create_model,
    create_worker,
    use_ranks,
    write_model,
)


@pytest.fixture(autouse=True, scope="module")
def leave_no_trace() -> Iterator[None]:
    yield
    # The extension keeps the stack's secret when it is imported beside vLLM.
    signed_calls._kept_secret = None
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    return write_model("qwen3", tmp_path)


@pytest.fixture
def worker(tensors: Tensors, tmp_path: Path) -> Any:
    with use_ranks():
        return create_worker(tmp_path)


@pytest.fixture
def expected(tensors: Tensors, tmp_path: Path) -> Tensors:
    """The parameters that vLLM's own loader makes of the tensors."""
    with use_ranks():
        model, _ = create_model(tmp_path)
        model.load_weights(iter(tensors.items()))
    return parameters_of(model)
