"""prime-rl's calls, as they were captured, against the server in front of light workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollway
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    PAUSE,
    PrimeServer,
    broadcast,
    read_logprobs,
)
from tests.stack.serving import TOLERANCE, fresh_prompt
from tests.waiting import wait_until

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prime-rl-home")


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def stack(home: Path, output_dir: Path, base_model: Path) -> Iterator[rollway.Stack]:
    """Two workers that take orders, as real ones do."""
    spec = light(base_model, "prime", LIGHT_ORDERS="1", LIGHT_STEP_SECONDS="0.01")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(home))
        opening = rollway.up({**spec, "checkpoint_roots": [str(output_dir)]})
        running = opening.__enter__()
    yield running
    opening.__exit__(None, None, None)


@pytest.fixture(scope="module")
def server(stack: rollway.Stack, home: Path, output_dir: Path) -> Iterator[PrimeServer]:
    running = PrimeServer("prime", output_dir, env={"ROLLWAY_HOME": str(home)}).start()
    yield running
    running.end()


@pytest.fixture(autouse=True)
def in_module_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(home))


def distance(policy: Policy, prompt: list[int], answer: dict[str, object]) -> float:
    ids = answer["choices"][0]["token_ids"]  # type: ignore[index]
    return policy.distance(prompt, ids, read_logprobs(answer))


def test_the_calls_of_a_start_in_their_order(
    server: PrimeServer, output_dir: Path, policies: list[Policy]
) -> None:
    """The orchestrator broadcasts the first weights before any rollout, by a relative path."""
    assert server.get("/health")[0] == 200
    status, models = server.get("/v1/models")
    assert status == 200 and models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_model_len"] > 0
    broadcast(output_dir, 0, policies[1].path)
    server.update("broadcasts/step_0")
    prompt = fresh_prompt(20)
    answer = server.generate(prompt)
    assert distance(policies[1], prompt, answer) < TOLERANCE
    assert answer["weight_version"] == 1  # 0 is the checkpoint that the workers started with
    assert answer["usage"]["total_tokens"] == 20 + len(answer["choices"][0]["token_ids"])


def test_a_request_waits_at_the_gate_and_a_running_one_goes_on(
    server: PrimeServer, output_dir: Path, policies: list[Policy]
) -> None:
    prompts = [fresh_prompt(20) for _ in range(4)]
    old, new = policies[1], policies[2]
    broadcast(output_dir, 1, old.path)
    server.update("broadcasts/step_1")
    broadcast(output_dir, 2, new.path)
    with ThreadPoolExecutor(8) as pool:
        long = {"ignore_eos": True, "stop_token_ids": []}
        running = [pool.submit(server.generate, p, 300, **long) for p in prompts]
        before = server.generate(fresh_prompt(20), 100, **long)["weight_version"]
        assert server.post(PAUSE)[0] == 200
        waiting = pool.submit(server.generate, prompts[0])
        wait_until(lambda: server.metrics()["rollway_gate_waiting"] == 1, 10)
        status, answer = server.post("/update_weights", {"weight_dir": "broadcasts/step_2"})
        assert status == 200
        # Running requests pass the gate after the swap; the new one does not.
        answers = [future.result(60) for future in running]
        assert not waiting.done()
        assert server.post("/resume")[0] == 200
        assert waiting.result(60)["weight_version"] == answer["weight_version"]
    cut = [a for a in answers if len(a["spans"]) > 1]
    assert cut and all([v for _, _, v in a["spans"]] == [before, before + 1] for a in cut)
    for prompt, done in zip(prompts, answers, strict=True):
        ids, logprobs = done["choices"][0]["token_ids"], read_logprobs(done)
        assert len(ids) == 300  # nothing lost, nothing doubled
        for start, end, version in done["spans"]:
            policy = old if version == before else new
            part = policy.distance(prompt + ids[:start], ids[start:end], logprobs[start:end])
            assert part < TOLERANCE
