"""Agents that speak the OpenAI API only, and the exact trajectories that a trainer fetches."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import goes to the network
import openai
import pytest

import rollway
from tests.stack.policies import Policy
from tests.stack.served import Served, check
from tests.stack.tool_model import TOOL

pytestmark = pytest.mark.stack

Ask = Callable[[list[Any]], Any]


@pytest.fixture(scope="module")
def served(
    tool_stack: rollway.Stack, session_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    journal = tmp_path_factory.mktemp("gateway") / "gateway.sqlite"
    gateway = Served(tool_stack, journal, {"ROLLWAY_HOME": str(session_home)})
    gateway.start()
    yield gateway
    gateway.end()


@pytest.fixture(scope="module")
def policy(tool_model: Path) -> Policy:
    return Policy(tool_model)


def exchange(ask: Ask, rounds: int = 3) -> list[Any]:
    """An agent: ask for sums, run the tool when it is called, tell the result."""
    messages: list[Any] = []
    for number in range(rounds):
        messages.append({"role": "user", "content": f"add {number} {number + 1}"})
        for _ in range(2):
            message = ask(messages)
            messages.append(message)
            calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
            if not calls:
                break
            function = calls[0]["function"] if isinstance(calls[0], dict) else calls[0].function
            arguments = json.loads(
                function["arguments"] if isinstance(function, dict) else function.arguments
            )
            number_called = calls[0]["id"] if isinstance(calls[0], dict) else calls[0].id
            total = sum(value for value in arguments.values() if isinstance(value, int))
            result = {"role": "tool", "content": str(total), "tool_call_id": number_called}
            messages.append(result)
    return messages


def test_the_openai_client_and_its_tools(served: Served, policy: Policy) -> None:
    client: Any = None

    def ask(messages: list[Any]) -> Any:
        answer = client.chat.completions.create(
            model="caller",
            messages=messages,
            tools=[TOOL],
            max_tokens=100,  # type: ignore[list-item]
        )
        return answer.choices[0].message

    # The policy samples: some sessions have no call that can be read.
    for name in (f"agent-1-{number}" for number in range(5)):
        client = served.client(name)
        messages = exchange(ask)
        if any(getattr(message, "tool_calls", None) for message in messages):
            break
    else:
        raise AssertionError("no tool was called in five sessions")
    (sequence,) = served.trajectories(name)
    turns = sum(1 for message in messages if not isinstance(message, dict))
    assert len(sequence.spans) == turns and sequence.forked_from is None
    check(sequence, served.stack, policy)


def test_litellm_and_its_tools(served: Served, policy: Policy) -> None:
    import litellm  # takes seconds

    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(
            model="openai/caller", base_url=served.url, api_key="agent-2", messages=messages,
            tools=[TOOL], max_tokens=100,
        )  # fmt: skip
        return answer.choices[0].message.model_dump()

    messages = exchange(ask)
    (sequence,) = served.trajectories("agent-2")
    turns = sum(1 for message in messages if message["role"] == "assistant")
    assert len(sequence.spans) == turns and sequence.forked_from is None
    check(sequence, served.stack, policy)


def test_langchain_and_its_tools(served: Served, policy: Policy) -> None:
    """A LangChain agent's loop: its own messages, its own tool calls."""
    from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def session(name: str) -> tuple[int, int]:
        model = ChatOpenAI(
            model="caller", base_url=served.url, api_key=name, max_tokens=100, max_retries=0
        ).bind_tools([TOOL])  # type: ignore[arg-type]
        messages: list[AnyMessage] = []
        turns = called = 0
        for number in range(3):
            messages.append(HumanMessage(f"add {number} {number + 1}"))
            for _ in range(2):
                message, turns = model.invoke(messages), turns + 1
                messages.append(message)
                for call in message.tool_calls:
                    total = sum(value for value in call["args"].values() if isinstance(value, int))
                    messages.append(ToolMessage(str(total), tool_call_id=call["id"]))
                    called += 1
                if not message.tool_calls:
                    break
        return turns, called

    for name in (f"agent-lc-{number}" for number in range(5)):
        turns, called = session(name)
        if called:
            break
    (sequence,) = served.trajectories(name)
    assert called and len(sequence.spans) == turns and sequence.forked_from is None
    check(sequence, served.stack, policy)


def test_a_streamed_exchange_is_recorded_as_well(served: Served, policy: Policy) -> None:
    client = served.client("agent-3")

    def ask(messages: list[Any]) -> Any:
        content, calls = "", {}
        for chunk in client.chat.completions.create(
            model="caller",
            messages=messages,
            tools=[TOOL],
            max_tokens=100,
            stream=True,  # type: ignore[list-item]
        ):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    joined = calls.setdefault(
                        call.index,
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": "", "arguments": ""},
                        },
                    )
                    assert call.function is not None
                    joined["function"]["name"] += call.function.name or ""
                    joined["function"]["arguments"] += call.function.arguments or ""
        return {"role": "assistant", "content": content, "tool_calls": list(calls.values())}

    messages = exchange(ask)
    (sequence,) = served.trajectories("agent-3")
    assert len(sequence.spans) == sum(1 for m in messages if m["role"] == "assistant")
    check(sequence, served.stack, policy)


