"""Deaths, joins and half-written files around prime-rl's calls, with light workers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollway
from chaos.faults import Joiner
from chaos.target import Target
from rollway.api import make_spec
from rollway.http import Http
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    PAUSE,
    PrimeServer,
    broadcast,
    distance,
    home,
    in_module_home,
    output_dir,
    server,
    stack,
)
from tests.stack.serving import TOLERANCE, fresh_prompt, read_state
from tests.waiting import stays, wait_until

__all__ = ["home", "in_module_home", "output_dir", "server", "stack"]  # fixtures

pytestmark = pytest.mark.stack

SENDER = """
import sys, torch
from rollway.integrations.prime_rl.broadcast import BroadcastSender
def tensors():
    yield "model.norm.weight", torch.ones(4)
    print("half", flush=True)
    sys.stdin.read()  # until it is killed
    yield "lm_head.weight", torch.ones(4)
BroadcastSender(sys.argv[1], shard_bytes=1).send(int(sys.argv[2]), tensors())
"""


def read_versions(stack: rollway.Stack) -> list[int | None]:
    return list(stack.fleet.read_versions().values())


def assert_all_serve(
    server: PrimeServer, stack: rollway.Stack, policy: Policy, version: int, workers: int = 2
) -> None:
    """Every worker serves the version, no other answers, and new requests are admitted."""
    wait_until(lambda: read_versions(stack) == [version] * workers, 60)
    assert server.metrics()["rollway_gate_open"] == 1
    for _ in range(4 * workers):
        prompt = fresh_prompt(20)
        done = server.generate(prompt)
        assert done["weight_version"] == version and distance(policy, prompt, done) < TOLERANCE


def kill_worker() -> None:
    victim = next(p for p in read_state("prime").processes if p.instance)
    os.kill(victim.pid or 0, signal.SIGKILL)


def test_a_server_killed_in_a_broadcast_goes_on_where_it_was(
    server: PrimeServer, output_dir: Path, policies: list[Policy]
) -> None:
    broadcast(output_dir, 5, policies[1].path)
    assert server.post(PAUSE)[0] == 200
    server.end(kill=True)
    server.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, fresh_prompt(20))
        wait_until(lambda: server.metrics()["rollway_gate_waiting"] == 1)
        status, answer = server.post("/update_weights", {"weight_dir": "broadcasts/step_5"})
        assert status == 200 and not waiting.done()
        assert server.post("/resume")[0] == 200
        assert waiting.result(60)["weight_version"] == answer["weight_version"]


def test_a_worker_killed_between_pause_and_update_delays_nothing(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, policies: list[Policy]
) -> None:
    broadcast(output_dir, 6, policies[2].path)
    assert server.post(PAUSE)[0] == 200
    victim = next(p for p in read_state("prime").processes if p.instance)
    os.kill(victim.pid or 0, signal.SIGKILL)
    status, answer = server.post("/update_weights", {"weight_dir": "broadcasts/step_6"})
    assert status == 200, answer
    assert server.post("/resume")[0] == 200
    versions = stack.fleet.read_versions
    wait_until(lambda: list(versions().values()) == [answer["weight_version"]] * 2, 60)
    prompt = fresh_prompt(20)
    assert distance(policies[2], prompt, server.generate(prompt)) < TOLERANCE


@pytest.mark.parametrize("victim", ["a worker", "the server"])
def test_a_death_during_an_update_leaves_no_old_version_in_service(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, policies: list[Policy], victim: str
) -> None:
    """prime-rl repeats a call that failed with a 5xx or with its connection."""
    step, policy = (7, policies[1]) if victim == "a worker" else (8, policies[2])
    broadcast(output_dir, step, policy.path)
    began = server.metrics()["rollway_weight_updates"]
    assert server.post(PAUSE)[0] == 200
    body = {"weight_dir": f"broadcasts/step_{step}"}
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(server.post, "/update_weights", body)
        wait_until(lambda: server.metrics()["rollway_weight_updates"] > began, every=0.001)
        if victim == "a worker":
            process = next(p for p in read_state("prime").processes if p.instance)
            os.kill(process.pid or 0, signal.SIGKILL)
        else:
            server.end(kill=True)
            server.start()
    # It may have been done before the kill; else it is not, and must be repeated.
    status = 0 if updating.exception() else updating.result()[0]
    for _ in range(5):
        if status == 200 and victim == "a worker":
            break
        status, answer = server.post("/update_weights", body)
        assert status in (200, 503), answer
    assert status == 200
    version = server.post("/update_weights", body)[1]["weight_version"]
    assert server.post("/resume")[0] == 200
    wait_until(lambda: list(stack.fleet.read_versions().values()) == [version] * 2, 60)
    for _ in range(4):
        prompt = fresh_prompt(20)
        done = server.generate(prompt)
        assert done["weight_version"] == version and distance(policy, prompt, done) < TOLERANCE


def test_a_worker_killed_in_a_pause_is_not_waited_for(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, policies: list[Policy]
) -> None:
    """A pause asks no worker, so no death can leave some paused and some not."""
    broadcast(output_dir, 40, policies[1].path)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(server.post, PAUSE)
        kill_worker()
        assert pausing.result(60) == (200, {"status": "paused"})
    assert server.post("/resume")[0] == 200  # the trainer gives up, and goes on
    server.update("broadcasts/step_40")
    version = int(server.metrics()["rollway_weight_version"])
    assert_all_serve(server, stack, policies[1], version)


@contextmanager
def joined_worker(base_model: Path) -> Iterator[None]:
    """Run another worker of the stack, which comes up with the checkpoint of its start."""
    target = Target(make_spec(light(base_model, "prime")))
    target.open()
    joiner = Joiner(target, Http())
    joiner.start()
    try:
        yield
    finally:
        asyncio.run(joiner.end_all())


@pytest.mark.parametrize("moment", ["before the update", "after the update"])
def test_a_worker_that_joins_between_the_calls_serves_no_old_version(
    server: PrimeServer,
    stack: rollway.Stack,
    output_dir: Path,
    base_model: Path,
    policies: list[Policy],
    moment: str,
) -> None:
    step, policy = (41, policies[2]) if moment == "before the update" else (42, policies[1])
    body = {"weight_dir": str(broadcast(output_dir, step, policy.path))}
    assert server.post(PAUSE)[0] == 200
    if moment == "after the update":
        assert server.post("/update_weights", body)[0] == 200
    with joined_worker(base_model):
        wait_until(lambda: len(stack.fleet.workers()) == 3, 60)
        status, answer = server.post("/update_weights", body)
        assert status == 200, answer
        assert server.post("/resume")[0] == 200
        assert_all_serve(server, stack, policy, answer["weight_version"], workers=3)
    wait_until(lambda: len([w for w in stack.fleet.workers() if w.error is None]) == 2, 60)


def test_an_orchestrator_that_dies_in_an_update_leaves_the_fleet_whole(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, policies: list[Policy]
) -> None:
    """The update runs to its end, the gate stays closed and says so; the next one begins anew."""
    directory = broadcast(output_dir, 43, policies[2].path)
    before = server.metrics()
    assert server.post(PAUSE)[0] == 200
    dying = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"weight_dir": str(directory)})
    headers = {"content-type": "application/json", "authorization": f"Bearer {server.token}"}
    dying.request("POST", "/update_weights", body, headers)
    started, served = "rollway_weight_updates", "rollway_weight_version"
    wait_until(lambda: server.metrics()[started] > before[started], every=0.001)
    dying.close()
    wait_until(lambda: server.metrics()[served] > before[served], 60)
    assert stays(lambda: server.metrics()["rollway_gate_open"] == 0, 0.2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, fresh_prompt(20))
        wait_until(lambda: server.metrics()["rollway_gate_waiting"] == 1)
        server.update(broadcast(output_dir, 43, policies[1].path))
        version = waiting.result(60)["weight_version"]
    assert_all_serve(server, stack, policies[1], version)


def test_an_orchestrator_that_dies_in_a_pause_is_told_from_the_metrics(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, home: Path
) -> None:
    """New requests get a 503 with the cause after --gate-seconds, and nothing is lost."""
    server.end()
    env = {"ROLLWAY_HOME": str(home)}
    short = PrimeServer("prime", output_dir, ("--gate-seconds", "0.5"), env).start()
    try:
        assert short.post(PAUSE)[0] == 200
        status, answer = short.post("/inference/v1/generate", {"token_ids": [5, 6, 7]})
        assert status == 503 and "paused for longer than 0.5 s" in answer["error"]["message"]
        assert short.metrics()["rollway_gate_open"] == 0
        assert short.post("/resume")[0] == 200
        assert short.generate([5, 6, 7])
    finally:
        short.end()
        server.start()


def break_markers(directory: Path) -> None:
    """As prime-rl's trainer of today leaves it: it has begun, and not finished."""
    (directory / "STABLE").unlink()
    for stage in (".sender_ready", ".started"):
        (directory / stage).touch()


