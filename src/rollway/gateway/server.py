"""`rollway gateway`: an OpenAI endpoint whose sessions are recorded token by token.

    client ── chat, text ──► gateway ── ids ──► Dynamo frontend
                               │  template, splice, record
    trainer ◄─ GET /v1/rollway/trajectories/{session}

A session is the header `x-rollway-session`, or else the API key. What a client sent before and got
back is found again by what it says, and goes to the engine as the very ids that were sampled.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rollway.api import Stack
from rollway.errors import RequestFailed, RollwayError, Unreachable, UsageError
from rollway.gateway import replies
from rollway.gateway.messages import Message, Prefix, chain, link, sent_prefix
from rollway.gateway.recorder import JournalFull, Recorder, Session, Turn
from rollway.gateway.template import Template
from rollway.gateway.upstream import CHAT, Asked, Upstream, asked
from rollway.rollout.completion import Completion
from rollway.rollout.sender import all_or_none, checked_prompt
from rollway.rollout.splice import SpliceError
from rollway.rollout.wire import COMPLETIONS, Wire

log = logging.getLogger(__name__)

SESSION = "x-rollway-session"
RECORDED = "x-rollway-recorded"
_NO_SESSION = ("", "EMPTY", "none", "null", "dummy")
"""API keys that clients send when they have none."""
_MAX_BODY = 256 * 2**20
_MAX_CHOICES = 64
_UNBOUNDED = 1_000_000  # the clients bound it


@dataclass(slots=True)
class Gateway:
    """One served model behind an OpenAI endpoint."""

    model: str
    template: Template
    recorder: Recorder
    chat: Upstream
    text: Upstream
    context_length: int
    tokens: frozenset[str] = frozenset()
    """Bearer tokens that are accepted; any when empty."""
    bundle: str = "asked"
    """Whether answers carry their token ids: `asked` for, `always` or `never`."""
    routed_experts: bool = False
    """Whether to record which experts ran; an engine that does not say it is then an error."""
    started: float = field(default_factory=time.time)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        for base in ("", "/v1"):
            app.router.add_post(f"{base}/tokenize", self.tokenize)
            app.router.add_post(f"{base}/detokenize", self.detokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/rollway/sessions", self.sessions)
        app.router.add_get("/v1/rollway/trajectories/{session}", self.trajectories)
        app.router.add_delete("/v1/rollway/trajectories/{session}", self.forget)
        return app

    # --- OpenAI ----------------------------------------------------------------------------------

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request)
        messages = _messages(body)
        name = self._session_name(request)
        session = self._session(name)
        digests = chain(messages)
        prompt, parent, forked = await self._prompt(body, messages, session, digests)
        made = self._asked(CHAT, body, prompt, name)
        known = 0 if parent is None else len(session.ids(parent))
        note = _Note(self, session, digests, prompt[known:], parent, forked)
        if body.get("stream"):
            return await self._streamed(request, body, self.chat, made, note)
        count = _choices(body)
        answers = await all_or_none(self.chat.ask(made) for _ in range(count))
        bundled = self._bundled(body)
        choices, turns = [], []
        for index, answer in enumerate(answers):
            choice = replies.choice(answer.raw, index, body)
            turns.append(note.turn(answer.completion, answer.ticket.version, choice["message"]))
            if bundled:
                replies.add_bundle(choice["message"], prompt, answer.completion)
            choices.append(choice)
        recorded = await self._record(session, turns)
        return _json(replies.whole(answers, choices, self.model, name, recorded))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request)
        name = self._session_name(request)
        prompts = self._prompts(body.get("prompt"))
        sent = [
            self._asked(COMPLETIONS, body, prompt, name)
            for prompt in prompts
            for _ in range(_choices(body))
        ]
        session = self._session(name)
        # No history leads to them: each is a trajectory of its own.
        notes = [_Note(self, session, [_new_id()], made.prompt_ids, None, "") for made in sent]
        if body.get("stream"):
            if len(sent) > 1:
                raise UsageError("Only one completion at a time can be streamed.")
            return await self._streamed(request, body, self.text, sent[0], notes[0])
        answers = await all_or_none(self.text.ask(made) for made in sent)
        choices, turns = [], []
        for index, answer in enumerate(answers):
            choice = replies.choice(answer.raw, index, body)
            turns.append(notes[index].turn(answer.completion, answer.ticket.version, None))
            if self._bundled(body):
                replies.add_bundle(choice, sent[index].prompt_ids, answer.completion)
            choices.append(choice)
        recorded = await self._record(session, turns)
        return _json(replies.whole(answers, choices, self.model, name, recorded))

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": self.model,
            "object": "model",
            "created": int(self.started),
            "owned_by": "rollway",
            "max_model_len": self.context_length,
        }
        return _json({"object": "list", "data": [entry]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await _read(request)
        if "messages" in body:
            messages = _messages(body)
            ids = await self.template.prompt(body, messages, sent_prefix(body, messages))
        else:
            ids = self.template.encode(str(body.get("prompt", "")))
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.context_length})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await _read(request)
        return _json({"prompt": self.template.decode(checked_prompt(body.get("tokens") or []))})

    # --- for the trainer -------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "model": self.model, "sessions": len(self.recorder.sessions)})

    async def sessions(self, request: web.Request) -> web.Response:
        sessions = list(self.recorder.sessions.items())  # a thread may add to them
        body: dict[str, Any] = {"sessions": {name: len(each.turns) for name, each in sessions}}
        if lost := {name: each.lost for name, each in sessions if each.lost}:
            body["lost"] = lost
        if self.recorder.lost:
            body["unreadable_lines"] = self.recorder.lost
        return _json(body)

    async def trajectories(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        session = self.recorder.sessions.get(name)
        if session is None:
            return _error(404, f"There is no session `{name}`.", "not_found")
        found = [sequence.as_json() for sequence in session.trajectories()]
        counts = {"turns": len(session.turns), "lost": session.lost}
        return _json({"session": name, **counts, "trajectories": found})

    async def forget(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        if not await self.recorder.forget_async(name):
            return _error(404, f"There is no session `{name}`.", "not_found")
        return _json({"session": name, "forgotten": True})

    # --- how -------------------------------------------------------------------------------------

    async def _prompt(
        self, body: Mapping[str, Any], messages: list[Message], session: Session, digests: list[str]
    ) -> tuple[list[int], str | None, str]:
        """The ids of a prompt, the turn it goes on from, and why it does not if there was one."""
        prefix, parent = sent_prefix(body, messages), None
        if prefix is None:
            known = session.latest(digests)
            if known is not None:
                parent, count = known
                prefix = Prefix(session.ids(parent), count)
        forked = ""
        if prefix is None and any(message.get("role") == "assistant" for message in messages):
            forked = "the history has an assistant message that was not sampled here"
        try:
            prompt = await self.template.prompt(body, messages, prefix)
        except SpliceError as error:
            prompt, parent = await self.template.prompt(body, messages, None), None
            forked = error.message
        return prompt, parent, forked

    def _asked(self, wire: Wire, body: Mapping[str, Any], prompt: list[int], name: str) -> Asked:
        room, session = self._room(body, prompt), name or _new_id()
        return asked(wire, body, self.model, prompt, room, session, self.routed_experts)

    async def _streamed(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        upstream: Upstream,
        made: Asked,
        note: _Note,
    ) -> web.StreamResponse:
        if _choices(body) > 1:
            raise UsageError("Only one choice can be streamed.", "Ask for n=1, or do not stream.")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        spoken = replies.Spoken()
        async with upstream.stream(made) as (chunks, assembly, ticket):
            # The end is told only when the turn is whole and recorded.
            held: list[dict[str, Any]] = []
            try:
                async for chunk in chunks:
                    if not response.prepared:
                        await response.prepare(request)
                    spoken.add(chunk)
                    shown = replies.chunk(chunk, body)
                    if shown is not None and (held or replies.ends(shown)):
                        held.append(shown)
                    elif shown is not None:
                        await _send(response, shown)
                completion = await upstream.settle(assembly, ticket)
                message = spoken.message() if upstream is self.chat else None
                turn = note.turn(completion, ticket.version, message)
                recorded = await self._record(note.session, [turn])
            except RollwayError as error:
                if not response.prepared:
                    raise
                status = getattr(error, "http_status", 500)
                shown = replies.error(error.message, "server_error", status)
                await _send(response, {"error": shown})
                return response
        if held and self._bundled(body):
            choice = held[0]["choices"][0]
            replies.add_bundle(choice.get("delta", choice), made.prompt_ids, completion)
        if held and not recorded:
            held[-1]["recorded"] = False
        for shown in held:
            await _send(response, shown)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _session(self, name: str) -> Session:
        """Return the session to record into; one without a name is not recorded."""
        return self.recorder.open(name) if name else Session()

    async def _record(self, session: Session, turns: list[Turn]) -> bool:
        """Record the turns of an answer; return False when their session was deleted."""
        return not session.name or await self.recorder.add_async(session, turns)

    def _session_name(self, request: web.Request) -> str:
        """The session of a request; empty for one that is not recorded."""
        named = request.headers.get(SESSION)
        if named:
            return named
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self.tokens:  # then the key is a secret, and may name a session after a slash
            key = key.partition("/")[2]
        return "" if key in _NO_SESSION else key

    def _knows(self, token: str) -> bool:
        """In constant time, so that a token cannot be found letter by letter."""
        equal = [hmac.compare_digest(token.encode(), one.encode()) for one in self.tokens]
        return any(equal)

    def _room(self, body: Mapping[str, Any], prompt: list[int]) -> int:
        """How many tokens may be sampled: what was asked for, or what the context still holds."""
        left = self.context_length - len(prompt)
        if left < 1:
            raise UsageError(
                f"This model's maximum context length is {self.context_length} tokens, and the "
                f"prompt has {len(prompt)}."
            )
        wanted = body.get("max_completion_tokens", body.get("max_tokens"))
        if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
            raise UsageError("max_tokens must be a whole number above 0.")
        return left if wanted is None else min(wanted, left)

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self.template.encode(prompt)]
        if isinstance(prompt, list) and prompt and all(isinstance(p, int) for p in prompt):
            return [checked_prompt(prompt)]
        if isinstance(prompt, list) and prompt:
            return [one for part in prompt for one in self._prompts(part)]
        raise UsageError("prompt must be a text, a list of token ids, or a list of these.")

    def _bundled(self, body: Mapping[str, Any]) -> bool:
        if self.bundle != "asked":
            return self.bundle == "always"
        fields = ("return_token_ids", "return_tokens_as_token_ids", "required_prefix_token_ids")
        return any(body.get(name) for name in fields)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Bearer tokens, and errors in OpenAI's form."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self.tokens and request.path != "/health" and not self._knows(key.partition("/")[0]):
            return _error(401, "The bearer token is missing or wrong.", "authentication_error")
        try:
            return await handler(request)
        except UsageError as error:
            return _error(400, str(error), "invalid_request_error")
        except RequestFailed as error:
            return _error(error.status if error.status >= 400 else 502, error.message, "upstream")
        except Unreachable as error:
            return _error(503, error.message, "upstream")
        except JournalFull as error:
            return _error(error.http_status, str(error), "journal_full")
        except RollwayError as error:
            return _error(500, error.message, "rollout_error")


@dataclass(slots=True)
class _Note:
    """What is to be recorded of a request once its answer is there."""

    gateway: Gateway
    session: Session
    digests: list[str]
    new_ids: list[int]
    parent: str | None
    forked: str

    def turn(
        self, completion: Completion, version: int | None, message: Mapping[str, Any] | None
    ) -> Turn:
        history = self.digests[-1]
        if message is not None:
            history = link(history, message)
        return Turn(
            session=self.session.name,
            model=self.gateway.model,
            history=history,
            new_ids=self.new_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs or [],
            finish_reason=completion.finish_reason,
            version=version,
            worker_id=completion.worker_id,
            parent=self.parent,
            forked=self.forked,
            routed_experts=self._experts(completion),
        )

    def _experts(self, completion: Completion) -> dict[str, Any] | None:
        """What this turn adds to the record of its parent. The engine tells of the whole prompt
        each time; what was sampled earlier keeps its own."""
        if not self.gateway.routed_experts or not completion.token_ids:
            return None
        from rollway.rollout.experts import captured, whole

        before = 0 if self.parent is None else len(self.session.ids(self.parent))
        tokens = before + len(self.new_ids) + len(completion.token_ids)
        routed = whole([captured(completion.routed_experts)], tokens)
        return routed.since(self.session.experts_end(self.parent)).as_json()


async def made_gateway(
    stack: Stack, template: Template, recorder: Recorder, model: str | None = None, **options: Any
) -> Gateway:
    """For one model of a running stack."""
    chat = stack.sender(Upstream, model, wire=CHAT, concurrency=_UNBOUNDED)
    text = stack.sender(Upstream, model, wire=COMPLETIONS, concurrency=_UNBOUNDED)
    length = await stack.context_length(chat.model)
    return Gateway(chat.model, template, recorder, chat, text, length, **options)


def _new_id() -> str:
    return uuid.uuid4().hex


async def _read(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise UsageError("The body must be a JSON object.")
    return body


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of at least one message.")
    if not all(isinstance(message, dict) and message.get("role") for message in messages):
        raise UsageError("Every message must be an object with a role.")
    return messages


def _choices(body: Mapping[str, Any]) -> int:
    count = body.get("n") or 1
    if not isinstance(count, int) or not 1 <= count <= _MAX_CHOICES:
        raise UsageError(f"n must be a number from 1 to {_MAX_CHOICES}.")
    return count


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    headers = {SESSION: body["session"]} if body.get("session") else {}
    if body.get("recorded") is False:
        headers[RECORDED] = "false"
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def _error(status: int, message: str, kind: str) -> web.Response:
    return _json({"error": replies.error(message, kind, status)}, status)
