"""`rollway gateway`: an OpenAI endpoint whose sessions are recorded token by token.

    client ── chat, text ──► gateway ── ids ──► Dynamo frontend
                               │  template, splice, record
    trainer ◄─ GET /v1/rollway/trajectories/{session}

A session is the header `x-rollway-session`, or else the API key (see `access`). What a client sent
before and got back is found again by what it says, and goes to the engine as the very ids that were
sampled. Nothing that takes long runs in the event loop (see `threads`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollway.api import Stack
from rollway.errors import UsageError
from rollway.gateway import pages, replies, requests
from rollway.gateway.access import SESSION, Access, Caller
from rollway.gateway.connections import Connections
from rollway.gateway.messages import Message, Prefix, chain, link, sent_prefix
from rollway.gateway.recorder import Recorder, Session, Turn
from rollway.gateway.template import Template
from rollway.gateway.upstream import CHAT, Asked, Upstream, asked
from rollway.rollout.completion import Completion
from rollway.rollout.sender import all_or_none
from rollway.rollout.splice import SpliceError
from rollway.rollout.wire import COMPLETIONS, Wire

T = TypeVar("T")

RECORDED = "x-rollway-recorded"
_UNBOUNDED = 1_000_000  # the clients bound it
# aiohttp before 3.14 has plain names only, and later ones warn of them.
_CALLER: Any = web.RequestKey("caller", Caller) if hasattr(web, "RequestKey") else "caller"
_BODY: Any = web.RequestKey("body", bytearray) if hasattr(web, "RequestKey") else "body"
_LONG_BODY = 200_000
"""Bytes above which even decoding a body and hashing its messages is done in a thread."""
_SMALL_BODY = 2**16
"""Bytes up to which a body is always accepted: the number of connections bounds their sum."""
_WRITE_SECONDS = 60.0
"""For one event of a stream; a client that does not read would hold a worker."""


@dataclass(slots=True)
class Gateway:
    """One served model behind an OpenAI endpoint."""

    model: str
    template: Template
    recorder: Recorder
    chat: Upstream
    text: Upstream
    context_length: int
    access: Access = field(default_factory=Access)
    bundle: str = "asked"
    """Whether answers carry their token ids: `asked` for, `always` or `never`."""
    routed_experts: bool = False
    """Whether to record which experts ran; an engine that does not say it is then an error."""
    connections: Connections = field(default_factory=Connections)
    started: float = field(default_factory=time.time)
    body_bytes: int = 2**30
    """Of all bodies that are being read or answered; one of the largest size always fits."""
    _pages: pages.Workers = field(default_factory=pages.Workers)
    _budget: requests.Budget = field(init=False)

    def __post_init__(self) -> None:
        self.template.limit(self.context_length)
        largest = requests.body_limit(self.context_length)
        self._budget = requests.Budget(max(self.body_bytes, largest))

    def app(self) -> web.Application:
        limit = requests.body_limit(self.context_length)
        app = web.Application(client_max_size=limit, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        for base in ("", "/v1"):
            app.router.add_post(f"{base}/tokenize", self.tokenize)
            app.router.add_post(f"{base}/detokenize", self.detokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/rollway/sessions", self.sessions)
        app.router.add_get("/v1/rollway/trajectories/{session:.+}", self.trajectories)
        app.router.add_delete("/v1/rollway/trajectories/{session:.+}", self.forget)
        return app

    # --- OpenAI ----------------------------------------------------------------------------------

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._parse(request)
        messages, digests = await self._beside(
            request, lambda: _read_messages(body), "Reading the messages"
        )
        count, name = requests.choices_of(body), self._session_name(request)
        session = self._session(name)
        prompt, parent, forked = await self._prompt(body, messages, session, digests)
        made = self._asked(CHAT, body, prompt, name)
        known = 0 if parent is None else len(session.ids(parent))
        note = _Note(self, session, digests, prompt[known:], parent, forked)
        if body.get("stream"):
            return await self._streamed(request, body, self.chat, made, note, count)
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
        shown = self._show(request, name)
        return _json(replies.whole(answers, choices, self.model, shown, recorded))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._parse(request)
        name = self._session_name(request)
        prompts = await self._beside(
            request, lambda: requests.prompts_of(body, self.context_length), "Reading the prompts"
        )
        count = requests.choices_of(body, len(prompts))
        sent = [
            self._asked(COMPLETIONS, body, prompt, name)
            for prompt in await self._all_ids(prompts)
            for _ in range(count)
        ]
        session = self._session(name)
        # No history leads to them: each is a trajectory of its own.
        notes = [_Note(self, session, [_new_id()], made.prompt_ids, None, "") for made in sent]
        if body.get("stream"):
            if len(sent) > 1:
                raise UsageError("Only one completion at a time can be streamed.")
            return await self._streamed(request, body, self.text, sent[0], notes[0], 1)
        answers = await all_or_none(self.text.ask(made) for made in sent)
        choices, turns = [], []
        for index, answer in enumerate(answers):
            choice = replies.choice(answer.raw, index, body)
            turns.append(notes[index].turn(answer.completion, answer.ticket.version, None))
            if self._bundled(body):
                replies.add_bundle(choice, sent[index].prompt_ids, answer.completion)
            choices.append(choice)
        recorded = await self._record(session, turns)
        shown = self._show(request, name)
        return _json(replies.whole(answers, choices, self.model, shown, recorded))

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
        body = await self._parse(request)
        if "messages" in body:
            messages, _ = await self._beside(
                request, lambda: _read_messages(body), "Reading the messages"
            )
            prefix = sent_prefix(body, messages, self.context_length)
            try:
                ids = await self.template.prompt(body, messages, prefix)
            except SpliceError as error:  # of a prefix that the client itself sent
                raise UsageError(error.message) from error
        else:
            ids = await self.template.encode(requests.text_of(body, "prompt"))
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.context_length})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._parse(request)
        ids = requests.ids_of(body, "tokens", self.context_length)
        return _json({"prompt": await self.template.decode(ids)})

    # --- for the trainer -------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        state: dict[str, Any] = {"status": "ok", "model": self.model}
        if request[_CALLER].operator:
            state["sessions"] = len(self.recorder.sessions)
        return _json(state)

    async def sessions(self, request: web.Request) -> web.Response:
        sessions = self.recorder.sessions
        # A copy of the names: a thread may add to them.
        visible = self.access.visible(request[_CALLER], list(sessions))
        pairs = [(shown, sessions.get(name)) for shown, name in visible.items()]
        known = {shown: session for shown, session in pairs if session is not None}
        body: dict[str, Any] = {"sessions": {name: len(each.turns) for name, each in known.items()}}
        if lost := {name: each.lost for name, each in known.items() if each.lost}:
            body["lost"] = lost
        if self.recorder.lost and request[_CALLER].operator:
            body["unreadable_lines"] = self.recorder.lost
        return _json(body)

    async def trajectories(self, request: web.Request) -> web.Response:
        caller, given = request[_CALLER], request.match_info["session"]
        for name in self.access.candidates(caller, given):
            session = self.recorder.sessions.get(name)
            if session is not None:
                body = await self._page(request, name, session)
                return web.Response(body=body, content_type="application/json")
        raise self.access.missing(caller, given)

    async def forget(self, request: web.Request) -> web.Response:
        caller, given = request[_CALLER], request.match_info["session"]
        for name in self.access.candidates(caller, given):
            if await self.recorder.forget_async(name):
                return _json({"session": self._show(request, name), "forgotten": True})
        raise self.access.missing(caller, given)

    async def _page(self, request: web.Request, name: str, session: Session) -> bytes:
        """Return a page of trajectories, computed in a thread while the session may grow."""
        offset, limit = pages.bounds(request.query)
        shown = self._show(request, name)
        return await self._pages.run(
            request[_CALLER], lambda: pages.page(session, shown, offset, limit)
        )

    # --- how -------------------------------------------------------------------------------------

    async def _prompt(
        self, body: Mapping[str, Any], messages: list[Message], session: Session, digests: list[str]
    ) -> tuple[list[int], str | None, str]:
        """The ids of a prompt, the turn it goes on from, and why it does not if there was one."""
        prefix, parent = sent_prefix(body, messages, self.context_length), None
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
        # Headers hold ASCII.
        room = requests.room(body, len(prompt), self.context_length)
        session = name if name.isascii() else hashlib.sha256(name.encode()).hexdigest()
        session = session or _new_id()
        return asked(wire, body, self.model, prompt, room, session, self.routed_experts)

    async def _streamed(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        upstream: Upstream,
        made: Asked,
        note: _Note,
        choices: int,
    ) -> web.StreamResponse:
        if choices > 1:
            raise UsageError("Only one choice can be streamed.", "Ask for n=1, or do not stream.")
        # Nothing is sent before the frontend has begun to answer: what it refuses has a status.
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
            except ConnectionError:
                raise  # the client has gone
            except Exception as failure:
                if not response.prepared:
                    raise
                status, kind, message_shown = replies.explain(failure)
                await _send(response, {"error": replies.error(message_shown, kind, status)})
                return response
        if held and self._bundled(body):
            choice = held[0]["choices"][0]
            replies.add_bundle(choice.get("delta", choice), made.prompt_ids, completion)
        if held and not recorded:
            held[-1]["recorded"] = False
        for shown in held:
            await _send(response, shown)
        await _write(response, b"[DONE]")
        return response

    def _session(self, name: str) -> Session:
        """Return the session to record into; one without a name is not recorded."""
        return self.recorder.open(name) if name else Session()

    async def _record(self, session: Session, turns: list[Turn]) -> bool:
        """Record the turns of an answer; return False when their session was deleted."""
        return not session.name or await self.recorder.add_async(session, turns)

    async def _parse(self, request: web.Request) -> dict[str, Any]:
        return await self._beside(
            request, lambda: requests.parse(request[_BODY]), "Decoding the body"
        )

    async def _beside(self, request: web.Request, work: Callable[[], T], what: str) -> T:
        """Return the result of `work`, done in a thread for a request with a long body."""
        if len(request[_BODY]) < _LONG_BODY:
            return work()
        return await self.template.threads.run(work, what)

    async def _all_ids(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Return the token ids of all prompts, tokenized at once."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        tokenized = iter(await self.template.encode_all(texts))
        all_ids = [next(tokenized) if isinstance(prompt, str) else prompt for prompt in prompts]
        if not all(all_ids):
            raise UsageError("The prompt has no token.", "Give at least one character.")
        return all_ids

    async def _receive(self, request: web.Request, body: bytearray) -> None:
        """Read the body of a request, and count it as it comes."""
        most = requests.body_limit(self.context_length)
        async for chunk in request.content.iter_any():
            size = len(body) + len(chunk)
            if size > most:
                raise web.HTTPRequestEntityTooLarge(most, size)
            self._budget.take(_count_bytes(size) - _count_bytes(len(body)))
            body += chunk

    def _session_name(self, request: web.Request) -> str:
        """The session of a request; empty for one that is not recorded."""
        return self.access.session_name(request[_CALLER], request)

    def _show(self, request: web.Request, name: str) -> str:
        return self.access.shown(request[_CALLER], name)

    def _bundled(self, body: Mapping[str, Any]) -> bool:
        if self.bundle != "asked":
            return self.bundle == "always"
        fields = ("return_token_ids", "return_tokens_as_token_ids", "required_prefix_token_ids")
        return any(body.get(name) for name in fields)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let in who may, wait for the body, and give every failure OpenAI's form."""
        connection, body = request.protocol, bytearray()
        request[_BODY] = body
        try:
            request[_CALLER] = self.access.admit(request)
            if request.method == "POST":
                self.connections.receive(connection)
                await self._receive(request, body)
            self.connections.answer(connection)
            return await handler(request)
        except ConnectionError:
            # The client has gone, or does not read: a plain close would wait until it does.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)  # which nobody gets
        except Exception as failure:  # noqa: BLE001 - the last guard: it is answered and logged
            return replies.refusal(failure)
        finally:
            self._budget.give_back(_count_bytes(len(body)))
            self.connections.rest(connection)


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
        from rollway.rollout.experts import join_whole, read_capture

        before = 0 if self.parent is None else len(self.session.ids(self.parent))
        tokens = before + len(self.new_ids) + len(completion.token_ids)
        routed = join_whole([read_capture(completion.routed_experts)], tokens)
        return routed.since(self.session.experts_end(self.parent)).as_json()


async def made_gateway(
    stack: Stack, template: Template, recorder: Recorder, model: str | None = None, **options: Any
) -> Gateway:
    """For one model of a running stack."""
    chat = stack.sender(Upstream, model, wire=CHAT, concurrency=_UNBOUNDED)
    text = stack.sender(Upstream, model, wire=COMPLETIONS, concurrency=_UNBOUNDED)
    length = await stack.context_length(chat.model)
    return Gateway(chat.model, template, recorder, chat, text, length, **options)


def _read_messages(body: Mapping[str, Any]) -> tuple[list[Message], list[str]]:
    """Return the messages of a chat and the digests of their history."""
    messages = requests.messages_of(body)
    return messages, chain(messages)


def _count_bytes(size: int) -> int:
    """Return how many bytes of a body count against the budget."""
    return max(0, size - _SMALL_BODY)


def _new_id() -> str:
    return uuid.uuid4().hex


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await _write(response, msgspec.json.encode(event))


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await response.write(b"data: " + data + b"\n\n")
    except TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None


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
