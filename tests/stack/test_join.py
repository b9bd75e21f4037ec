"""Workers that join a stack: two supervisors, one frontend. Real Dynamo with the numpy engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway.errors import SpecError
from tests.conftest import Cli, Footprint
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, read_state, worst
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(40, 100))


def own_address() -> str:
    """Of this machine in its network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def serving(stack: rollway.Stack, version: int) -> int:
    return list(stack.fleet.read_versions().values()).count(version)


def joiner(base_model: Path, name: str, stack: rollway.Stack, **fields: Any) -> dict[str, Any]:
    return {**light(base_model, name, replicas=1), **stack.join_spec, **fields}


def test_a_joiner_with_other_options_says_why_it_gets_no_request(
    base_model: Path, tmp_path: Path, cli: Cli
) -> None:
    """It is listed with the others, and the frontend refuses every request for it."""
    with rollway.up(light(base_model, "whole", replicas=1)) as stack:
        spec = joiner(base_model, "shorter", stack)
        spec["models"][0]["args"] = {"max-model-len": 128}
        file = tmp_path / "shorter.yaml"
        file.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "rollway.cli", "up", str(file), "--quiet"]
        secret = {"ROLLWAY_WEIGHTS_SECRET": stack.weights_secret}
        up = subprocess.Popen(command, env={**os.environ, **secret})
        wait_until(lambda: "such as max-model-len" in cli("status", "shorter").stdout, every=1.0)
        cli("down", "shorter")
        assert up.wait(timeout=60) == 1


@pytest.mark.parametrize("planes", ["loopback", "network"])
def test_workers_of_two_supervisors_are_one_fleet(
    base_model: Path, policies: list[Policy], footprint: Footprint, planes: str
) -> None:
    network: dict[str, Any] = {}
    if planes == "network":
        host = own_address()
        network = {"discovery": "etcd", "admin_host": host, "frontend": {"host": host}}
    where = {name: value for name, value in network.items() if name == "admin_host"}
    with rollway.up({**light(base_model, "first", replicas=1), **network}) as first:
        with rollway.up(joiner(base_model, "second", first, **where)) as second:
            assert second.frontend_url == first.frontend_url
            assert len(first.fleet.workers()) == 2
            (worker,) = read_state("second").processes
            assert worker.role == "worker"
            assert second.weights_secret == first.weights_secret

            report = first.refit(1, policies[1].path)
            assert [refitted.state for refitted in report.workers] == ["serving"] * 2
            group = first.rollouts().generate(PROMPT, SHORT, n=8)
            assert {rollout.weight_version for rollout in group} == {1}
            assert worst(policies[1], group) < TOLERANCE

            # Its own supervisor starts it again, and who refitted brings it up to date.
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            wait_until(lambda: read_state("second").processes[0].restarts == 1)
            wait_until(lambda: serving(first, 1) == 2)
            (worker,) = read_state("second").processes
        # Only this one: etcd lists the one that was killed until its lease of 30 s ends.
        wait_until(lambda: worker.instance not in {w.instance_id for w in first.fleet.workers()})
        assert serving(first, 1) == 1
        assert worst(policies[1], first.rollouts().generate(PROMPT, SHORT, n=2)) < TOLERANCE
    assert footprint.settle() == {}


def test_a_joiner_with_another_secret_is_left_out(
    base_model: Path, policies: list[Policy], caplog: pytest.LogCaptureFixture
) -> None:
    """It takes no orders, so it never has a version of this stack. The others go on."""
    with rollway.up(light(base_model, "own", replicas=1)) as own:
        own.refit(1, policies[1].path)
        spec = joiner(base_model, "foreign", own)
        spec["join"] = {**spec["join"], "secret": "0" * 32}
        with rollway.up(spec):
            report = own.refit(2, policies[2].path)
            assert report.serving == 1
            wait_until(lambda: len(own.fleet.workers()) == 1)
            own.fleet.pause()
            own.fleet.resume()
            group = own.rollouts().generate(PROMPT, SHORT, n=8)
            assert {rollout.weight_version for rollout in group} == {2}
            assert worst(policies[2], group) < TOLERANCE
    assert "another secret's signature" in caplog.text


def test_unreachable_workers_are_refused(base_model: Path) -> None:
    join = {"namespace": "n", "frontend": "http://10.0.0.1:8000", "rl": "http://10.0.0.1:8001"}
    spec = {**light(base_model, "far"), "discovery": "etcd", "etcd_endpoints": "http://10.0.0.1:1"}
    with pytest.raises(SpecError, match="cannot reach the workers"):
        rollway.up({**spec, "join": join})
    with pytest.raises(SpecError, match="needs the other stack's `etcd_endpoints`"):
        rollway.up({**light(base_model, "far"), "discovery": "etcd", "join": join})
