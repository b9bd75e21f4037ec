"""The gateway for NeMo-Gym: the rules of a recipe, and answers that Gym takes as they are."""

from __future__ import annotations

import asyncio
import base64
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollway.errors import SpecError, UsageError
from rollway.fleet.workers import DnsListing, HealthListing, RlListing, Source, StaticList
from rollway.gateway.messages import check_contiguous
from rollway.gateway.replies import add_bundle
from rollway.gateway.template import Template
from rollway.gateway.tokens import Access
from rollway.gateway.upstream import ChatReply, ChatRequest
from rollway.integrations.nemo_rl.connection import Address
from rollway.integrations.nemo_rl.gym import (
    GymGateway,
    GymServer,
    Profile,
    choose_sampling,
    decode_job,
    encode_job,
    make_job,
    read_chat_template,
    read_profiles,
)
from rollway.rollout.completion import Completion
from rollway.rollout.experts import RoutedExperts
from rollway.versions import Ticket
from tests.awkward_tokenizer import REASONING, build, make
from tests.security.gateway_service import USER, Service, read_error, serve_gateway

ADDRESS = Address("http://127.0.0.1:8000", "m", RlListing("http://127.0.0.1:8001"), 2048)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TRAINING = Profile(1.0, 0.9, -1)
VALIDATION = Profile(0.0, 1.0, -1)
GYM: dict[str, Any] = {
    "kind": GymGateway, "bundle": "always", "exact": True, "expert_strings": True,
    "profiles": (TRAINING, VALIDATION),
}  # fmt: skip


