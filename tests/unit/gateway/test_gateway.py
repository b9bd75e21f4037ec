"""How the gateway matches requests to sampled turns, and records them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollway.errors import RolloutError, UsageError
from rollway.gateway.messages import chain, find_sent_prefix, link, remove_bundle
from rollway.gateway.replies import StreamedMessage, convert_chunk
from rollway.gateway.store import SessionStore
from rollway.gateway.template import TurnCounts, _end_of_turn
from rollway.gateway.turns import PendingTurn, Session, Turn
from rollway.rollout.completion import Completion
from rollway.rollout.experts import RoutedExperts
from tests.awkward_tokenizer import TURN_END, make

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b":2}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]


def make_turn(session: str, history: str, new: list[int], ids: list[int], **more: Any) -> Turn:
    return Turn(
        session=session,
        model="m",
        history=history,
        new_ids=new,
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        finish_reason="stop",
        version=more.pop("version", 0),
        worker_id=2**63 + 5,
        **more,
    )


def test_histories_with_the_same_content_have_the_same_chain() -> None:
    """Clients drop fields, add nulls, rewrite arguments and split text into parts."""
    function = {"name": "add", "arguments": '{"b": 2, "a": 1}'}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": function}],
            "refusal": None, "function_call": None, "reasoning_content": "hm"}  # fmt: skip
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
    }
    assert chain([parts, reply, HISTORY[2]]) == chain(HISTORY)
    for other in (
        [{"role": "user", "content": "ho"}, *HISTORY[1:]],
        [HISTORY[0], {"role": "assistant", "content": "3"}, HISTORY[2]],
        [*HISTORY[:2], {**HISTORY[2], "content": "4"}],
    ):
        assert chain(other)[-1] != chain(HISTORY)[-1]
    assert link(chain(HISTORY)[1], HISTORY[2]) == chain(HISTORY)[2]


def test_token_ids_from_the_client_take_precedence() -> None:
    message = {**HISTORY[1], "prompt_token_ids": [1, 2], "generation_token_ids": [3]}
    prefix = find_sent_prefix({}, [HISTORY[0], message, HISTORY[2]], 100)
    assert prefix is not None and (prefix.token_ids, prefix.messages) == ([1, 2, 3], 2)
    prefix = find_sent_prefix({"required_prefix_token_ids": [7]}, HISTORY, 100)
    assert prefix is not None and (prefix.token_ids, prefix.messages) == ([7], 2)
    assert find_sent_prefix({}, HISTORY, 100) is None
    assert "prompt_token_ids" not in remove_bundle([message])[0]
    for wrong in ([1.5], "12", [True], [-1]):
        with pytest.raises(UsageError, match="list of token ids"):
            find_sent_prefix({"required_prefix_token_ids": wrong}, HISTORY, 100)
    with pytest.raises(UsageError, match="needs an assistant"):
        find_sent_prefix({"required_prefix_token_ids": [1]}, HISTORY[:1], 100)


def test_tokens_shared_by_two_trajectories_are_trained_on_once() -> None:
    session = Session()
    session.add(make_turn("s", "a", [1, 2], [3, 4], id="1"))
    session.add(make_turn("s", "b", [5], [6], parent="1"))
    session.add(make_turn("s", "c", [5], [7, 8], parent="1", version=1))
    first, second = session.trajectories()
    assert first.token_ids == [1, 2, 3, 4, 5, 6] and first.loss_mask == [0, 0, 1, 1, 0, 1]
    assert second.token_ids == [1, 2, 3, 4, 5, 7, 8]
    assert second.loss_mask == [0, 0, 0, 0, 0, 1, 1]
    assert second.forked_from is not None and second.forked_from.sequence == 0
    assert [span.version for span in second.spans] == [1]
    assert list(session.trajectories(1)) == [second]
    assert session.count_trajectories() == 2
    assert session.latest(["x", "a", "y"]) == ("1", 2) and session.latest(["x"]) is None


def test_a_turn_whose_experts_were_not_captured_is_refused() -> None:
    zeros = RoutedExperts(np.zeros((3, 2, 2), dtype=np.uint8)).as_json()
    answer = Completion([3, 4], [-1.0, -1.0], "stop", 7, 0, routed_experts=zeros)
    with pytest.raises(RolloutError, match=r"all 0: nothing was captured.*moe-backend: triton"):
        PendingTurn("m", Session("s"), "h", [1, 2], with_experts=True).complete(answer, 0, None)


async def test_every_turn_keeps_the_experts_that_it_adds(tmp_path: Path) -> None:
    """The record of a turn begins where the record of its parent ends (two layers, top-1)."""

    def encode_experts(start: int, end: int) -> dict[str, Any]:
        rows = [[[position], [position + 1]] for position in range(start, end)]
        return RoutedExperts(np.array(rows, dtype=np.uint8), start).as_json()

    store = SessionStore(tmp_path / "gateway.sqlite")
    session = await store.open("s")
    await store.record(
        session, [make_turn("s", "a", [1, 2], [3, 4], id="1", routed_experts=encode_experts(0, 3))]
    )
    await store.record(
        session, [make_turn("s", "b", [5], [6], parent="1", routed_experts=encode_experts(3, 5))]
    )
    await store.record(
        session, [make_turn("s", "c", [5], [7, 8], parent="1", routed_experts=encode_experts(3, 6))]
    )
    store.close()
    again = SessionStore(tmp_path / "gateway.sqlite")
    session = await again.open("s")
    again.close()
    for sequence in session.trajectories():
        assert sequence.routed_experts is not None
        assert sequence.routed_experts.as_json() == encode_experts(0, len(sequence.token_ids) - 1)
    assert (
        session.find_experts_end(session.turns[1].id) == 5 and session.find_experts_end(None) == 0
    )


def test_the_error_names_an_unusable_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        SessionStore(tmp_path / "file" / "gateway.sqlite")
    store = SessionStore(tmp_path / "gateway.sqlite")
    with pytest.raises(UsageError, match="Another gateway uses"):
        SessionStore(tmp_path / "gateway.sqlite")
    store.close()


def test_streamed_deltas_add_up_to_the_whole_message() -> None:
    streamed = StreamedMessage()
    for delta in (
        {"role": "assistant", "content": None},
        {
            "tool_calls": [
                {"index": 0, "id": "1", "function": {"name": "add", "arguments": '{"a":'}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": ' 1, "b": 2}'}}]},
    ):
        streamed.add({"choices": [{"delta": delta}]})
    assert link("", streamed.message()) == link("", HISTORY[1])
    plain = convert_chunk(
        {"choices": [{"delta": {}, "logprobs": {"content": []}}], "nvext": {"a": 1}}, {}
    )
    assert plain == {"choices": [{"delta": {}, "logprobs": None}]}
    assert convert_chunk({"choices": [], "usage": {}}, {}) is None


def test_the_end_of_turn_token_is_detected() -> None:
    tokenizer = make()
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    assert _end_of_turn(tokenizer) == end
    tokenizer.eos_token = "<|endoftext|>"  # a token that the template does not use
    assert _end_of_turn(tokenizer) == end
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert _end_of_turn(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UsageError, match="cannot be used"):
        _end_of_turn(tokenizer)


def test_turn_counts_are_cached_and_bounded() -> None:
    counts = TurnCounts(most=3)
    prompts = [([{"role": "user", "content": str(number)}], None, {}) for number in range(4)]
    for number, prompt in enumerate(prompts):
        assert counts.get(prompt) is None
        counts.put(prompt, number)
        assert counts.get(prompt) == number
    assert counts.get(prompts[0]) is None and counts.get(prompts[3]) == 3
    assert counts.get((prompts[3][0], [], {})) is None
