"""The routing that real vLLM reports through Dynamo is the routing of the model, row by row.

A run needs Triton from PyPI, 1 GB once unpacked, in the cache directory; so it is asked for:
ROLLWAY_TEST_ROUTED_EXPERTS=1 pytest tests/stack/test_routed_experts.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollway
from examples.exactness.mismatch import mismatch
from examples.moe.replay_experts import replay, router_choices
from rollway.demo.grpo import token_logprobs
from rollway.http import Http
from rollway.integrations.prime_rl.inference import InferenceConfig, make_stack
from rollway.rollout.experts import RoutedExperts, decode, join
from tests.stack import interpreted
from tests.stack.moe import build_moe
from tests.stack.served import Served
from tests.stack.stacks import VLLM_ARGS

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("ROLLWAY_TEST_ROUTED_EXPERTS") != "1",
        reason="installs 1 GB of Triton into the cache; ROLLWAY_TEST_ROUTED_EXPERTS=1 runs it",
    ),
]

EXPERTS = 8
PROMPT = [5, 6, 7, 8, 9, 10]
LONG_PROMPT = [20 + position % 50 for position in range(80)]  # more than two blocks of 32


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts-home")


@pytest.fixture(scope="module")
def stack(home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    try:
        env = interpreted.environment()
    except interpreted.NoTriton as error:
        pytest.skip(f"Triton cannot be installed here: {error}")
    # As prime-rl's router replay asks for it: what its config becomes must start.
    vllm = {"model": str(build_moe(base_model, home / "moe")), "served_model_name": "moe",
            "dtype": "float32", "enable_return_routed_experts": True}  # fmt: skip
    (model,) = make_stack(InferenceConfig({"vllm": vllm}))["models"]
    model["args"] |= {**VLLM_ARGS, "max-model-len": 512}
    model["env"] = env | model["env"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(home))
        opening = rollway.up({"name": "experts", "models": [model]})
        stack = opening.__enter__()
    yield stack
    opening.__exit__(None, None, None)


@pytest.fixture(scope="module")
def model(stack: rollway.Stack, home: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(home / "moe", dtype=torch.float32).eval()


def _post(stack: rollway.Stack, route: str, body: dict[str, Any]) -> Any:
    async def post() -> Any:
        async with Http() as http:
            return await http.post(f"{stack.frontend_url}{route}", body, timeout=120.0)

    return asyncio.run(post())


def _complete(stack: rollway.Stack, prompt: list[int], tokens: int, *fields: str) -> Any:
    body = {
        "model": "moe",
        "prompt": "-",
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 3,
        "logprobs": 0,
        "ignore_eos": True,
        "nvext": {"token_data": prompt, "extra_fields": ["completion_token_ids", *fields]},
    }
    return _post(stack, "/v1/completions", body)


def _generate(stack: rollway.Stack, prompt: list[int], tokens: int, start: int) -> Any:
    sampling = {"max_tokens": tokens, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    sampling["routed_experts_prompt_start"] = start
    body = {"model": "moe", "token_ids": prompt, "sampling_params": sampling}
    return _post(stack, "/inference/v1/generate", body)["choices"][0]


def _same(left: RoutedExperts, right: RoutedExperts) -> bool:
    """Equal in every row and layer, as sets: the order within a row says nothing."""
    return np.array_equal(np.sort(left.ids, axis=-1), np.sort(right.ids, axis=-1))


@pytest.mark.parametrize("count", [1, 4, 24])
def test_the_engine_reports_what_the_router_picks(
    stack: rollway.Stack, model: torch.nn.Module, count: int
) -> None:
    nvext = _complete(stack, PROMPT, count, "engine_data", "routed_experts")["nvext"]
    raw, ids = nvext["routed_experts"], nvext["completion_token_ids"]
    print(f"{len(PROMPT)} + {len(ids)} tokens: { {**raw, 'data': raw['data'][:12] + '…'} }")
    assert nvext["engine_data"]["routed_experts"] == raw
    tokens = PROMPT + ids
    # No forward ran on the last token, so it has no row.
    assert raw["shape"] == [len(tokens) - 1, 2, 2]
    assert (raw["start"], raw["dtype"]) == (0, "uint8")
    routed = decode(raw, experts=EXPERTS)
    routed.check(len(tokens), EXPERTS)
    assert _same(routed, router_choices(model, tokens[:-1]))
    assert routed.as_json() == raw


def test_rows_of_a_cached_prefix_are_included(stack: rollway.Stack, model: torch.nn.Module) -> None:
    for expected in (0, 64):
        answer = _complete(stack, LONG_PROMPT, 3, "routed_experts")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        tokens = LONG_PROMPT + answer["nvext"]["completion_token_ids"]
        routed = decode(answer["nvext"]["routed_experts"], experts=EXPERTS)
        routed.check(len(tokens), EXPERTS)
        assert _same(routed, router_choices(model, tokens[:-1]))


def test_a_start_is_honoured_and_parts_join(stack: rollway.Stack) -> None:
    whole = decode(_generate(stack, PROMPT, 4, 0)["routed_experts"], experts=EXPERTS)
    for start in (3, len(PROMPT) - 1):
        part = decode(_generate(stack, PROMPT, 4, start)["routed_experts"], experts=EXPERTS)
        assert (part.start, part.end) == (start, whole.end)
        head = RoutedExperts(whole.ids[:start])
        assert np.array_equal(join(head, part).ids, whole.ids)


def test_replayed_routing_keeps_a_trainer_with_the_engine(
    stack: rollway.Stack, model: torch.nn.Module
) -> None:
    """Also when its router has moved: the experts stay those that sampled."""
    answer = _complete(stack, PROMPT, 400, "routed_experts")
    ids = answer["nvext"]["completion_token_ids"]
    routed = decode(answer["nvext"]["routed_experts"], experts=EXPERTS)
    engine = answer["choices"][0]["logprobs"]["token_logprobs"]
    with torch.no_grad(), replay(model, routed):
        same = mismatch(token_logprobs(model, [PROMPT], [ids]), engine)
    print(f"k3 with equal weights {same.k3:.1e}, largest difference {same.max_abs:.1e}")
    assert same.k3 < 1e-8

    generator = torch.Generator().manual_seed(0)
    model = deepcopy(model)  # others use it
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight += 0.01 * weight.std() * torch.randn(weight.shape, generator=generator)
        own = mismatch(token_logprobs(model, [PROMPT], [ids]), engine)
        with replay(model, routed):
            replayed = mismatch(token_logprobs(model, [PROMPT], [ids]), engine)
    print(f"k3 with another router {own.k3:.1e}, replayed {replayed.k3:.1e}")
    assert replayed.k3 < own.k3 / 10


def test_the_gateway_records_experts_turn_by_turn(
    stack: rollway.Stack, model: torch.nn.Module, home: Path, tmp_path: Path
) -> None:
    served = Served(stack, tmp_path / "gateway.sqlite", {"ROLLWAY_HOME": str(home)}, "experts")
    served.start("--routed-experts", "--bundle", "always")
    client, messages = served.client("agent"), list[Any]()
    for word in ("one", "two", "three"):
        messages.append({"role": "user", "content": word})
        answer = client.chat.completions.create(model="moe", messages=messages, max_tokens=12)
        message = answer.choices[0].message
        assert decode((message.model_extra or {})["routed_experts"]).start == 0
        messages.append({"role": "assistant", "content": message.content})
    messages[-1:] = []  # another answer to the last question: a fork
    client.chat.completions.create(model="moe", messages=messages, max_tokens=12)
    served.end(kill=True)
    served.start("--routed-experts")  # from the journal
    first, second = served.trajectories("agent")
    served.end()
    for sequence in (first, second):
        assert sequence.routed_experts is not None
        sequence.routed_experts.check(len(sequence.token_ids), EXPERTS)
        assert _same(sequence.routed_experts, router_choices(model, sequence.token_ids[:-1]))
