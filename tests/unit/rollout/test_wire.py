"""Reading answers: what adds up is returned exactly, everything else is a typed error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RolloutError, UsageError
from rollway.rollout.client import check_prompt
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request
from tests.unit.rollout.headers import JSON

BIG = 16989007820598424518  # an instance id as Dynamo gives them: above 2^53


def answer(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "choices": [{"logprobs": {"token_logprobs": [-0.5, -1.25]}, "finish_reason": "length"}],
        "nvext": {
            "completion_token_ids": [7, 8],
            "worker_id": {"decode_worker_id": BIG},
            "detailed_finish_reason": "length",
        },
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    body.update(changes)
    return body


def read(body: Any, sampling: Sampling | None = None) -> Any:
    assembly = DynamoAssembly(sampling or Sampling(max_tokens=2), prompt_length=3)
    assembly.add(body)
    return assembly.finish()


def test_a_whole_answer() -> None:
    completion = read(answer())
    assert completion.token_ids == [7, 8]
    assert completion.logprobs == [-0.5, -1.25]
    assert completion.finish_reason == "length"
    assert completion.worker_id == BIG
    assert completion.cached_tokens == 1


def test_chunks_add_up_to_the_same() -> None:
    assembly = DynamoAssembly(Sampling(max_tokens=2), prompt_length=3)
    whole = answer()
    for position in range(2):
        chunk = copy.deepcopy(whole)
        chunk["nvext"]["completion_token_ids"] = [[7], [8]][position]
        chunk["choices"][0]["logprobs"]["token_logprobs"] = [[-0.5], [-1.25]][position]
        if position == 0:
            chunk["choices"][0].pop("finish_reason")
            chunk["nvext"].pop("detailed_finish_reason")
            chunk["usage"] = None
        assert assembly.add(chunk) == [[7], [8]][position]
    assert assembly.finish() == read(whole)


def test_an_abort_is_not_a_stop() -> None:
    body = answer()
    body["choices"][0]["finish_reason"] = "stop"
    body["nvext"]["detailed_finish_reason"] = "cancelled"
    assert read(body).finish_reason == "aborted"
    body["nvext"]["detailed_finish_reason"] = "stop"
    assert read(body).finish_reason == "stop"


def _without(path: str) -> dict[str, Any]:
    body = answer()
    *parents, last = path.split(".")
    target: Any = body
    for parent in parents:
        target = target[int(parent) if parent.isdigit() else parent]
    del target[last]
    return body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_without("nvext.completion_token_ids"), "no token ids"),
        (_without("choices.0.logprobs"), "0 log-probs"),
        (answer(nvext={"completion_token_ids": [7, 8, 9]}), "counted 2 tokens and sent 3"),
        # Up to 2 more could be what a dead worker had sampled; 3 could not, and fewer never.
        (
            answer(usage={"prompt_tokens": 6, "completion_tokens": 2}),
            "counted 6 prompt tokens, not 3",
        ),
        (
            answer(usage={"prompt_tokens": 2, "completion_tokens": 2}),
            "counted 2 prompt tokens, not 3",
        ),
        (answer(choices=[{}, {}]), "2 choices"),
        (answer(choices="x"), "wrong shape"),
        (answer(nvext={"completion_token_ids": [7.5, 8]}), "wrong shape"),
        (answer(nvext={"completion_token_ids": [7, None]}), "wrong shape"),
        ([], "wrong shape"),
        ({"choices": []}, "finish reason"),
    ],
)
def test_what_does_not_add_up_is_refused(body: Any, words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        read(body)


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf"), 0.5])
def test_a_logprob_that_cannot_be_is_refused(bad: float | None) -> None:
    body = answer()
    body["choices"][0]["logprobs"]["token_logprobs"] = [-0.5, bad]
    with pytest.raises(RolloutError, match="log-prob"):
        read(body)


@given(JSON)
def test_any_json_is_read_or_refused(body: Any) -> None:
    with pytest.raises(RolloutError):
        read(body)


@given(st.data())
def test_any_field_may_be_anything(data: st.DataObject) -> None:
    """One field of a good answer is replaced by arbitrary JSON."""
    body = answer()
    paths = [
        ("choices",), ("choices", 0), ("choices", 0, "logprobs"), ("choices", 0, "finish_reason"),
        ("choices", 0, "logprobs", "token_logprobs"), ("nvext",), ("usage",),
        ("nvext", "completion_token_ids"), ("nvext", "worker_id"), ("usage", "prompt_tokens"),
        ("nvext", "detailed_finish_reason"), ("usage", "completion_tokens"),
    ]  # fmt: skip
    *parents, last = data.draw(st.sampled_from(paths))
    target: Any = body
    for parent in parents:
        target = target[parent]
    target[last] = data.draw(JSON)
    try:
        completion = read(body)
    except RolloutError:
        return
    assert all(type(token) is int for token in completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids)


def test_every_sampling_parameter_is_said() -> None:
    body = completion_request("m", [1, 2], Sampling(max_tokens=5, seed=9).offset_seed(2))
    assert body["nvext"]["token_data"] == [1, 2]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert body["repetition_penalty"] == 1.0
    assert body["seed"] == 11
    assert body["logprobs"] == 0
    assert body["prompt"]  # Dynamo refuses an empty one although token_data is given


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"stop_token_ids": tuple(range(33))},
        {"ignore_eos": True, "stop_token_ids": (1,)},  # Dynamo would ignore both
    ],
)
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)


def test_prompts_become_plain_ints() -> None:
    numpy = pytest.importorskip("numpy")
    assert check_prompt(numpy.array([1, 2])) == [1, 2]
    assert [type(token) for token in check_prompt(numpy.array([1, 2]))] == [int, int]
    for wrong in ([], [-1], [1.5]):
        with pytest.raises(UsageError):
            check_prompt(wrong)
