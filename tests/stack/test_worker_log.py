"""What a real worker writes into its log while it is refitted and stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rollway
from rollway.stack.state import StackDir
from rollway.weights.transports.shm import ShmPublisher
from tests.stack.policies import Policy
from tests.stack.serving import assert_serves, tensors
from tests.stack.stacks import VLLM_ARGS

pytestmark = [pytest.mark.stack]
MODES = ["pause-all", "rolling", "in-flight", "keep"]
TROUBLE = re.compile(r"\bERROR\b|Traceback|force killing")
ABANDONED = re.compile(r'endpoint="rl"|tcp::client: writer task returned error .*Broken pipe')
"""Dynamo's own errors: a frontend that lists workers closes the stream after the first item, and
may be faster than the worker's "this was all"."""


def test_refits_and_a_stop_write_no_error(base_model: Path, policies: list[Policy]) -> None:
    """An engine that is asked too early raises, and each exception is an error with a stack trace;
    an engine that gets no time to exit is killed."""
    model = {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS}
    with rollway.up({"name": "quiet", "models": [model]}) as stack, ShmPublisher() as publisher:
        logs = StackDir("quiet").logs
        for version, mode in enumerate(MODES, 1):
            policy = policies[version % len(policies)]
            offer = publisher.publish(version, tensors(policy).items())
            (worker,) = stack.refit(version, offer, mode=mode).workers  # type: ignore[arg-type]
            assert (worker.state, worker.proof) == ("serving", "parameters")
            assert_serves(stack, policy, version)
        stack.refit(version + 1, policies[0].path)
    workers = [path for path in logs.glob("*.log") if path.name != "frontend.log"]
    lines = [line for path in workers for line in path.read_text().splitlines()]
    assert sum("is served" in line for line in lines) >= len(MODES)  # these are the right logs
    assert any("[shutdown]" in line for line in lines)
    assert [line for line in lines if TROUBLE.search(line) and not ABANDONED.search(line)] == []
