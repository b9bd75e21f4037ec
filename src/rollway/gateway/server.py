"""`rollway gateway`: an OpenAI endpoint whose sessions are recorded token by token.

    client ── chat, text ──► gateway ── ids ──► Dynamo frontend
                               │  template, splice, record
    trainer ◄─ GET /v1/rollway/trajectories/{session}

The header `x-rollway-session` names the session, or else the API key (see `tokens`). The gateway
finds earlier turns of a session by their content, and sends them to the engine as the very ids that
were sampled. Nothing slow runs in the event loop (see `threads`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from rollway.errors import UsageError
from rollway.gateway import replies, requests, threads
from rollway.gateway.connections import ServerConnections
from rollway.gateway.messages import Message, Prefix, chain, check_contiguous, find_sent_prefix
from rollway.gateway.replies import json_response, send_data, send_event
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.gateway.tokens import Access, Caller
from rollway.gateway.turns import PendingTurn, Session, Turn, new_id
from rollway.gateway.upstream import CHAT, ChatReply, ChatRequest, Upstream, make_request
from rollway.rollout.sender import all_or_none
from rollway.rollout.template import SpliceError
from rollway.rollout.wire import COMPLETIONS, Wire

T = TypeVar("T")

_LONG_BODY = 200_000
"""Above this size, a thread even decodes the body and hashes its messages."""
_SMALL_BODY = 2**16
"""Bodies up to this size are always accepted: the number of connections bounds their sum."""


# aiohttp before 3.14 knows only plain names; later versions warn about them.
CALLER: Any = web.RequestKey("caller", Caller) if hasattr(web, "RequestKey") else "caller"
BODY: Any = web.RequestKey("body", bytearray) if hasattr(web, "RequestKey") else "body"


class Extension(Protocol):
    """What an integration adds to the gateway: routes, which win where both have one."""

    def add_routes(self, router: web.UrlDispatcher) -> None: ...

    async def admit(self, request: web.Request) -> None:
        """Return when a request may be handled. Called once its body has arrived; raise to refuse
        it."""
        ...

    def find_model(self, name: Any) -> str:
        """Return the served model that a request means by `model`."""
        ...


@dataclass(slots=True)
class Gateway:
    """One served model behind an OpenAI endpoint."""

    model: str
    template: Template
    store: SessionStore
    chat: Upstream
    text: Upstream
    context_length: int
    access: Access = field(default_factory=Access)
    bundle: str = "asked"
    """When answers carry their token ids: if `asked` for, `always` or `never`."""
    routed_experts: bool = False
    """Whether to record the experts of each token; then an answer without them is an error."""
    exact: bool = False
    """Whether a history with token ids must be continued token by token. Otherwise a prompt that
    cannot begin with them begins a new trajectory."""
    expert_strings: bool = False
    """Whether token bundles have experts in NeMo's form, one string."""
    connections: ServerConnections = field(default_factory=ServerConnections)
    started: float = field(default_factory=time.time)
    body_bytes: int = 2**30
    """The limit for all bodies that are being read or answered together."""
    extension: Extension | None = None
    """More routes, for one trainer."""
    _pages: threads.PageThreads = field(default_factory=threads.PageThreads)
    _budget: requests.Budget = field(init=False)

    def __post_init__(self) -> None:
        self.template.limit(self.context_length)
        largest = requests.get_body_limit(self.context_length)
        self._budget = requests.Budget(max(self.body_bytes, largest))

    def app(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        limit = requests.get_body_limit(self.context_length)
        app = web.Application(client_max_size=limit, middlewares=[self._guard])
        if self.extension is not None:
            self.extension.add_routes(app.router)  # first: the first of two equal paths wins
        top = self.access.prefix
        app.router.add_post(f"{top}/v1/chat/completions", self.chat_completions)
        app.router.add_post(f"{top}/v1/completions", self.completions)
        app.router.add_get(f"{top}/v1/models", self.models)
        for base in (top, f"{top}/v1"):
            app.router.add_post(f"{base}/tokenize", self.tokenize)
            app.router.add_post(f"{base}/detokenize", self.detokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get(f"{top}/v1/rollway/sessions", self.sessions)
        trajectories = top + "/v1/rollway/trajectories/{session:.+}"
        app.router.add_get(trajectories, self.trajectories)
        app.router.add_delete(trajectories, self.forget)
        return app

    # --- OpenAI ----------------------------------------------------------------------------------

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.parse(request)
        messages, digests = await self._read_messages(request, body)
        count = requests.read_choice_count(body)
        name = self.access.session_name(request[CALLER], request)
        session = await self.store.open(name) if name else Session()  # without a name, not recorded
        prompt, parent, forked = await self._prompt(body, messages, session, digests)
        chat_request = self._make_request(CHAT, body, prompt, name)
        known = 0 if parent is None else len(session.ids(parent))
        pending = PendingTurn(
            self.model, session, digests[-1], prompt[known:], self.routed_experts, parent, forked
        )
        if body.get("stream"):
            return await self._stream(request, body, self.chat, chat_request, pending, count)
        answers = await all_or_none(self.chat.ask(chat_request) for _ in range(count))
        return await self._reply(request, body, name, answers, [pending] * count)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.parse(request)
        name = self.access.session_name(request[CALLER], request)
        prompts = await self.run_work(
            request, lambda: requests.read_prompts(body, self.context_length), "Reading the prompts"
        )
        count = requests.read_choice_count(body, len(prompts))
        text_requests = [
            self._make_request(COMPLETIONS, body, prompt, name)
            for prompt in await self._all_ids(prompts)
            for _ in range(count)
        ]
        session = await self.store.open(name) if name else Session()  # without a name, not recorded
        # A text completion has no history: each is a separate trajectory.
        pending = [
            PendingTurn(self.model, session, new_id(), each.prompt_ids, self.routed_experts)
            for each in text_requests
        ]
        if body.get("stream"):
            if len(text_requests) > 1:
                raise UsageError("Only one completion at a time can be streamed.")
            return await self._stream(request, body, self.text, text_requests[0], pending[0], 1)
        answers = await all_or_none(self.text.ask(each) for each in text_requests)
        return await self._reply(request, body, name, answers, pending)

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": self.model,
            "object": "model",
            "created": int(self.started),
            "owned_by": "rollway",
            "max_model_len": self.context_length,
        }
        return json_response({"object": "list", "data": [entry]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self.parse(request)
        if "messages" in body:
            messages, _ = await self._read_messages(request, body)
            prefix = find_sent_prefix(body, messages, self.context_length)
            try:
                ids = await self.template.prompt(body, messages, prefix)
            except SpliceError as error:  # the client sent this prefix itself
                raise UsageError(error.message) from error
        else:
            ids = await self.template.encode(requests.read_text(body, "prompt"))
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": self.context_length}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self.parse(request)
        ids = requests.read_ids(body, "tokens", self.context_length)
        return json_response({"prompt": await self.template.decode(ids)})

    # --- for the trainer -------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        state: dict[str, Any] = {"status": "ok", "model": self.model}
        if request[CALLER].operator:
            state["sessions"] = len(self.store.sessions)
        return json_response(state)

    async def sessions(self, request: web.Request) -> web.Response:
        counts = dict(self.store.sessions)  # a copy: a thread adds to them
        visible = self.access.visible(request[CALLER], counts)
        return json_response({"sessions": {shown: counts[name] for shown, name in visible.items()}})

    async def trajectories(self, request: web.Request) -> web.Response:
        caller, requested = request[CALLER], request.match_info["session"]
        for name in self.access.candidates(caller, requested):
            session = await self.store.find(name)
            if session is not None:
                shown, bounds = self.access.show(caller, name), threads.read_bounds(request.query)
                # Long ones in a thread, while the session may grow. To start one takes longer than
                # to build a short page.
                work = partial(threads.make_page, session, shown, *bounds)
                page = work() if session.is_short else await self._pages.run(caller, work)
                return web.Response(body=page, content_type="application/json")
        raise self.access.missing(caller, requested)

    async def forget(self, request: web.Request) -> web.Response:
        caller, requested = request[CALLER], request.match_info["session"]
        for name in self.access.candidates(caller, requested):
            if await self.store.delete(name):
                shown = self.access.show(caller, name)
                return json_response({"session": shown, "forgotten": True})
        raise self.access.missing(caller, requested)

    # --- internals -------------------------------------------------------------------------------

    async def _prompt(
        self, body: Mapping[str, Any], messages: list[Message], session: Session, digests: list[str]
    ) -> tuple[list[int], str | None, str]:
        """Return the ids of a prompt, the turn it continues, and why it forks if it does."""
        prefix, parent = find_sent_prefix(body, messages, self.context_length), None
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
            if self.exact:
                raise UsageError(error.message, error.hint) from error
            prompt, parent = await self.template.prompt(body, messages, None), None
            forked = error.message
        return prompt, parent, forked

    def _make_request(
        self, wire: Wire, body: Mapping[str, Any], prompt: list[int], name: str
    ) -> ChatRequest:
        # The session goes into a header, which must be ASCII.
        room = requests.count_room(body, len(prompt), self.context_length)
        session = name if name.isascii() else hashlib.sha256(name.encode()).hexdigest()
        session = session or new_id()
        model = self.extension.find_model(body.get("model")) if self.extension else self.model
        return make_request(wire, body, model, prompt, room, session, self.routed_experts)

    async def _reply(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        name: str,
        answers: list[ChatReply],
        pending: list[PendingTurn],
    ) -> web.Response:
        """Record the turns of whole answers, and return them as one."""
        with_bundle = self._wants_bundle(body)
        choices, turns = [], []
        for index, (answer, turn) in enumerate(zip(answers, pending, strict=True)):
            choice = replies.convert_choice(answer.raw, index, body)
            message = choice.get("message")  # a text completion has none
            turns.append(turn.complete(answer.completion, answer.ticket.version, message))
            if with_bundle:
                target = choice if message is None else message
                replies.add_bundle(target, answer, self.expert_strings)
            choices.append(choice)
        recorded = await self._record(pending[0].session, turns)
        shown = self.access.show(request[CALLER], name)
        return json_response(replies.join_choices(answers, choices, self.model, shown, recorded))

    async def _stream(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        upstream: Upstream,
        chat_request: ChatRequest,
        pending: PendingTurn,
        choices: int,
    ) -> web.StreamResponse:
        """Stream an answer; hold its last events back until the turn is recorded."""
        if choices > 1:
            raise UsageError("Only one choice can be streamed.", "Ask for n=1, or do not stream.")
        # Send nothing before the frontend has begun to answer: a refusal needs its own status.
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        streamed = replies.StreamedMessage()
        # Close at once: the worker must not continue to sample for a client that is gone.
        async with aclosing(upstream.stream(chat_request)) as parts:
            # The client must see the end only when the turn is complete and recorded.
            last_events: list[dict[str, Any]] = []
            try:
                async for part in parts:
                    if isinstance(part, ChatReply):
                        reply = part
                        continue
                    if not response.prepared:
                        await response.prepare(request)
                    streamed.add(part.raw)
                    shown = replies.convert_chunk(part.raw, body)
                    if shown is not None and (last_events or replies.ends_answer(shown)):
                        last_events.append(shown)
                    elif shown is not None:
                        await send_event(response, shown)
                message = streamed.message() if upstream is self.chat else None
                turn = pending.complete(reply.completion, reply.ticket.version, message)
                recorded = await self._record(pending.session, [turn])
            except ConnectionError:
                raise  # the client is gone
            except Exception as failure:
                if not response.prepared:
                    raise
                status, kind, text = self.explain(failure)
                await send_event(response, {"error": replies.make_error(text, kind, status)})
                return response
        if last_events and self._wants_bundle(body):
            choice = last_events[0]["choices"][0]
            replies.add_bundle(choice.get("delta", choice), reply, self.expert_strings)
        if last_events and not recorded:
            last_events[-1]["recorded"] = False
        for shown in last_events:
            await send_event(response, shown)
        await send_data(response, b"[DONE]")
        return response

    def explain(self, failure: Exception) -> tuple[int, str, str]:
        """Return the status, kind and message of a failure that a client may see."""
        return replies.explain(failure)

    async def _record(self, session: Session, turns: list[Turn]) -> bool:
        """Record the turns of an answer; return False when their session was deleted."""
        return not session.name or await self.store.record(session, turns)

    async def parse(self, request: web.Request) -> dict[str, Any]:
        """Decode and check the body of a request."""
        work = partial(requests.parse, request[BODY])
        return await self.run_work(request, work, "Decoding the body")

    async def _read_messages(
        self, request: web.Request, body: Mapping[str, Any]
    ) -> tuple[list[Message], list[str]]:
        """Return the messages of a chat and the digests of their history."""

        def read() -> tuple[list[Message], list[str]]:
            messages = requests.read_messages(body)
            if self.exact:
                check_contiguous(messages, self.template.tokenizer)
            return messages, chain(messages)

        return await self.run_work(request, read, "Reading the messages")

    async def run_work(self, request: web.Request, work: Callable[[], T], what: str) -> T:
        """Return the result of `work`; run it in a thread if the request has a long body."""
        if len(request[BODY]) < _LONG_BODY:
            return work()
        return await self.template.threads.run(work, what)

    async def _all_ids(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Return the token ids of all prompts, tokenized at once."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        tokenized = iter(await self.template.encode_all(texts))
        all_ids = [next(tokenized) if isinstance(prompt, str) else prompt for prompt in prompts]
        if not all(all_ids):
            raise UsageError("The prompt has no token.", "Send at least one character.")
        return all_ids

    async def _receive(self, request: web.Request, body: bytearray) -> None:
        """Read the body of a request, and count its bytes as they arrive."""
        most = request.client_max_size
        async for chunk in request.content.iter_any():
            size = len(body) + len(chunk)
            if size > most:
                raise web.HTTPRequestEntityTooLarge(most, size)
            self._budget.take(_count_bytes(size) - _count_bytes(len(body)))
            body += chunk

    def _wants_bundle(self, body: Mapping[str, Any]) -> bool:
        if self.bundle != "asked":
            return self.bundle == "always"
        fields = ("return_token_ids", "return_tokens_as_token_ids", "required_prefix_token_ids")
        return any(body.get(name) for name in fields)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check access, wait for the body, and give every failure OpenAI's form."""
        connection, body = request.protocol, bytearray()
        request[BODY] = body
        try:
            request[CALLER] = self.access.admit(request)
            if request.method == "POST":
                self.connections.mark_receiving(connection)
                await self._receive(request, body)
            self.connections.mark_answering(connection)
            if self.extension is not None:
                await self.extension.admit(request)
            return await handler(request)
        except ConnectionError:
            # The client is gone, or does not read; a plain close would wait until it does.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)  # nobody receives it
        except Exception as failure:  # noqa: BLE001 - the last guard: it is answered and logged
            return replies.make_refusal(failure, self.explain(failure))
        finally:
            self._budget.give_back(_count_bytes(len(body)))
            self.connections.mark_idle(connection)


def _count_bytes(size: int) -> int:
    """Return how many bytes of a body count against the budget."""
    return max(0, size - _SMALL_BODY)
