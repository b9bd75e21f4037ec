"""The gateway's client of the Dynamo frontend: chat and completions with `nvext.token_data`.

The prompt is sent as ids, so nothing tokenizes it again. Dynamo's own parsers extract tool calls
and reasoning from the answer. Fields that Dynamo would refuse are left out. If a refit cuts a turn,
it is sampled again from the new weights: each turn has one version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollway.errors import RolloutError
from rollway.rollout.completion import Assembly, Completion, Nvext, Usage, only_choice, parse
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import Chunk, Question, Sender
from rollway.rollout.wire import STAMP_FIELDS, Wire, completion_request, routing_fields
from rollway.versions import Ticket

_EXTRA_FIELDS = ("completion_token_ids", "worker_id", "detailed_finish_reason")
# Fields that both routes accept besides messages and prompt; Rollway sets or drops the others.
_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "logit_bias", "user", "metadata", "response_format", "tools", "tool_choice",
    "parallel_tool_calls", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "skip_special_tokens", "include_stop_str_in_output", "return_tokens_as_token_ids",
    "reasoning_effort", "suffix", "best_of",
)  # fmt: skip
# On some routes the checkpoint's generation_config would fill these in.
_POLICY_ITSELF = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


class _ChatLogprob(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatLogprob] | None = None


class _ChatChoice(msgspec.Struct):
    logprobs: _ChatLogprobs | None = None
    finish_reason: str | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice] = []
    nvext: Nvext | None = None
    usage: Usage | None = None


@dataclass(slots=True)
class ChatAssembly(Assembly):
    """Collects Dynamo's chat completions, whose log-probs come with the text and name their
    token."""

    _named: list[int | None] = field(default_factory=list)

    def add(self, raw: Any) -> list[int]:
        answer = parse(raw, _ChatAnswer)
        choice = only_choice(answer.choices)
        if choice is not None:
            self._finish = self._finish or choice.finish_reason
            content = (choice.logprobs and choice.logprobs.content) or []
            self._logprobs += [entry.logprob for entry in content]
            self._named += [entry.token_id for entry in content]
        self._add_usage(answer.usage)
        return self._add_nvext(answer.nvext or Nvext())

    def finish(self) -> Completion:
        pairs = zip(self._named, self.token_ids, strict=False)  # the base class checks the counts
        if any(name is not None and name != token for name, token in pairs):
            raise RolloutError("The engine sent log-probs of other tokens than the sampled ones.")
        return Assembly.finish(self)


CHAT = Wire("chat", "/v1/chat/completions", completion_request, ChatAssembly, routed=True)


@dataclass(slots=True)
class ChatRequest:
    """A request for Dynamo, ready to be sent and retried."""

    body: dict[str, Any]
    prompt_ids: list[int]
    max_tokens: int
    session: str


@dataclass(slots=True)
class ChatReply:
    """Dynamo's answer, as it came and in tokens."""

    request: ChatRequest
    raw: dict[str, Any]
    completion: Completion
    ticket: Ticket


class Upstream(Sender):
    """Sends requests to one route of the frontend."""

    async def ask(self, request: ChatRequest) -> ChatReply:
        """Return a whole answer of one weight version."""
        return await self._answer(_Turn(request, self.wire, session=request.session))

    def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | ChatReply]:
        """Yield the chunks of an answer, and last the reply. If a refit cuts it, it ends with an
        error: the client has seen tokens, so they cannot be sampled again."""
        turn = _Turn(request, self.wire, session=request.session, is_streamed=True)
        return self._ask(turn)


@dataclass(slots=True)
class _Turn(Question[ChatReply]):
    """Asks for one turn, of one version: a refit that kept it running must not have changed it."""

    request: ChatRequest
    wire: Wire

    def build(self, ticket: Ticket) -> tuple[dict[str, Any], Assembly]:
        request = self.request
        nvext = {**request.body["nvext"], **routing_fields(ticket.salt, ticket.taint)}
        if ticket.stamped:
            nvext["extra_fields"] = [*nvext["extra_fields"], *STAMP_FIELDS]
        body = {**request.body, "nvext": nvext}
        if self.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        sampling = Sampling(max_tokens=request.max_tokens)
        return body, self.wire.assembly(sampling, len(request.prompt_ids))

    def take(self, completion: Completion, ticket: Ticket, raw: Any) -> ChatReply:
        return ChatReply(self.request, raw, completion, ticket)


def make_request(
    kind: Wire,
    client_body: Mapping[str, Any],
    model: str,
    prompt_ids: list[int],
    max_tokens: int,
    session: str,
    routed_experts: bool = False,
) -> ChatRequest:
    """Convert a client's request to Dynamo's form."""
    extra = [*_EXTRA_FIELDS, "routed_experts"] if routed_experts else list(_EXTRA_FIELDS)
    fields = {name: client_body[name] for name in _PASSED_ON if client_body.get(name) is not None}
    body: dict[str, Any] = {
        **_POLICY_ITSELF,
        **fields,
        "model": model,
        "max_tokens": max_tokens,
        "nvext": {"token_data": prompt_ids, "extra_fields": extra},
    }
    if kind is CHAT:
        # Dynamo does not render them, because it has the ids, but it requires some.
        body["messages"] = [{"role": "user", "content": "-"}]
        body["logprobs"] = True
        # Reasoning parsers read the template's settings, which have been checked.
        for name in ("top_logprobs", "chat_template_kwargs"):
            if client_body.get(name):
                body[name] = client_body[name]
    else:
        body["prompt"] = "-"
        body["logprobs"] = client_body.get("logprobs") or 0
    return ChatRequest(body, prompt_ids, max_tokens, session)
