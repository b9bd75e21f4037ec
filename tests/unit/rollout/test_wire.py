"""Consistent answers are returned exactly; all others raise a typed error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RolloutError, UsageError
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import check_prompt
from rollway.rollout.wire import DynamoAssembly, completion_request
from tests.unit.rollout.headers import JSON

BIG = 16989007820598424518  # Dynamo's instance ids are above 2^53


def make_answer(**changes: Any) -> dict[str, Any]:
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


def read_answer(body: Any, sampling: Sampling | None = None) -> Any:
    assembly = DynamoAssembly(sampling or Sampling(max_tokens=2), prompt_length=3)
    assembly.add(body)
    return assembly.finish()


def test_a_whole_answer_is_read() -> None:
    completion = read_answer(make_answer())
    assert completion.token_ids == [7, 8]
    assert completion.logprobs == [-0.5, -1.25]
    assert completion.finish_reason == "length"
    assert completion.worker_id == BIG
    assert completion.cached_tokens == 1


def test_chunks_are_read_like_the_whole_answer() -> None:
    assembly = DynamoAssembly(Sampling(max_tokens=2), prompt_length=3)
    whole = make_answer()
    for position in range(2):
        chunk = copy.deepcopy(whole)
        chunk["nvext"]["completion_token_ids"] = [[7], [8]][position]
        chunk["choices"][0]["logprobs"]["token_logprobs"] = [[-0.5], [-1.25]][position]
        if position == 0:
            chunk["choices"][0].pop("finish_reason")
            chunk["nvext"].pop("detailed_finish_reason")
            chunk["usage"] = None
        assert assembly.add(chunk) == [[7], [8]][position]
    assert assembly.finish() == read_answer(whole)


def test_a_cancelled_answer_is_reported_as_aborted() -> None:
    body = make_answer()
    body["choices"][0]["finish_reason"] = "stop"
    body["nvext"]["detailed_finish_reason"] = "cancelled"
    assert read_answer(body).finish_reason == "aborted"
    body["nvext"]["detailed_finish_reason"] = "stop"
    assert read_answer(body).finish_reason == "stop"


def _remove_field(path: str) -> dict[str, Any]:
    body = make_answer()
    *parents, last = path.split(".")
    target: Any = body
    for parent in parents:
        target = target[int(parent) if parent.isdigit() else parent]
    del target[last]
    return body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_remove_field("nvext.completion_token_ids"), "no token ids"),
        (_remove_field("choices.0.logprobs"), "0 log-probs"),
        (make_answer(nvext={"completion_token_ids": [7, 8, 9]}), "counted 2 tokens and sent 3"),
        # After a migration, up to 2 tokens of the dead worker count as prompt. 3 are too many,
        # and the count never falls below the length of the prompt.
        (
            make_answer(usage={"prompt_tokens": 6, "completion_tokens": 2}),
            "counted 6 prompt tokens, not 3",
        ),
        (
            make_answer(usage={"prompt_tokens": 2, "completion_tokens": 2}),
            "counted 2 prompt tokens, not 3",
        ),
        (make_answer(choices=[{}, {}]), "2 choices"),
        (make_answer(choices="x"), "wrong shape"),
        (make_answer(nvext={"completion_token_ids": [7.5, 8]}), "wrong shape"),
        (make_answer(nvext={"completion_token_ids": [7, None]}), "wrong shape"),
        ([], "wrong shape"),
        ({"choices": []}, "finish reason"),
    ],
)
def test_inconsistent_answers_are_refused(body: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        read_answer(body)


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf"), 0.5])
def test_impossible_logprobs_are_refused(bad: float | None) -> None:
    body = make_answer()
    body["choices"][0]["logprobs"]["token_logprobs"] = [-0.5, bad]
    with pytest.raises(RolloutError, match="log-prob"):
        read_answer(body)


@given(JSON)
def test_arbitrary_json_is_refused(body: Any) -> None:
    with pytest.raises(RolloutError):
        read_answer(body)


@given(st.data())
def test_an_answer_with_one_arbitrary_field_is_read_or_refused(data: st.DataObject) -> None:
    """Replace one field of a valid answer by arbitrary JSON."""
    body = make_answer()
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
        completion = read_answer(body)
    except RolloutError:
        return
    assert all(type(token) is int for token in completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids)


def test_the_request_sets_every_sampling_parameter() -> None:
    body = completion_request("m", [1, 2], Sampling(max_tokens=5, seed=9).offset_seed(2))
    assert body["nvext"]["token_data"] == [1, 2]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert body["repetition_penalty"] == 1.0
    assert body["seed"] == 11
    assert body["logprobs"] == 0
    assert body["prompt"]  # Dynamo refuses an empty prompt, even with token_data


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"stop_token_ids": tuple(range(33))},
        {"ignore_eos": True, "stop_token_ids": (1,)},  # Dynamo would ignore both settings
    ],
)
def test_invalid_sampling_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)


def test_prompts_become_plain_ints() -> None:
    numpy = pytest.importorskip("numpy")
    assert check_prompt(numpy.array([1, 2])) == [1, 2]
    assert [type(token) for token in check_prompt(numpy.array([1, 2]))] == [int, int]
    assert check_prompt([numpy.int64(1), numpy.uint32(2)]) == [1, 2]
    with pytest.raises(UsageError, match="has no token"):
        check_prompt([])
    for wrong in ([-1], [1.5], [5.0], ["5"], [2**32], numpy.array([5.0])):
        with pytest.raises(UsageError, match=r"not an int from 0 to 2\*\*32 - 1"):
            check_prompt(wrong)
