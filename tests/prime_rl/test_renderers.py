"""The released `renderers` client, in an environment of its own, against the server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stack.policies import Policy
from tests.stack.prime_rl import PrimeServer, broadcast
from tests.stack.serving import TOLERANCE

pytestmark = pytest.mark.stack

SCRIPT = Path(__file__).with_name("read_with_renderers.py")


def converse(python: Path, server: PrimeServer, model: Path) -> dict[str, Any]:
    command = [str(python), str(SCRIPT), server.ready["url"], "tiny", str(model)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    env["VLLM_API_KEY"] = server.token
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def test_the_released_client_reads_our_answers(
    python: Path, server: PrimeServer, base_model: Path, policies: list[Policy]
) -> None:
    """It raises for a log-prob too few, of another token, or without a value."""
    for step, policy in enumerate((policies[1], policies[2])):
        broadcast(server.output_dir, step, policy.path)
        server.update(f"broadcasts/step_{step}")
        answer = converse(python, server, base_model)
        first, second = answer["turns"]
        assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
        for turn in (first, second):
            ids, logprobs = turn["completion_ids"], turn["completion_logprobs"]
            assert policy.distance(turn["prompt_ids"], ids, logprobs) < TOLERANCE
        assert "exceeds maximum context length" in answer["overlong"]
