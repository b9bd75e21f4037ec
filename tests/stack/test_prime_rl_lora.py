"""prime-rl's adapter broadcasts on a real vLLM worker, against merged weights in torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollway
from tests.stack.policies import Policy, write_adapter
from tests.stack.prime_rl import GENERATE, PrimeServer, check_reply, make_request, read_logprobs
from tests.stack.serving import TOLERANCE, fresh_prompt
from tests.stack.stacks import VLLM_ARGS

pytestmark = pytest.mark.stack


@pytest.fixture
def server(base_model: Path, tmp_path: Path, own_home: Path) -> Iterator[PrimeServer]:
    args = {**VLLM_ARGS, "enable-lora": True, "max-lora-rank": 8, "max-cpu-loras": 4}
    model = {"path": str(base_model), "name": "tiny", "args": args}
    model |= {"env": {"DYN_LORA_ENABLED": "true"}}
    roots = [str(tmp_path)]
    with rollway.up({"name": "lora", "models": [model], "checkpoint_roots": roots}):
        running = PrimeServer("lora", tmp_path).start()
        yield running
        running.end()


def test_one_name_is_the_newest_adapter(server: PrimeServer, policies: list[Policy]) -> None:
    """prime-rl broadcasts under one constant name; an engine would keep the first for ever."""
    prompt = fresh_prompt(30)
    request = {**make_request(prompt), "model": "policy"}
    assert server.post(GENERATE, request)[0] == 404
    for step in (1, 2, 3):
        directory = server.output_dir / "broadcasts" / f"step_{step}"
        directory.mkdir(parents=True)
        adapted = write_adapter(directory, policies[0], step)
        (directory / "STABLE").touch()
        body = {"lora_name": "policy", "lora_path": f"broadcasts/step_{step}"}
        status, answer = server.post("/load_lora_adapter", body)
        assert (status, answer.get("served_as")) == (200, f"policy@{step}"), answer
        status, answer = server.post(GENERATE, request)
        assert status == 200, answer
        check_reply(answer)
        ids = answer["choices"][0]["token_ids"]
        assert adapted.distance(prompt, ids, read_logprobs(answer)) < TOLERANCE
    entry = server.get("/v1/models")[1]["data"][1]
    assert entry["id"] == "policy" and entry["parent"] == "tiny"
    assert entry["root"].endswith("step_3") and entry["max_model_len"] > 0
    # The base model is still itself, and evals know the alias too.
    base = server.generate(prompt)
    ids = base["choices"][0]["token_ids"]
    assert policies[0].distance(prompt, ids, read_logprobs(base)) < TOLERANCE
    chat = {"model": "policy", "messages": [{"role": "user", "content": "1"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", chat)[0] == 200
    assert server.post("/unload_lora_adapter", {"lora_name": "policy"})[0] == 200
    assert server.post(GENERATE, request)[0] == 404
