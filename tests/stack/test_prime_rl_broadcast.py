"""prime-rl's `nccl` broadcast, over gloo, into two real vLLM workers."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rollway
from rollway.integrations.prime_rl.broadcast import CollectiveSender
from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    PAUSE,
    PrimeServer,
    form_group,
    init_group,
    read_logprobs,
    send_step,
    shared_server,
)
from tests.stack.serving import TOLERANCE, fresh_prompt, kill
from tests.waiting import wait_until

__all__ = ["shared_server"]  # a fixture
pytestmark = pytest.mark.stack
BROADCAST = "nccl"


def read(policy: Policy) -> dict[str, torch.Tensor]:
    return load_file(policy.path / "model.safetensors")


def check_served(server: PrimeServer, policy: Policy) -> None:
    """Every worker answers with this policy's weights."""
    for _ in range(4):
        prompt = fresh_prompt(30)
        answer = server.generate(prompt)
        tokens = answer["choices"][0]["token_ids"]
        assert policy.distance(prompt, tokens, read_logprobs(answer)) < TOLERANCE


def list_workers(stack: rollway.Stack) -> dict[int, int | None]:
    return stack.fleet.read_versions()


def test_broadcasts_are_served_one_after_another(
    server: PrimeServer, policies: list[Policy], vllm_stack: rollway.Stack
) -> None:
    with CollectiveSender("127.0.0.1", 0, 2, 60, output_dir=server.output_dir) as sender:
        form_group(server, sender)
        for step, policy in enumerate((policies[1], policies[2], policies[1])):
            status, answer = send_step(server, sender, step, read(policy).items())
            assert status == 200, answer
            assert server.post("/resume")[0] == 200
            check_served(server, policy)
        assert len(set(list_workers(vllm_stack).values())) == 1

        # A request that comes again finds the group as it is.
        assert init_group(server, sender.port)[0] == 200

        # Weights of another model are received to their end, and refused; the group stays.
        wrong = {**read(policies[2]), "model.layers.0.extra.weight": torch.ones(3)}
        del wrong["model.norm.weight"]
        status, answer = send_step(server, sender, 3, wrong.items())
        assert status == 400 and "model.layers.0.extra.weight is not part" in str(answer), answer
        assert "model.norm.weight is missing" in str(answer)
        assert server.post("/resume")[0] == 200
        check_served(server, policies[1])
        status, answer = send_step(server, sender, 4, read(policies[2]).items())
        assert status == 200, answer
        assert server.post("/resume")[0] == 200
        check_served(server, policies[2])

        # LoRA is of another transport.
        body = {"lora_name": "r", "lora_path": "broadcasts/step_4"}
        assert server.post("/load_lora_adapter", body)[0] == 409


def test_a_world_size_that_does_not_fit_is_refused_and_remembered(server: PrimeServer) -> None:
    for more, message in (
        ({"ranks": 3}, "the fleet has 2 workers with 2 ranks"),
        ({"quantize_in_weight_transfer": True}, "quantised twice"),
    ):
        status, answer = init_group(server, 1, **more)
        assert status in (400, 409) and message in str(answer), answer
        status, answer = server.post(PAUSE)
        assert status == 409 and message in str(answer), answer
    status, answer = init_group(server, 0)
    assert status == 400 and "no request to form a group" in str(answer), answer
    assert server.post(PAUSE)[0] == 200  # what is no request blocks no trainer
    assert server.post("/resume")[0] == 200


def test_without_a_trainer_the_request_ends_in_time(server: PrimeServer) -> None:
    began = time.monotonic()
    status, answer = init_group(server, 9, timeout=2)
    assert 400 <= status < 500 and "No trainer listens" in str(answer), answer
    assert time.monotonic() - began < 30
    assert server.post(PAUSE)[0] == 409


class Trainer:
    """`tests.stack.broken_trainer` in a process of its own."""

    def __init__(self, checkpoint: Path) -> None:
        command = [sys.executable, "-m", "tests.stack.broken_trainer", "0", "2", str(checkpoint)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.read_line())

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_a_trainer_that_dies_in_a_broadcast_leaves_the_old_version(
    server: PrimeServer, policies: list[Policy]
) -> None:
    trainer = Trainer(policies[2].path)
    try:
        assert init_group(server, trainer.port)[0] == 200
        assert server.post(PAUSE)[0] == 200
        with ThreadPoolExecutor(1) as pool:
            update = {"weight_dir": "broadcasts/step_11"}
            updating = pool.submit(server.post, "/update_weights", update)
            assert trainer.read_line() == "half"
            began = time.monotonic()
            trainer.kill()
            status, answer = updating.result(60)
        assert 400 <= status < 500, answer
        assert "trainer is gone" in str(answer) or "broke off" in str(answer), answer
        assert time.monotonic() - began < 30
    finally:
        trainer.kill()
    served = server.post("/update_weights", update)
    assert served[0] == 400, "the trainer sends it once"
    assert server.post("/resume")[0] == 200
    check_served(server, policies[2])  # of the first test

    with CollectiveSender("127.0.0.1", 0, 2, 60, output_dir=server.output_dir) as sender:
        form_group(server, sender)
        status, answer = send_step(server, sender, 12, read(policies[1]).items())
        assert status == 200, answer
        assert server.post("/resume")[0] == 200
    check_served(server, policies[1])


def test_a_worker_that_is_killed_in_a_broadcast_stops_it(
    server: PrimeServer, policies: list[Policy], vllm_stack: rollway.Stack
) -> None:
    trainer = Trainer(policies[2].path)
    before = set(list_workers(vllm_stack))
    try:
        assert init_group(server, trainer.port)[0] == 200
        assert server.post(PAUSE)[0] == 200
        with ThreadPoolExecutor(1) as pool:
            update = {"weight_dir": "broadcasts/step_20"}
            updating = pool.submit(server.post, "/update_weights", update)
            assert trainer.read_line() == "half"
            kill("tiny-0")
            status, answer = updating.result(60)
        assert 400 <= status < 500, answer
        status, answer = server.post("/update_weights", update)
        assert 400 <= status < 500, answer
    finally:
        trainer.kill()
    assert server.post("/resume")[0] == 200
    check_served(server, policies[1])

    def is_back() -> bool:
        now = list_workers(vllm_stack)
        return len(now) == 2 and set(now) != before and None not in now.values()

    wait_until(is_back, 120)
    # The next group has the new worker in it.
    with CollectiveSender("127.0.0.1", 0, 2, 60, output_dir=server.output_dir) as sender:
        form_group(server, sender)
        status, answer = send_step(server, sender, 21, read(policies[2]).items())
        assert status == 200, answer
        assert server.post("/resume")[0] == 200
    check_served(server, policies[2])
    assert len(set(list_workers(vllm_stack).values())) == 1
