"""What `renderers` sends and reads: checked requests, strict replies, experts, teachers."""

from __future__ import annotations

import base64
import io
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollway.errors import RolloutError, UsageError
from rollway.gateway.replies import explain, make_refusal
from rollway.integrations.prime_rl.generate import (
    FLOOR,
    GenerateRequest,
    Generator,
    make_prompt_logprobs,
    make_reply,
)
from rollway.rollout.client import Rollouts
from rollway.rollout.completion import Completion
from rollway.rollout.experts import RoutedExperts
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Teacher
from rollway.rollout.trajectory import Rollout, Span, Trajectory
from rollway.rollout.wire import COMPLETIONS

BODY: dict[str, Any] = {
    "model": "m",
    "token_ids": [4, 5, 6],
    "sampling_params": {
        "temperature": 0.7, "top_p": 1.0, "max_tokens": 4, "top_k": -1, "min_p": 0.0,
        "return_token_ids": True, "logprobs": 1, "stop_token_ids": [9, 9, 1],
        "skip_special_tokens": False, "routed_experts_prompt_start": 2,
    },
    "cache_salt": "7",
}  # fmt: skip


def make_rollout(**more: Any) -> Rollout:
    fields: dict[str, Any] = {
        "prompt_ids": [4, 5, 6], "token_ids": [7, 8], "logprobs": [-0.5, -0.25],
        "finish_reason": "length", "spans": (Span(0, 1, 3, 11), Span(1, 2, 4, 11)),
        "cached_tokens": 2,
    }  # fmt: skip
    return Rollout(**{**fields, **more})


class FakeRollouts:
    def __init__(self, *answers: Rollout) -> None:
        self.answers, self.calls = list(answers), 0

    async def generate(self, *_: Any, **options: Any) -> list[Rollout]:
        self.calls += 1
        self.options = options
        return [self.answers.pop(0)]


def test_a_salt_among_the_sampling_parameters_counts() -> None:
    """verifiers of August 2026 sends it there; refused, no episode would have an output."""
    body = {**BODY, "sampling_params": {**BODY["sampling_params"], "cache_salt": "6"}}
    assert GenerateRequest.read(body, 100).salt == "7"
    del body["cache_salt"]
    assert GenerateRequest.read(body, 100).salt == "6"


def test_the_captured_request_is_read() -> None:
    request = GenerateRequest.read(BODY, 100)
    assert request.prompt == [4, 5, 6] and request.salt == "7" and request.experts_start == 2
    assert request.sampling == Sampling(
        max_tokens=4, temperature=0.7, stop_token_ids=(9, 1), logprobs=True
    )
    assert not request.wants_prompt_logprobs
    # What is left out is what the context holds, and no log-probs.
    short = GenerateRequest.read({"token_ids": [1, 2]}, 100)
    assert short.sampling.max_tokens == 98 and not short.sampling.logprobs
    assert GenerateRequest.read({**BODY, "sampling_params": {"max_tokens": 999}}, 100)


def test_the_reply_names_every_token_and_version() -> None:
    request = GenerateRequest.read(BODY, 100)
    reply = make_reply(request, make_rollout())
    (choice,) = reply["choices"]
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:7", "logprob": -0.5},
        {"token": "token_id:8", "logprob": -0.25},
    ]
    assert reply["spans"] == [[0, 1, 3], [1, 2, 4]] and reply["weight_version"] == 3
    assert reply["prompt_logprobs"] is None and reply["usage"]["total_tokens"] == 5
    assert "routed_experts" not in choice
    aborted = make_reply(request, make_rollout(finish_reason="aborted"))
    assert aborted["choices"][0]["finish_reason"] == "abort"


async def test_a_floored_log_prob_is_sampled_again_and_never_passed_on() -> None:
    """By the client that `renderers` has: it repeats what failed with a 5xx."""
    request = GenerateRequest.read(BODY, 100)
    floored = make_rollout(logprobs=[-0.5, FLOOR])
    rollouts = FakeRollouts(floored, floored, make_rollout())
    generator = Generator(cast(Rollouts, rollouts), cast(Teacher, None))
    with pytest.raises(RolloutError, match="no log-prob for a token"):
        await generator.answer(request, "")

    async def answer(_: web.Request) -> web.Response:
        try:
            return web.json_response(await generator.answer(request, "trace"))
        except RolloutError as error:
            return make_refusal(error, explain(error))

    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    async with TestServer(app) as server, openai.AsyncOpenAI(api_key="k") as client:
        url = str(server.make_url("/inference/v1/generate"))
        raw = await client.post(url, cast_to=httpx.Response, body=BODY)
    (choice,) = raw.json()["choices"]
    assert choice["logprobs"]["content"][1]["logprob"] == -0.25
    assert rollouts.calls == 3 and rollouts.options == {"group": "trace", "salt": "7"}