async def say(gateway: Service, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the answered message, after the checks that Gym makes."""
    status, answer = await gateway.chat(messages=messages, **fields)
    assert status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    assert {type(token) for token in message["prompt_token_ids"]} == {int}
    assert {type(token) for token in message["generation_token_ids"]} <= {int}
    assert {type(value) for value in message["generation_log_probs"]} <= {float}
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"])
    return message


async def test_turns_are_contiguous_also_when_cut_and_with_reasoning_dropped(
    tmp_path: Path,
) -> None:
    async with serve_gateway(tmp_path, template=REASONING, **GYM) as gateway:
        messages: list[Any] = [USER]
        seen: list[int] = []
        for limit in (8, 1, 8, 2):
            message = await say(gateway, messages, max_tokens=limit, tools=[TOOL])
            assert seen == message["prompt_token_ids"][: len(seen)]
            seen = message["prompt_token_ids"] + message["generation_token_ids"]
            reasoned = "<think>\nthe wind\n</think>\n\nok"  # a text that the template cuts later
            messages += [{**message, "content": reasoned}, {"role": "user", "content": "and then"}]
        prefix = {"required_prefix_token_ids": seen}
        plain = [{k: v for k, v in m.items() if "token" not in k} for m in messages]
        body = {"messages": plain, "tools": [TOOL], **prefix}
        tokenized = (await gateway.post("/tokenize", body))[1]["tokens"]
        final = await say(gateway, messages, tools=[TOOL])
        assert tokenized == final["prompt_token_ids"] and tokenized[: len(seen)] == seen
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}  # Gym keeps them


@pytest.mark.soak
async def test_five_hundred_rollouts_are_contiguous(tmp_path: Path) -> None:
    """Answers of a scripted frontend; tests/stack/test_nemo_rl_gym.py has those of an engine."""
    kinds: Counter[str] = Counter()

    async def run(gateway: Service, number: int) -> None:
        choice, seen = random.Random(number), list[int]()
        messages: list[Any] = [{"role": "user", "content": f"add {number} {number % 7}"}]
        for _ in range(choice.randint(3, 6)):
            limit = choice.choice((1, 2, 8, 40))
            message = await say(gateway, messages, max_tokens=limit, tools=[TOOL])
            assert seen == message["prompt_token_ids"][: len(seen)]
            seen = message["prompt_token_ids"] + message["generation_token_ids"]
            kinds["cut"] += len(message["generation_token_ids"]) == limit
            if choice.random() < 0.5:
                kinds["reasoned"] += 1
                message = {**message, "content": "<think>\nthe tide\n</think>\n\nok"}
            role = choice.choice(("user", "tool"))
            kinds[role] += 1
            messages += [message, {"role": role, "content": f"{number} and then"}]
            kinds["turns"] += 1
        kinds["rollouts"] += 1

    async with serve_gateway(tmp_path, template=REASONING, **GYM) as gateway:
        for first in range(0, 500, 50):
            await asyncio.gather(*(run(gateway, number) for number in range(first, first + 50)))
    print(dict(kinds))
    assert kinds["rollouts"] == 500 and kinds["turns"] > 1500
    assert min(kinds[name] for name in ("cut", "reasoned", "user", "tool")) > 100


async def test_a_history_that_was_changed_is_refused_with_the_first_token(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, **GYM) as gateway:
        first = await say(gateway, [USER])
        messages = [USER, first, {"role": "user", "content": "go"}]
        second = await say(gateway, messages)
        changed = {**second, "prompt_token_ids": [5, *second["prompt_token_ids"][1:]]}
        messages = [*messages, changed, {"role": "user", "content": "on"}]
        status, answer = await gateway.chat(messages=messages)
        text = read_error(answer)["message"]
        assert status == 400 and "messages[3] do not continue those of messages[1]" in text
        assert "Position 0: expected" in text and "got 5 ('" in text
        # The template of a turn without an end cannot be continued exactly: no silent re-rendering.
    async with serve_gateway(
        tmp_path / "b", template="{{ messages[-1].content }}", **GYM
    ) as gateway:
        status, answer = await gateway.chat(messages=[USER, first, USER])
        assert status == 400 and "end-of-turn" in read_error(answer)["message"]


def test_contiguous_ids_pass() -> None:
    def turn(prompt: list[int], sampled: list[int]) -> dict[str, Any]:
        ids = {"prompt_token_ids": prompt, "generation_token_ids": sampled}
        return {"role": "assistant", **ids}

    check_contiguous(
        [USER, turn([1], [2]), USER, turn([1, 2, 3], []), turn([1, 2, 3], [4])], make()
    )
    with pytest.raises(UsageError, match="no more tokens"):
        check_contiguous([turn([1, 2], [3]), turn([1, 2], [9])], make())


@pytest.mark.parametrize("requested", [{}, {"chat_template_kwargs": {"who": "the request"}}])
async def test_settings_of_the_request_win_over_the_recipes(
    tmp_path: Path, requested: dict[str, Any]
) -> None:
    template = "{{ who }}{{ reasoning_effort }}{{ messages[0].content }}<|im_end|>"
    settings = {"who": "the recipe", "reasoning_effort": "low"}
    async with serve_gateway(tmp_path, template=template, **GYM, settings=settings) as gateway:
        who = requested.get("chat_template_kwargs", settings)["who"]
        for effort in ({}, {"reasoning_effort": "high"}):
            message = await say(gateway, [USER], **requested, **effort)
            expected = f"{who}{effort.get('reasoning_effort', 'low')}hello<|im_end|>"
            assert make().decode(message["prompt_token_ids"]) == expected
            sent = gateway.frontend.bodies[-1]["chat_template_kwargs"]  # for reasoning parsers
            assert sent["who"] == who
            body = {"messages": [USER], **requested, **effort}
            tokenized = (await gateway.post("/tokenize", body))[1]["tokens"]
            assert tokenized == message["prompt_token_ids"]


async def test_tools_are_left_out_when_no_tool_may_be_called(tmp_path: Path) -> None:
    for keep in (False, True):
        template = Template(build(tmp_path / "tokenizer"), keep_tools=keep)
        body = {"tools": [TOOL], "tool_choice": "none"}
        text = make().decode(await template.prompt(body, [USER], None))
        assert ("# Tools" in text) == keep


async def test_requests_sample_as_the_recipe_does(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, **GYM) as gateway:
        await say(gateway, [USER])
        await say(gateway, [USER], temperature=0.0, top_p=1.0, top_k=-1)
        fields = ("temperature", "top_p", "top_k")
        sent = [{name: body[name] for name in fields} for body in gateway.frontend.bodies]
        assert sent == [TRAINING.fields, VALIDATION.fields]
        status, answer = await gateway.chat(temperature=0.7)
        text = read_error(answer)["message"]
        assert status == 400 and "asks for temperature 0.7" in text
        assert "temperature 1, top_p 0.9, top_k -1 for training" in text


def test_profiles_of_a_recipe() -> None:
    assert read_profiles({}) == (Profile(1.0, 1.0, -1),) * 2
    cfg = {"temperature": 0.8, "top_p": 0.9, "top_k": None, "val_temperature": 0.0}
    training, validation = read_profiles(cfg)
    assert training == Profile(0.8, 0.9, -1) and validation == Profile(0.0, 0.9, -1)
    assert choose_sampling({}, (training, validation)) == training.fields
    assert choose_sampling({"temperature": 0}, (training, validation)) == validation.fields
    # A value that only one of both has decides, also alone.
    both = (training, Profile(0.8, 0.9, 20))
    assert choose_sampling({"top_k": 20}, both)["top_k"] == 20


async def test_budgets_end_with_the_context(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, context=64, **GYM) as gateway:
        first = await say(gateway, [USER], max_tokens=5000)
        assert gateway.frontend.bodies[-1]["max_tokens"] == 64 - len(first["prompt_token_ids"])
        second = await say(gateway, [USER, first, USER], max_tokens=5000)
        assert gateway.frontend.bodies[-1]["max_tokens"] == 64 - len(second["prompt_token_ids"])
        status, answer = await gateway.chat(messages=[{"role": "user", "content": "x y " * 99}])
        assert status == 400 and "context length" in read_error(answer)["message"]


async def test_a_missing_frontend_and_a_slow_one_have_nemo_rls_statuses(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, frontend_url="http://127.0.0.1:9", **GYM) as gateway:
        assert (await gateway.chat())[0] == 502
    slow = {"timeout": 0.3, "patience": 0.0}
    async with serve_gateway(tmp_path / "slow", upstream=slow, **GYM) as gateway:
        gateway.frontend.may_answer.clear()
        status, answer = await gateway.chat()
        assert status == 504 and read_error(answer)["type"] == "upstream"


async def test_a_token_in_the_path_opens_the_gateway(tmp_path: Path) -> None:
    """Gym's key is the same everywhere; only the address is the run's own."""
    gym = {"authorization": "Bearer dummy_key"}
    access = Access((b"s3cret",), in_path=True)
    async with serve_gateway(tmp_path, access=access, **GYM) as gateway:
        for path in ("/v1/models", "/wrong/v1/models", "/s3cre/v1/models", "//v1/models"):
            assert (await gateway.get(path, **gym))[0] == 401, path
        assert (await gateway.get("/health"))[0] == 200
        assert (await gateway.get("/s3cret/v1/models", host="10.0.0.5:1", **gym))[0] == 200
        body = {"messages": [USER], "max_tokens": 4}
        for path in ("/v1/chat/completions", "/tokenize", "/v1/tokenize"):
            assert (await gateway.post(path, body, headers=gym))[0] == 401
            assert (await gateway.post(f"/s3cret{path}", body, headers=gym))[0] == 200
        listed = await gateway.get("/s3cret/v1/rollway/sessions", **gym)
        assert listed == (200, {"sessions": {}})


def test_experts_come_as_one_string_with_a_row_for_every_token() -> None:
    ids = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)
    completion = Completion(
        token_ids=[7, 8, 9], logprobs=[-0.5] * 3, finish_reason="stop", worker_id=None,
        cached_tokens=0,
        routed_experts=RoutedExperts(ids).as_json(),
    )  # fmt: skip
    message: dict[str, Any] = {}
    request = ChatRequest({}, prompt_ids=[1, 2], max_tokens=3, session="")
    add_bundle(message, ChatReply(request, {}, completion, Ticket(None, None, None, 0)), True)
    head, _, data = message["routed_experts"].rpartition(":")
    assert head == "nrlre1:int8:5x2x2"
    rows = np.frombuffer(base64.b64decode(data), dtype=np.int8).reshape(5, 2, 2)
    assert (rows[:4] == ids).all() and (rows[4] == -1).all()
    assert RoutedExperts(ids + 200).as_envelope(4).startswith("nrlre1:int16:")


def test_the_job_of_a_recipe(tmp_path: Path) -> None:
    cfg = {
        "model_name": "policy", "temperature": 1.0, "top_p": 1.0, "top_k": None,
        "vllm_cfg": {"max_model_len": 512, "enable_return_routed_experts": True},
        "dynamo_cfg": {
            "request_timeout_s": 60,
            "worker_args": {"exclude_tools_when_tool_choice_none": False},
        },
    }  # fmt: skip
    job = make_job(ADDRESS, cfg, {})
    assert (job.host, job.token, job.tokenizer) == ("127.0.0.1", "", "policy")
    assert (job.most_tokens, job.seconds, job.experts, job.keep_tools) == (512, 60.0, True, True)
    elsewhere = Address("http://192.0.2.1:8000", "m", ADDRESS.listing, 2048, secret="abc")
    job = make_job(elsewhere, cfg, {"name": "other", "chat_template_kwargs": {"a": 1}})
    assert len(job.token) >= 32 and job.tokenizer == "other" and job.settings == {"a": 1}
    assert job.token not in repr(job) and "abc" not in repr(job)
    assert job.seconds < math.inf


def test_templates_of_a_recipe(tmp_path: Path) -> None:
    assert (
        read_chat_template({}) is None and read_chat_template({"chat_template": "Default"}) is None
    )
    template = read_chat_template({"chat_template": None})
    tokenizer = make(template=str(template))
    assert tokenizer.apply_chat_template([USER, USER], tokenize=False) == "hellohello"
    (tmp_path / "a.jinja").write_text("{{ 1 }}")
    assert read_chat_template({"chat_template": str(tmp_path / "a.jinja")}) == "{{ 1 }}"
    with pytest.raises(UsageError, match=r"b\.jinja cannot be read"):
        read_chat_template({"chat_template": str(tmp_path / "b.jinja")})


def test_a_gateway_that_cannot_start_says_why(tmp_path: Path) -> None:
    tokenizer = {"name": str(build(tmp_path)), "chat_template_kwargs": {"tools": []}}
    with pytest.raises(SpecError, match="cannot set tools"):
        GymServer(ADDRESS, {}, tokenizer)


@pytest.mark.parametrize(
    "listing",
    [
        RlListing("http://127.0.0.1:8001", "http://127.0.0.1:8000"),
        HealthListing("http://10.0.0.1:8000", ("ns-a", "ns-b"), 9091),
        DnsListing("pods", (RlListing("http://10.0.0.1:8001"),)),
        StaticList(("http://10.0.0.1:9090",), "m"),
    ],
)
def test_a_job_reaches_the_child_as_it_was(listing: Source) -> None:
    address = Address("http://10.0.0.1:8000", "m", listing, 2048, "secret")
    job = make_job(
        address, {"model_name": "m", "temperature": 0.5}, {"chat_template_kwargs": {"a": [1]}}
    )
    line = encode_job(job)
    assert b"\n" not in line and decode_job(line) == job