def break_shard(directory: Path) -> None:
    """As a machine that lost its power may leave it: prime-rl does not flush its files."""
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    (directory / "STABLE").touch()


def break_index(directory: Path) -> None:
    (directory / "model-00001-of-00002.safetensors").unlink()
    (directory / "STABLE").touch()


@pytest.mark.parametrize("damage", [break_markers, break_shard, break_index])
def test_a_trainer_that_dies_in_a_broadcast_changes_no_worker(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, policies: list[Policy], damage: Any
) -> None:
    server.update(broadcast(output_dir, 44, policies[1].path))
    before = int(server.metrics()["rollway_weight_version"])
    directory = broadcast(output_dir, 45, policies[2].path)
    damage(directory)
    assert server.post(PAUSE)[0] == 200
    status, answer = server.post("/update_weights", {"weight_dir": str(directory)})
    assert status == 400 and "step_45" in answer["error"]["message"], answer
    assert server.post("/resume")[0] == 200
    assert_all_serve(server, stack, policies[1], before)
    shutil.rmtree(directory)  # a resumed trainer writes the step again
    server.update(broadcast(output_dir, 45, policies[2].path))
    assert_all_serve(server, stack, policies[2], before + 1)


def test_a_killed_sender_leaves_no_step_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SENDER, str(tmp_path), "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    dying = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    assert dying.stdout.readline() == b"half\n"
    dying.kill()
    dying.wait(60)
    steps = tmp_path / "broadcasts"
    assert not (steps / "step_1").exists() and any(steps.iterdir())
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in steps.iterdir()] == ["step_1"]
