"""One admin address in front of 2, 8 and 64 workers, and workers that come and go meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollway
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.prime_rl import PrimeServer, broadcast, read_logprobs
from tests.stack.serving import TOLERANCE, fresh_prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(420)]

CLIENTS = 8
Answer = tuple[list[int], dict[str, Any]]


@contextmanager
def fleet(base_model: Path, output_dir: Path, processes: int, each: int) -> Iterator[rollway.Stack]:
    spec = light(base_model, "prime", processes, LIGHT_STEP_SECONDS="0.01")
    spec["models"][0]["args"] = {"count": each}
    with rollway.up({**spec, "checkpoint_roots": [str(output_dir)]}) as stack:
        yield stack


@contextmanager
def sampling(server: PrimeServer) -> Iterator[list[Answer]]:
    """Sample without a pause; the list has every prompt with its answer."""
    answers: list[Answer] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            prompt = fresh_prompt(20)
            options = {"ignore_eos": True, "stop_token_ids": []}
            answers.append((prompt, server.generate(prompt, 16, **options)))

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(sample) for _ in range(CLIENTS)]
        try:
            yield answers
        finally:
            ended.set()
        for client in clients:
            client.result(60)


class Steps:
    """Broadcasts that go to the server one after the other, and what each version has."""

    def __init__(self, server: PrimeServer, policies: list[Policy]) -> None:
        self.server, self.policies = server, policies
        self.policy_of = {0: policies[0]}

    def update(self) -> None:
        step = len(self.policy_of) - 1
        policy = self.policies[1 + step % 2]
        broadcast(self.server.output_dir, step, policy.path)
        self.server.update(f"broadcasts/step_{step}")
        self.policy_of[step + 1] = policy

    def check(self, answers: list[Answer]) -> set[int]:
        """Assert that every token is of the policy that its span names; return the versions."""
        for prompt, answer in answers:
            ids, logprobs = answer["choices"][0]["token_ids"], read_logprobs(answer)
            assert len(ids) == len(logprobs) == 16
            for start, end, version in answer["spans"]:
                part = prompt + ids[:start], ids[start:end], logprobs[start:end]
                assert self.policy_of[version].distance(*part) < TOLERANCE
        return {version for _, answer in answers for *_, version in answer["spans"]}


@pytest.mark.parametrize(
    ("processes", "each"),
    [(2, 1), (2, 4), pytest.param(4, 16, marks=pytest.mark.soak)],
    ids=["2", "8", "64"],
)
def test_one_address_updates_every_worker(
    processes: int, each: int, base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    with fleet(base_model, tmp_path, processes, each) as stack:
        server = PrimeServer("prime", tmp_path).start()
        steps = Steps(server, policies)
        with sampling(server) as answers:
            for _ in range(4):
                steps.update()
                # All of them, not only those that were asked.
                served = stack.fleet.read_versions()
                assert list(served.values()) == [max(steps.policy_of)] * processes * each
                seen = len(answers)
                wait_until(lambda seen=seen: len(answers) > seen + CLIENTS)
        server.end()
    assert steps.check(answers) >= {1, 2, 3, 4}


def test_workers_come_and_go_during_updates(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    with fleet(base_model, tmp_path, 2, 1) as stack:
        server = PrimeServer("prime", tmp_path).start()
        steps = Steps(server, policies)
        with sampling(server) as answers:
            steps.update()
            joiner = {**light(base_model, "more", 2), **stack.join_spec}
            with ThreadPoolExecutor(1) as pool, rollway.up(joiner):
                running = pool.submit(steps.update)  # they may have joined before it or during it
                running.result(120)
                wait_until(lambda: count_serving(stack, 2) == 4, 60)
                steps.update()
                assert count_serving(stack, 3) == 4
                leaving = pool.submit(steps.update)
            leaving.result(120)  # two of four workers end while it runs
            steps.update()
            wait_until(lambda: count_serving(stack, 5) == 2, 60)
            assert server.get("/health")[1]["workers"] == 2
        server.end()
    assert steps.check(answers) >= {1, 2, 3, 4, 5}


def count_serving(stack: rollway.Stack, version: int) -> int:
    return list(stack.fleet.read_versions().values()).count(version)
