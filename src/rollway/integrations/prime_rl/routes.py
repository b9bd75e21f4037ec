"""The routes of a prime-rl inference server, beside the gateway's own.

    rollouts   POST /inference/v1/generate   POST /finish_session
    admin      POST /pause /update_weights /resume /init_broadcaster
               POST /load_lora_adapter /unload_lora_adapter
               GET /v1/rl/workers   POST /collective_rpc   (`virtual_worker`)
    both       GET /health /liveness /v1/models /metrics
               POST, GET /v1/rollway/trainer_logprobs

The handlers translate between HTTP and the parts that decide: `updates`, `lora`, `generate`,
`engine_metrics`. Admin calls need an operator's token where tokens are set. prime-rl repeats any
5xx and no 4xx, so everything that a repetition cannot cure is a 4xx.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from rollway.aio import Stack
from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.fleet.workers import Worker
from rollway.gateway.replies import Refused, json_response
from rollway.gateway.requests import parse
from rollway.gateway.server import BODY, CALLER, Gateway
from rollway.gateway.tokens import OPERATOR_TOKENS, check_name
from rollway.integrations.prime_rl.engine_metrics import EngineMetrics, format_gauges
from rollway.integrations.prime_rl.generate import GenerateRequest, Generator
from rollway.integrations.prime_rl.groups import read_request
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.trainer_logprobs import MismatchRecord
from rollway.integrations.prime_rl.updates import WeightUpdates
from rollway.integrations.prime_rl.virtual_worker import VirtualWorker
from rollway.rollout.client import Rollouts
from rollway.rollout.teacher import Teacher

log = logging.getLogger(__name__)

Plane = Literal["rollouts", "admin", "both"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SESSION_HEADER = "x-session-id"
LIVENESS_SECONDS = 30.0
_UNBOUNDED = 1_000_000  # the number of connections bounds it
_SAMPLING_PATHS = {"/inference/v1/generate", "/v1/chat/completions", "/v1/completions"}
_PAUSE_MODES = ("keep", "wait", "abort")
_MAX_SESSIONS = 100_000


@dataclass(slots=True)
class PrimeRl:
    """prime-rl's view of one served model: an extension of its gateway."""

    stack: Stack
    model: str
    name: str
    """What prime-rl calls the model: it loads the rollout tokenizer by this name."""
    context_length: int
    updates: WeightUpdates
    adapters: AdapterAliases
    metrics: EngineMetrics
    experts: int | None = None
    """The number of experts of the model, if replies carry those of each token."""
    plane: Plane = "both"
    mismatches: MismatchRecord = field(default_factory=MismatchRecord)
    gateway: Gateway | None = None
    """Answers chats; set once it is made."""
    _generators: dict[str, Generator] = field(default_factory=dict)
    _ended: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """How often each session was ended: its next request begins a new affinity."""

    # --- the gateway's extension -----------------------------------------------------------------

    def add_routes(self, router: web.UrlDispatcher) -> None:
        for path, handler in (
            ("/health", self.show_health),
            ("/liveness", self.show_liveness),
            ("/v1/models", self.list_models),
            ("/metrics", self.show_metrics),
        ):
            router.add_get(path, handler)
        path = "/v1/rollway/trainer_logprobs"
        router.add_post(path, self._for_operators(self.compare_logprobs))
        router.add_get(path, self._for_operators(self.show_mismatch))
        if self.plane != "admin":
            router.add_post("/inference/v1/generate", self.generate)
            router.add_post("/finish_session", self.finish_session)
        if self.plane != "rollouts":
            for path, handler in (
                ("/pause", self.pause),
                ("/update_weights", self.update_weights),
                ("/resume", self.resume),
                ("/init_broadcaster", self.init_broadcaster),
                ("/load_lora_adapter", self.load_adapter),
                ("/unload_lora_adapter", self.unload_adapter),
            ):
                router.add_post(path, self._for_operators(handler))
            router.add_get("/v1/rl/workers", self.list_workers)
            router.add_post("/collective_rpc", self._for_operators(self.call_method))

    async def admit(self, request: web.Request) -> None:
        """Let requests for new tokens wait at the gate."""
        if request.path in _SAMPLING_PATHS:
            if self.plane == "admin":
                raise Refused(404, "This address is for admin calls.", kind="not_found")
            await self.updates.wait_open()

    def find_model(self, name: Any) -> str:
        """Return the model or the version of an adapter that a request means."""
        if name in (None, "", self.model, self.name):
            return self.model
        served = self.adapters.find(name) if isinstance(name, str) else None
        if served is None:
            raise Refused(
                404,
                f"The model `{name}` is not served.",
                f"Use `{self.name}`, or the name of an adapter that was loaded.",
                kind="not_found",
            )
        return served

    async def close(self) -> None:
        """End what runs in the background."""
        await self.metrics.close()
        await self.updates.close()
        await self.adapters.close()

    # --- rollouts --------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.Response:
        assert self.gateway is not None
        body = await self.gateway.parse(request)
        wanted = GenerateRequest.read(
            body, self.context_length, routed_experts=self.experts is not None
        )
        generator = self._get_generator(self.find_model(wanted.model))
        reply = await generator.answer(wanted, self._name_session(request))
        self.mismatches.remember(reply)
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    async def finish_session(self, request: web.Request) -> web.Response:
        session = check_name(request.query.get("session_id", ""))
        if not session:
            raise UsageError("session_id is missing.", "Send /finish_session?session_id=….")
        self._ended[session] = self._ended.pop(session, 0) + 1
        if len(self._ended) > _MAX_SESSIONS:
            self._ended.popitem(last=False)
        return json_response({"status": "ok"})

    def _name_session(self, request: web.Request) -> str:
        """Return the session id that keeps a client's session on one worker; empty for none."""
        session = check_name(request.headers.get(SESSION_HEADER, ""))
        if not session.isascii():
            raise UsageError(f"{SESSION_HEADER} must be ASCII.")
        ended = self._ended.get(session, 0)
        return f"{session}#{ended}" if ended else session

    def _get_generator(self, served: str) -> Generator:
        if served not in self._generators:
            adapter = None if served == self.model else served
            options: dict[str, Any] = {"adapter": adapter, "concurrency": _UNBOUNDED}
            self._generators[served] = Generator(
                self.stack.sender(Rollouts, self.model, **options),
                self.stack.sender(Teacher, self.model, **options),
                self.experts,
            )
            if len(self._generators) > 16:  # versions of adapters that nobody asks for any more
                self._generators.pop(next(iter(self._generators)))
        return self._generators[served]

    # --- state -----------------------------------------------------------------------------------

    async def show_health(self, request: web.Request) -> web.Response:
        """Answer 200 once a worker can be asked; prime-rl polls this until it starts."""
        answering = await self._list_answering()
        if not answering:
            raise Refused(503, "No worker answers yet.", kind="starting")
        state = {"status": "ok", "model": self.model, "workers": len(answering)}
        return json_response({**state, "answers": self.plane})

    async def show_liveness(self, request: web.Request) -> web.Response:
        """Answer 200 while an engine responds, in prime-rl's own words."""
        try:
            async with asyncio.timeout(LIVENESS_SECONDS):
                alive = bool(await self._list_answering(fresh=True))
        except TimeoutError:
            alive = False
        body = msgspec.json.encode({"status": "ok" if alive else "engine_unresponsive"})
        status = 200 if alive else 503
        return web.Response(body=body, status=status, content_type="application/json")

    async def list_models(self, request: web.Request) -> web.Response:
        own = {"object": "model", "owned_by": "rollway", "root": self.name}
        names = dict.fromkeys((self.name, self.model))
        entries = [{"id": name, **own} for name in names]
        entries += self.adapters.list_models(self.name)
        lengths = {"max_model_len": self.context_length}
        return json_response({"object": "list", "data": [{**e, **lengths} for e in entries]})

    async def show_metrics(self, request: web.Request) -> web.Response:
        updates, record = self.updates, self.updates.memory.record
        own = format_gauges(
            [
                ("rollway_gate_open", "Whether new requests are admitted.", updates.is_open),
                ("rollway_gate_waiting", "Requests that wait at the gate.", updates.waiting),
                ("rollway_weight_updates", "Updates that were started.", updates.updates),
                ("rollway_weight_update_failures", "Updates that failed.", updates.failures),
                ("rollway_policy_step", "The trainer's step that is served.", record.step or 0),
                ("rollway_weight_version", "Its weight version.", record.version or 0),
            ]
        )
        text = await self.metrics.read() + own + self.mismatches.format()
        return web.Response(text=text, content_type="text/plain")

    async def compare_logprobs(self, request: web.Request) -> web.Response:
        assert self.gateway is not None
        work = partial(self.mismatches.read, request[BODY])
        batch = await self.gateway.run_work(request, work, "Comparing log-probs")
        return json_response(self.mismatches.add(batch))

    async def show_mismatch(self, request: web.Request) -> web.Response:
        return json_response(self.mismatches.as_json())

    async def _list_answering(self, *, fresh: bool = False) -> list[Worker]:
        try:
            workers = await self.stack.fleet_of(self.model).workers(fresh=fresh)
        except RollwayError:
            return []
        return [worker for worker in workers if worker.error is None]

    # --- admin -----------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "keep")
        if mode not in _PAUSE_MODES:
            raise UsageError(f"mode is {mode!a}.", f"Use one of {', '.join(_PAUSE_MODES)}.")
        self.updates.pause()
        return json_response({"status": "paused"})

    async def update_weights(self, request: web.Request) -> web.Response:
        body = _read_object(request)
        directory = body.get("weight_dir")
        if not isinstance(directory, str) or not directory:
            raise UsageError("weight_dir is missing.", "Send the directory of the broadcast.")
        version = await self.updates.update(directory)
        return json_response({"status": "ok", "weight_version": version})

    async def resume(self, request: web.Request) -> web.Response:
        await self.updates.resume()
        return json_response({"status": "resumed"})

    async def init_broadcaster(self, request: web.Request) -> web.Response:
        """Form the group for broadcasts. prime-rl ignores the answer, so the next `/pause` has a
        failure too."""
        body = _read_object(request)
        await self.updates.init_broadcaster(lambda: read_request(body))
        return json_response({"status": "ok"})

    async def load_adapter(self, request: web.Request) -> web.Response:
        name, directory = _read_texts(request, "lora_name", "lora_path")
        await self.updates.refuse_adapters()
        try:
            served = await self.adapters.load(name, directory)
        except WeightsError as error:
            raise UsageError(error.message, error.hint) from error
        return json_response({"status": "ok", "lora_name": name, "served_as": served})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        (name,) = _read_texts(request, "lora_name")
        await self.adapters.unload(name)
        return json_response({"status": "ok"})

    # --- for `client.dynamo`, which discovers workers --------------------------------------------

    async def list_workers(self, request: web.Request) -> web.Response:
        error = "" if await self._list_answering() else "no worker answers yet"
        return json_response(self._make_worker().list_workers(_find_origin(request), error))

    async def call_method(self, request: web.Request) -> web.Response:
        return json_response(await self._make_worker().call_method(_read_object(request)))

    def _for_operators(self, handler: Handler) -> Handler:
        """Return the handler for callers who may change workers. prime-rl drops the reason of a
        refusal, so it is noted here."""

        async def check(request: web.Request) -> web.StreamResponse:
            if not request[CALLER].operator:
                raise Refused(
                    403,
                    "This token may sample, and not change workers.",
                    f"Use a token of {OPERATOR_TOKENS}.",
                    kind="permission_error",
                )
            try:
                response = await handler(request)
            except RollwayError as error:
                self._note_refusal(f"{request.path} was refused. {error}")
                raise
            if self.updates.memory.record.refusal.startswith(f"{request.path} "):
                self.updates.memory.note_refusal("")
            return response

        return check

    def _note_refusal(self, text: str) -> None:
        """Say it in the log, on the dashboard and in `rollway status`."""
        log.warning("%s", text)
        if self.stack.run_recorder is not None:
            self.stack.run_recorder.event("prime-rl call refused", text)
        self.updates.memory.note_refusal(text)

    def _make_worker(self) -> VirtualWorker:
        return VirtualWorker(self.name, self.updates)


def _find_origin(request: web.Request) -> str:
    """Return this server's address as the caller used it; never 0.0.0.0, which means another
    machine to everybody who reads it."""
    host = request.host
    if urlsplit(f"//{host}").hostname in ("0.0.0.0", "::") and request.transport is not None:
        address, port = request.transport.get_extra_info("sockname")[:2]  # of this connection
        host = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{request.scheme}://{host}"


def _read_object(request: web.Request) -> Mapping[str, Any]:
    return parse(request[BODY]) if request[BODY] else {}


def _read_texts(request: web.Request, *names: str) -> list[str]:
    body = _read_object(request)
    texts = [body.get(name) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str) or not text:
            raise UsageError(f"{name} must be a text.")
    return [str(text) for text in texts]