def test_a_teacher_gets_the_prompts_own_token_alone() -> None:
    """prime-rl takes the first entry of a position, whichever token it is of."""
    shown = make_prompt_logprobs([4, 5, 6], [None, -1.0, -2.0])
    assert shown == [None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}}]
    assert make_prompt_logprobs([4], None) is None
    body = {**BODY, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    assert GenerateRequest.read(body, 100).wants_prompt_logprobs


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (512, "uint16"), (70_000, "int32")])
def test_experts_have_the_dtype_of_the_model_and_begin_where_asked(
    experts: int, dtype: str
) -> None:
    ids = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(np.int32)
    rollout = make_rollout(routed_experts=RoutedExperts(ids))
    request = GenerateRequest.read(BODY, 100, routed_experts=True)
    reply = make_reply(request, rollout, experts=experts)
    routed = reply["choices"][0]["routed_experts"]
    assert list(routed) == ["data", "shape", "start", "dtype"]
    assert (routed["shape"], routed["start"], routed["dtype"]) == ([2, 2, 2], 2, dtype)
    raw = np.frombuffer(base64.b64decode(routed["data"]), dtype=dtype).reshape(2, 2, 2)
    assert (raw == ids[2:]).all()
    # renderers cuts the data out of the bytes by this prefix, without decoding it.
    assert b'"routed_experts":{"data":"' in msgspec.json.encode(reply)


def test_an_engines_npy_string_becomes_what_clients_read() -> None:
    ids = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    file = io.BytesIO()
    np.save(file, ids)
    raw = base64.b64encode(file.getvalue()).decode()
    request = GenerateRequest.read(BODY, 100, routed_experts=True)
    trajectory = Trajectory([4, 5, 6], request.sampling)
    trajectory.add(Completion([7, 8], [-0.5, -0.25], "length", 11, 0, raw), 3)
    reply = make_reply(request, trajectory.rollout("length", 3), experts=16)
    routed = reply["choices"][0]["routed_experts"]
    assert base64.b64decode(routed["data"]) == ids[2:].tobytes() and routed["start"] == 2


@pytest.mark.parametrize("ids", [np.zeros((4, 2, 2)), np.ones((4, 2, 2))])
def test_experts_that_were_not_captured_are_an_error(ids: Any) -> None:
    rollout = make_rollout(routed_experts=RoutedExperts(ids.astype(np.uint8)))
    request = GenerateRequest.read(BODY, 100, routed_experts=True)
    with pytest.raises(RolloutError, match="captured"):
        make_reply(request, rollout, experts=8)
    with pytest.raises(RolloutError, match="no routed experts"):
        make_reply(request, make_rollout(), experts=8)


def test_sampling_masks_are_joined_over_a_cut_or_left_out() -> None:
    request = GenerateRequest.read(BODY, 100)
    for second, wanted in (([[8, 9]], [[7], [8, 9]]), (None, None)):
        trajectory = Trajectory([4, 5, 6], request.sampling)
        legs = ([7], [[7]], "aborted"), ([8], second, "length")
        for ids, mask, reason in legs:
            raw = {
                "choices": [{"logprobs": {"token_logprobs": [-0.5]}, "finish_reason": reason}],
                "nvext": {"completion_token_ids": ids, "engine_data": {"sampling_mask": mask}},
            }
            assembly = COMPLETIONS.assembly(request.sampling, 3)
            assembly.add(raw)
            trajectory.add(assembly.finish(), 3)
        (choice,) = make_reply(request, trajectory.rollout("length", 3))["choices"]
        assert choice.get("sampling_mask") == wanted


def test_a_start_beyond_the_prompt_is_refused() -> None:
    for start in (4, -1, "2", True):
        params = {"routed_experts_prompt_start": start}
        with pytest.raises(UsageError, match="routed_experts_prompt_start"):
            GenerateRequest.read({**BODY, "sampling_params": params}, 100)
