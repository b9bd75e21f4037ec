"""Undo what vLLM and the worker's extension change in their process: other tests share this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rollway import orders


@pytest.fixture(autouse=True, scope="module")
def leave_no_trace() -> Iterator[None]:
    yield
    # The extension keeps the stack's secret when it is imported beside vLLM.
    orders._kept_secret = None
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
