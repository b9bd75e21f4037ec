"""A replica whose ranks run under two supervisors: served, refitted, killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollway
from rollway.errors import NoWorkers
from rollway.rollout.sampling import Sampling
from rollway.stack.state import WAITS_FOR_REPLICA
from rollway.weights.transports.files import FilesPublisher
from tests.conftest import Footprint
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, fresh_prompt, tensors, worst
from tests.stack.stacks import VLLM_ARGS
from tests.stack.two_machines import (
    RANKS,
    kill_rank,
    read_rank,
    restart_replica,
    two_machines,
)
from tests.waiting import stays, wait_until

pytestmark = pytest.mark.timeout(600)
PROMPT = list(range(40, 110))
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.mark.soak
def test_a_real_replica_of_two_ranks(
    base_model: Path, policies: list[Policy], tmp_path: Path, footprint: Footprint
) -> None:
    model = {"path": str(base_model), "name": "tiny", "tensor_parallel": 2, "args": VLLM_ARGS}
    publisher = FilesPublisher(tmp_path / "versions", policies[0].path, keep_recent=2)
    with two_machines({"models": [model], "start_seconds": 300}) as stack:
        assert_answers(stack, policies[0])

        report = stack.refit(1, publisher.publish(1, tensors(policies[1]).items()))
        assert [worker.proof for worker in report.workers] == ["parameters"]
        # Half of every layer is on the headless rank: with its old half nothing would be right.
        assert_answers(stack, policies[1])

        pids = {name: read_rank(name).pid for name in RANKS}
        kill_rank("second")
        restart_replica("second")
        wait_until(lambda: read_versions(stack) == [1], seconds=300)
        assert all(read_rank(name).pid != pid for name, pid in pids.items())
        assert_answers(stack, policies[1])
    assert footprint.settle() == {}


def assert_answers(stack: rollway.Stack, policy: Policy) -> None:
    """Tokens are those of one torch model, and so of TP 1; log-probs differ by rounding only."""
    (greedy,) = stack.rollouts().generate(PROMPT, GREEDY, n=1)
    assert greedy.token_ids == policy.greedy(PROMPT, 16)
    assert worst(policy, stack.rollouts().generate(fresh_prompt(70), SHORT, n=4)) < 1e-5


def read_versions(stack: rollway.Stack) -> list[int | None]:
    try:
        return list(stack.fleet.read_versions().values())
    except NoWorkers:  # the dead worker is no longer listed, the new one not yet
        return []


def test_ranks_live_and_die_together(
    base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    """With light workers, which do not notice the death of another rank."""
    with two_machines(light(base_model, "first")) as stack:
        assert {read_rank(name).state for name in RANKS} == {"ready"}
        assert len(stack.fleet.workers()) == 1, "a headless rank registers nowhere"
        stack.refit(1, policies[1].path)
        pids = {name: read_rank(name).pid for name in RANKS}
        kill_rank("second")
        wait_until(lambda: read_rank("second").state == WAITS_FOR_REPLICA)
        # It is not restarted alone: rank 0 would never meet it.
        assert stays(lambda: read_rank("second").pid == pids["second"], 1.0)
        assert read_rank("first").state == "ready"

        restart_replica("second")
        wait_until(lambda: read_versions(stack) == [1])
        wait_until(lambda: {read_rank(name).state for name in RANKS} == {"ready"})
        assert all(read_rank(name).pid != pid for name, pid in pids.items())
        assert read_rank("first").failures == 0, "a rank that was stopped has not failed"
        (rollout,) = stack.rollouts().generate(PROMPT, SHORT, n=1)
        assert rollout.weight_version == 1
        assert worst(policies[1], [rollout]) < TOLERANCE
    assert footprint.settle() == {}
