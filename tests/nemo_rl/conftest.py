"""One stack of three vLLM workers, and one policy of two ranks, for the trainings of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollway.demo.task import CountingTask
from rollway.integrations.nemo_rl.generation import Generation
from tests.nemo_rl.policy import Policy
from tests.stack.stacks import VLLM_ARGS

MODEL_ARGS = {**VLLM_ARGS, "max-num-seqs": 32}


@pytest.fixture(scope="module")
def generation(base_model: Path, session_home: Path) -> Iterator[Generation]:
    model = {"args": MODEL_ARGS}
    config = {
        "backend": "dynamo",
        "model_name": str(base_model),
        "dynamo_cfg": {"stack": {"models": [model]}, "workers": 3, "control_timeout_s": 60},
        "vllm_cfg": {"max_model_len": 512, "precision": "fp32"},
        "max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": None,
        "stop_token_ids": None, "stop_strings": None, "_pad_token_id": 0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        opened = Generation(None, config)
    yield opened
    opened.shutdown()


@pytest.fixture(scope="module")
def policy(base_model: Path) -> Iterator[Policy]:
    opened = Policy(base_model)
    yield opened
    opened.worker_group.close()


@pytest.fixture(scope="module")
def task(base_model: Path) -> CountingTask:
    return CountingTask(AutoTokenizer.from_pretrained(base_model))
