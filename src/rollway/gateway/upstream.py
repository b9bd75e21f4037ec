"""The Dynamo frontend as the gateway uses it: chat and completions with `nvext.token_data`.

The prompt goes as ids, so that nothing tokenizes it again; Dynamo's own parsers read tool calls
and reasoning out of the answer. Fields that Dynamo would refuse are left out. A turn that a refit
cuts is sampled anew from the new weights: each turn is of one policy.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollway.errors import RequestFailed, RolloutError
from rollway.rollout.client import events
from rollway.rollout.completion import Assembly, Completion, Nvext, Usage, only_choice, parse
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import SESSION_HEADER, Attempt, Sender
from rollway.rollout.wire import Wire, completion_request, routing_fields
from rollway.versions import Ticket

_EXTRA_FIELDS = ("completion_token_ids", "worker_id", "detailed_finish_reason")
# What both routes take, beyond messages and prompt; the rest is ours, or is dropped.
_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "logit_bias", "user", "metadata", "response_format", "tools", "tool_choice",
    "parallel_tool_calls", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "skip_special_tokens", "include_stop_str_in_output", "return_tokens_as_token_ids",
    "reasoning_effort", "suffix", "best_of",
)  # fmt: skip
# Left out, they would come from the checkpoint's generation_config on some routes.
_POLICY_ITSELF = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


class _ContentLogprob(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None


class _ContentLogprobs(msgspec.Struct):
    content: list[_ContentLogprob] | None = None


class _Choice(msgspec.Struct):
    logprobs: _ContentLogprobs | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    nvext: Nvext | None = None
    usage: Usage | None = None


@dataclass(slots=True)
class ChatAssembly(Assembly):
    """Of Dynamo's chat completions: log-probs come with the text, and name their token."""

    _named: list[int | None] = field(default_factory=list)

    def add(self, raw: Any) -> list[int]:
        answer = parse(raw, _Answer)
        choice = only_choice(answer.choices)
        if choice is not None:
            self._finish = self._finish or choice.finish_reason
            content = (choice.logprobs and choice.logprobs.content) or []
            self._logprobs += [entry.logprob for entry in content]
            self._named += [entry.token_id for entry in content]
        self._add_usage(answer.usage)
        return self._add_nvext(answer.nvext or Nvext())

    def finish(self) -> Completion:
        pairs = zip(self._named, self.token_ids, strict=False)  # counts are checked after this
        if any(name is not None and name != token for name, token in pairs):
            raise RolloutError("The engine sent log-probs of other tokens than it sampled.")
        return Assembly.finish(self)


CHAT = Wire("chat", "/v1/chat/completions", completion_request, ChatAssembly, routed=True)


@dataclass(slots=True)
class Asked:
    """One request, ready to be sent as often as it takes."""

    body: dict[str, Any]
    prompt_ids: list[int]
    max_tokens: int
    session: str


@dataclass(slots=True)
class Answered:
    """What came back, and what it is in tokens."""

    raw: dict[str, Any]
    completion: Completion
    ticket: Ticket


class Upstream(Sender):
    """Asks one route of the frontend."""

    async def ask(self, asked: Asked) -> Answered:
        """A whole answer of one weight version."""
        attempt = self._attempt(asked.session)
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(attempt.trouble)
                body = _with_ticket(asked.body, ticket, attempt)
                raw = await self._answer(body, ticket, attempt)
                if raw is None:
                    continue
                assembly = self._assembly(asked)
                assembly.add(raw)
                completion = assembly.finish()
                if await self._holds(completion, ticket):
                    return Answered(raw, completion, ticket)
                await attempt.retry_elsewhere(ticket)

    async def _answer(self, body: dict[str, Any], ticket: Ticket, attempt: Attempt) -> Any:
        """Send, and raise what the frontend refused as it was: the client gets its status."""
        try:
            return await self._send(body, ticket, attempt)
        except RolloutError as error:
            refusal = error.__cause__ or error.__context__
            if isinstance(refusal, RequestFailed):
                raise refusal from None
            raise

    @asynccontextmanager
    async def stream(
        self, asked: Asked
    ) -> AsyncIterator[tuple[AsyncIterator[dict[str, Any]], Assembly, Ticket]]:
        """Chunks as they come. A stream that has begun cannot be sampled anew: one that a refit
        cuts ends with an error."""
        attempt = self._attempt(asked.session)
        async with self._slots, self._deadline():
            ticket = await self._ticket(attempt.trouble)
            body = _with_ticket(asked.body, ticket, attempt)
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            assembly = self._assembly(asked)

            async def chunks() -> AsyncGenerator[dict[str, Any]]:
                async with self._http.stream_lines(
                    self._url, body, timeout=self._timeout, headers={SESSION_HEADER: asked.session}
                ) as lines:
                    async for event in events(lines):
                        assembly.add(event)
                        yield event  # type: ignore[misc]

            # Closed at once: a client that has gone must not keep the worker sampling.
            async with aclosing(chunks()) as parts:
                yield parts, assembly, ticket

    async def settle(self, assembly: Assembly, ticket: Ticket) -> Completion:
        """A stream that has ended, if it is whole and of one version."""
        completion = assembly.finish()
        if not await self._holds(completion, ticket):
            raise RolloutError("The weights changed while this answer was streamed.")
        return completion

    async def _holds(self, completion: Completion, ticket: Ticket) -> bool:
        if completion.finish_reason == "aborted":
            return False
        return await self._is_attributed(ticket, completion.worker_id)

    def _assembly(self, asked: Asked) -> Assembly:
        return self.wire.assembly(Sampling(max_tokens=asked.max_tokens), len(asked.prompt_ids))


def asked(
    kind: Wire,
    client_body: Mapping[str, Any],
    model: str,
    prompt_ids: list[int],
    max_tokens: int,
    session: str,
    routed_experts: bool = False,
) -> Asked:
    """A client's request in the form that Dynamo takes."""
    extra = [*_EXTRA_FIELDS, "routed_experts"] if routed_experts else list(_EXTRA_FIELDS)
    passed = {name: client_body[name] for name in _PASSED_ON if client_body.get(name) is not None}
    body: dict[str, Any] = {
        **_POLICY_ITSELF,
        **passed,
        "model": model,
        "max_tokens": max_tokens,
        "nvext": {"token_data": prompt_ids, "extra_fields": extra},
    }
    if kind is CHAT:
        # They are not rendered again, but Dynamo wants to see some.
        body["messages"] = [{"role": "user", "content": "-"}]
        body["logprobs"] = True
        # Parsers of reasoning look at the settings of the template, which have been checked.
        for name in ("top_logprobs", "chat_template_kwargs"):
            if client_body.get(name):
                body[name] = client_body[name]
    else:
        body["prompt"] = "-"
        body["logprobs"] = client_body.get("logprobs") or 0
    return Asked(body, prompt_ids, max_tokens, session)


def _with_ticket(body: dict[str, Any], ticket: Ticket, attempt: Attempt) -> dict[str, Any]:
    route = routing_fields(ticket.salt, ticket.taint, attempt.pins.now)
    return {**body, "nvext": {**body["nvext"], **route}}
