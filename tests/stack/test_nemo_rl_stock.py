"""NeMo-RL refits workers that Dynamo starts without anything of Rollway's, by vLLM's own weight
transfer. The group is gloo's: NCCL needs a GPU for each rank (`gloo_transfer`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from rollway.rollout.sampling import Sampling
from rollway.weights.transports import group
from tests.stack.gloo_transfer import Gloo, write_plugin
from tests.stack.nemo_rl import InProcessPolicy, make_config
from tests.stack.policies import Policy
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

TOLERANCE = 1e-4
PROMPT = list(range(20, 60))
GREEDY = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
WORKERS = 2


@pytest.fixture
def generation(base_model: Path, tmp_path: Path) -> Iterator[Generation]:
    paths = [str(write_plugin(tmp_path / "plugin")), str(Path(__file__).parents[2])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    model = {"path": str(base_model), "name": "tiny", "replicas": WORKERS, "args": VLLM_ARGS}
    model |= {"env": {"PYTHONPATH": os.pathsep.join(paths)}}
    # Another interpreter and open admin routes: the workers are Dynamo's own.
    stack = {"name": "stock", "python": sys.executable, "admin_orders": "open", "models": [model]}
    config = make_config("tiny", stack=stack, weight_sync={"method": "nccl"})
    opened = Generation(None, config)
    yield opened
    opened.shutdown()


def check_answers(generation: Generation, policy: Policy, version: int) -> None:
    """All workers answer with the weights of the version."""
    connection = generation.connection
    prompts = [[number, *PROMPT] for number in range(8)]  # each is routed by itself
    answers = connection.run(connection.rollouts.generate_batch(prompts, GREEDY))
    for prompt, (rollout,) in zip(prompts, answers, strict=True):
        assert rollout.weight_version == version and rollout.logprobs is not None
        assert policy.distance(prompt, rollout.token_ids, rollout.logprobs) < TOLERANCE


def list_workers(generation: Generation) -> set[int]:
    """Return the processes of the workers."""
    state = generation.connection.stack.read_state()
    assert state is not None
    return {process.pid for process in state.processes if process.role == "worker" and process.pid}


def test_workers_of_dynamos_own_serve_the_policys_weights(
    generation: Generation, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "Nccl", Gloo)
    processes = list_workers(generation)
    assert len(processes) == WORKERS
    for pid in processes:
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        assert "-m dynamo.vllm" in line and "guard" not in line and "extension" not in line
    # In small chunks, so that there are many.
    sync = WeightSync(method="nccl", bucket_bytes=20_000)
    policy: Any = InProcessPolicy(policies[1].model)
    synchronizer = Synchronizer(policy, generation, sync, get=list)
    try:
        # NeMo-RL's first refit sends what the workers have: no answer changes.
        policy.model = policies[0].model
        assert synchronizer.sync_weights()["workers"] == WORKERS
        assert list_proofs(synchronizer) == {"declared"}
        for weights in (policies[1], policies[0], policies[1]):
            policy.model = weights.model
            figures = synchronizer.sync_weights()
            assert figures["workers"] == WORKERS
            assert figures["bytes"] == sum(p.nbytes for p in weights.model.parameters())
            assert list_proofs(synchronizer) == {"canary"}
            check_answers(generation, weights, int(figures["version"]))
        # A group cannot replace a rank: with a new worker, a new one forms. The successor has the
        # base weights, which are those of the next version: its answer does not change.
        os.kill(next(iter(processes)), signal.SIGKILL)
        wait_until(lambda: is_whole(generation, processes), seconds=120)
        for weights in (policies[0], policies[2]):
            policy.model = weights.model
            figures = synchronizer.sync_weights()
            assert figures["workers"] == WORKERS
            assert list_proofs(synchronizer) == {"canary"}
            check_answers(generation, weights, int(figures["version"]))
        with pytest.raises(UsageError, match="without Rollway's extension set none"):
            synchronizer.sync_weights(kv_scales={"model.layers.0.self_attn.k_scale": 1.0})
    finally:
        synchronizer.shutdown()


def list_proofs(synchronizer: Synchronizer) -> set[str]:
    assert synchronizer.report is not None
    return {worker.proof for worker in synchronizer.report.workers}


def is_whole(generation: Generation, before: set[int]) -> bool:
    """Return whether a successor of a killed worker is ready, and all workers answer."""
    state = generation.connection.stack.read_state()
    assert state is not None
    workers = [process for process in state.processes if process.role == "worker"]
    if list_workers(generation) == before or any(each.state != "ready" for each in workers):
        return False
    connection = generation.connection
    listed = connection.run(connection.fleet.workers())
    return len(listed) == WORKERS and all(worker.error is None for worker in listed)
