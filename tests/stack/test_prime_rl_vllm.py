"""prime-rl's calls against the server in front of two real vLLM workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse

from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    GENERATE,
    PAUSE,
    PrimeServer,
    broadcast,
    distance,
    read_logprobs,
    shared_server,
)
from tests.stack.serving import TOLERANCE, fresh_prompt
from tests.waiting import wait_until

__all__ = ["shared_server"]  # a fixture
pytestmark = pytest.mark.stack
BROADCAST = "filesystem"


@pytest.fixture(scope="module")
def halved(policies: list[Policy], tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy as the trainer sends it, in bf16, and as the engine computes with it, in float32."""
    directory = tmp_path_factory.mktemp("halved")
    tensors = load_file(policies[1].path / "model.safetensors")
    save_file(
        {n: t.to(torch.bfloat16) for n, t in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text((policies[1].path / "config.json").read_text())
    return Policy(directory)


def test_a_broadcast_in_bf16_without_a_config_is_served(
    server: PrimeServer, halved: Policy
) -> None:
    broadcast(server.output_dir, 0, halved.path)
    server.update("broadcasts/step_0")
    prompt = fresh_prompt(30)
    answer = server.generate(prompt)
    assert distance(halved, prompt, answer) < TOLERANCE
    GenerateResponse.model_validate({**answer, "prompt_logprobs": None})


def test_running_requests_continue_on_the_new_weights(
    server: PrimeServer, halved: Policy, policies: list[Policy], brake_file: Path
) -> None:
    broadcast(server.output_dir, 1, halved.path)
    server.update("broadcasts/step_1")
    broadcast(server.output_dir, 2, policies[2].path, markers=(".sender_ready", ".finished"))
    prompts = [fresh_prompt(30) for _ in range(6)]
    before = server.generate(fresh_prompt(30))["weight_version"]
    brake_file.touch()  # the engines are slow, so that requests still run when the swap comes
    try:
        with ThreadPoolExecutor(8) as pool:
            options = {"ignore_eos": True, "stop_token_ids": []}
            running = [pool.submit(server.generate, p, 200, **options) for p in prompts]
            wait_until(lambda: _count_running(server) >= len(prompts), 60)
            assert server.post(PAUSE)[0] == 200
            waiting = pool.submit(server.generate, fresh_prompt(30))
            status, answer = server.post("/update_weights", {"weight_dir": "broadcasts/step_2"})
            assert status == 200, answer
            brake_file.unlink()
            answers = [future.result(120) for future in running]
            assert not waiting.done()
            assert server.post("/resume")[0] == 200
            assert waiting.result(60)["weight_version"] == before + 1
    finally:
        brake_file.unlink(missing_ok=True)
    policy_of = {before: halved, before + 1: policies[2]}
    assert {v for a in answers for _, _, v in a["spans"]} == policy_of.keys()
    for prompt, done in zip(prompts, answers, strict=True):
        ids, logprobs = done["choices"][0]["token_ids"], read_logprobs(done)
        assert len(ids) == 200
        for start, end, version in done["spans"]:
            part = prompt + ids[:start], ids[start:end], logprobs[start:end]
            assert policy_of[version].distance(*part) < TOLERANCE


def test_a_teacher_scores_by_generate(server: PrimeServer, policies: list[Policy]) -> None:
    broadcast(server.output_dir, 3, policies[1].path)
    server.update("broadcasts/step_3")
    ids = fresh_prompt(30)
    wanted = policies[1].logprobs(ids[:1], ids[1:])
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": "tiny", "token_ids": ids, "sampling_params": params}
    status, answer = server.post(GENERATE, body)
    assert status == 200, answer
    GenerateResponse.model_validate(answer)  # prime-rl reads it by this class
    scores = answer["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(ids)
    # prime-rl takes the first entry of each position.
    first = [next(iter(entry.values()))["logprob"] for entry in scores[1:]]
    assert max(abs(a - b) for a, b in zip(first, wanted, strict=True)) < TOLERANCE


def test_an_eval_by_chat_is_answered(server: PrimeServer) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 4}
    status, answer = server.post("/v1/chat/completions", chat)
    assert status == 200 and answer["choices"][0]["message"]["role"] == "assistant"


def test_the_concurrency_controller_finds_its_series(server: PrimeServer) -> None:
    samples = _read_samples(server)
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running",
                 "vllm:num_requests_waiting", "vllm:num_preemptions_total",
                 "vllm:prefix_cache_queries_total", "vllm:cache_config_info"):  # fmt: skip
        engines = {s.labels["engine"] for s in samples if s.name == name}
        assert engines == {"0", "1"}, name
    capacities = [s.labels for s in samples if s.name == "vllm:cache_config_info"]
    assert all({"num_gpu_blocks", "block_size"} <= labels.keys() for labels in capacities)


def _read_samples(server: PrimeServer) -> list[Any]:
    page = text_string_to_metric_families(server.read_page())
    return [s for family in page for s in family.samples]


def _count_running(server: PrimeServer) -> float:
    return sum(s.value for s in _read_samples(server) if s.name == "vllm:num_requests_running")