def test_sessions_survive_a_killed_gateway(served: Served, policy: Policy) -> None:
    messages: list[Any] = [{"role": "user", "content": "add 1 2"}]

    def ask() -> None:
        answer = served.client("agent-4").chat.completions.create(
            model="caller", messages=messages, max_tokens=60
        )
        messages.append(answer.choices[0].message.model_dump())
        messages.append({"role": "user", "content": "add 2 2"})

    ask()
    before = served.trajectories("agent-4")
    served.end(kill=True)
    served.start()
    assert served.trajectories("agent-4") == before
    ask()
    (sequence,) = served.trajectories("agent-4")
    assert sequence.token_ids[: len(before[0].token_ids)] == before[0].token_ids
    check(sequence, served.stack, policy)


def test_the_engine_receives_the_ids_that_a_client_sends(served: Served) -> None:
    """As NeMo-Gym does, with no session of ours."""
    client = served.client("EMPTY")
    tokens = {"extra_body": {"return_token_ids": True}}
    messages: list[Any] = [{"role": "user", "content": "add 1 2"}]
    first = (
        client.chat.completions.create(
            model="caller", messages=messages, max_tokens=60, logprobs=True, **tokens
        )
        .choices[0]
        .message
    )
    extra = first.model_extra or {}
    ids = extra["prompt_token_ids"] + extra["generation_token_ids"]
    assert len(extra["generation_log_probs"]) == len(extra["generation_token_ids"])
    messages += [first.model_dump(), {"role": "user", "content": "add 2 2"}]
    second = (
        client.chat.completions.create(model="caller", messages=messages, max_tokens=60, **tokens)
        .choices[0]
        .message
    )
    assert (second.model_extra or {})["prompt_token_ids"][: len(ids)] == ids

    plain = [
        {k: v for k, v in m.items() if k in ("role", "content", "tool_calls")} for m in messages
    ]
    body = {"messages": plain, "required_prefix_token_ids": ids}
    request = urllib.request.Request(
        served.url.removesuffix("/v1") + "/tokenize",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        reply = json.load(answer)
    assert reply["tokens"] == (second.model_extra or {})["prompt_token_ids"]
    assert reply["max_model_len"] == 2048


def test_wrong_requests_are_explained(served: Served) -> None:
    client = served.client("agent-5")
    with pytest.raises(openai.BadRequestError, match="context length is 2048"):
        client.chat.completions.create(
            model="caller", messages=[{"role": "user", "content": "1 " * 3000}]
        )
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        client.chat.completions.create(model="caller", messages=[])
    with pytest.raises(openai.BadRequestError, match="has only"):
        client.chat.completions.create(
            model="caller",
            messages=[{"role": "assistant", "content": "", "prompt_token_ids": [1]}],  # type: ignore[list-item]
        )
    (model,) = client.models.list().data
    assert (model.model_extra or {})["max_model_len"] == 2048
    answer = client.chat.completions.create(
        model="caller", messages=[{"role": "user", "content": "add 1 1"}], max_tokens=5000, n=2,
        extra_body={"priority": 1, "spaces_between_special_tokens": False},
    )  # fmt: skip
    assert len(answer.choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_frontend_is_a_400(served: Served, stream: bool) -> None:
    client = served.client("agent-7")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="caller", messages=[{"role": "user", "content": "add 1 1"}], max_tokens=5,
            stream=stream, temperature=-5.0,
        )  # fmt: skip
    assert "temperature" in str(refused.value).lower() and "://" not in str(refused.value)


def test_text_completions_are_exact_too(served: Served, policy: Policy) -> None:
    client = served.client("agent-6")
    whole = client.completions.create(
        model="caller", prompt=[[1, 2, 3], [4, 5, 6]], max_tokens=8, extra_body={"ignore_eos": True}
    )
    parts = client.completions.create(
        model="caller", prompt="the stone", max_tokens=8, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    last = list(parts)[-1].choices[0].model_extra or {}
    assert len(whole.choices) == 2 and len(last["generation_token_ids"]) == 8
    sequences = served.trajectories("agent-6")
    assert [len(sequence.spans) for sequence in sequences] == [1, 1, 1]
    assert sequences[2].token_ids == last["prompt_token_ids"] + last["generation_token_ids"]
    for sequence in sequences:
        check(sequence, served.stack, policy)


def test_with_tokens_other_clients_are_refused(tool_stack: rollway.Stack, tmp_path: Path) -> None:
    tokens = {"ROLLWAY_GATEWAY_TOKENS": "secret", "ROLLWAY_GATEWAY_OPERATOR_TOKENS": "boss"}
    gateway = Served(tool_stack, tmp_path / "j.jsonl", tokens)
    gateway.start()
    try:
        with pytest.raises(openai.AuthenticationError):
            gateway.client("guess").models.list()
        assert gateway.client("secret").models.list().data
        gateway.client("secret/mine").chat.completions.create(
            model="caller", messages=[{"role": "user", "content": "add 1 1"}], max_tokens=5
        )
        assert gateway.get("/rollway/sessions", "secret")["sessions"] == {"mine": 1}
        (name,) = gateway.get("/rollway/sessions", "boss")["sessions"]
        assert name.endswith("/mine") and "secret" not in name
        assert gateway.get(f"/rollway/trajectories/{name}", "boss")["turns"] == 1
    finally:
        gateway.end()
