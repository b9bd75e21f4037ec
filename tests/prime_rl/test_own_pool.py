"""prime-rl's own inference pool, from a checkout, against the server.

prime-rl is not on a package index: ROLLWAY_PRIME_RL_SRC names a checkout of August 2026.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.prime_rl.environment import SOURCE
from tests.stack.policies import Policy
from tests.stack.prime_rl import PrimeServer, broadcast, read_logprobs
from tests.stack.serving import TOLERANCE, fresh_prompt

pytestmark = pytest.mark.stack

SCRIPT = Path(__file__).with_name("drive_with_prime_rl.py")


def test_prime_rls_own_pool_updates_the_fleet(
    python: Path, server: PrimeServer, policies: list[Policy]
) -> None:
    """It waits for readiness, pauses, updates and resumes, and ends with the reason of a 4xx."""
    source = os.environ.get(SOURCE)
    if not source:
        pytest.skip(f"{SOURCE} names no checkout of prime-rl, which is not on a package index")
    chosen = [policies[1], policies[2], policies[1]]
    steps = [broadcast(server.output_dir, i, policy.path) for i, policy in enumerate(chosen)]
    urls = [server.ready["url"], server.ready["url"]]
    paths = [f"{source}/src", f"{source}/packages/prime-rl-configs/src"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    env["VLLM_API_KEY"] = server.token
    ran = subprocess.run(
        [str(python), str(SCRIPT), *urls, "tiny", *map(str, steps)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    (first, why), (second, reason) = json.loads(ran.stdout.splitlines()[-1])["refusals"]
    assert first == 409 and "inference_world_size is 1" in why
    assert second == 400 and "outside the allowed checkpoint roots" in reason
    assert server.metrics()["rollway_gate_open"] == 1
    prompt = fresh_prompt(20)
    answer = server.generate(prompt)
    ids = answer["choices"][0]["token_ids"]
    assert policies[1].distance(prompt, ids, read_logprobs(answer)) < TOLERANCE
    assert answer["weight_version"] == 3  # step 2 came again unchanged, and kept its version
