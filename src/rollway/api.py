"""`rollway.up` and `rollway.attach`: a stack as a context manager, sync and async in one word.

    with rollway.up(model="/models/tiny", workers=2) as stack:          # blocking
        group = stack.rollouts().generate([1, 2, 3], n=4)

    async with rollway.up("stack.yaml") as stack:                       # the same, awaited
        group = await stack.rollouts().generate([1, 2, 3], n=4)

`up` owns what it starts: leaving the block stops the stack, and so does the death of this process.
`attach` talks to a stack that runs elsewhere, and leaves it running.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rollway.config import AdminTimeouts, StackSpec, load_spec
from rollway.errors import (
    NoWorkers,
    RequestFailed,
    RollwayError,
    StartError,
    Unreachable,
    UsageError,
)
from rollway.fleet.canary import canary
from rollway.fleet.discovery import StaticList
from rollway.fleet.fleet import Fleet, RefitReport
from rollway.fleet.updates import Weights
from rollway.fleet.vllm_admin import VllmAdmin
from rollway.http import ONCE, Http
from rollway.orders import stack_secret
from rollway.rollout.client import Rollouts
from rollway.rollout.sender import Sender
from rollway.rollout.teacher import Teacher
from rollway.rollout.wire import wire_named
from rollway.stack import local
from rollway.stack.local import Progress, RunningStack
from rollway.stack.locks import machine_lock
from rollway.stack.state import StackDir, StackState, WeightsFile, known_stacks, secret_of
from rollway.sync import Portal, SyncStack
from rollway.weights.adapter import is_adapter

S = TypeVar("S", bound=Sender)

DEFAULT_RL_PORT = 8001  # Dynamo's, where nobody chose another


class Stack:
    """A running stack, for async code: its addresses, its fleet, its rollouts."""

    def __init__(
        self,
        http: Http,
        frontend_url: str,
        rl_url: str,
        models: list[str],
        name: str = "",
        run_dir: Path | None = None,
        timeouts: AdminTimeouts | None = None,
        plain_vllm: bool = False,
    ) -> None:
        self.name = name
        self.run_dir = run_dir
        """A scratch directory that goes when the stack goes, however it ends; of a stack that this
        process started."""
        self.frontend_url = frontend_url
        self.rl_url = rl_url
        self.models = models
        self._http = http
        self._timeouts = timeouts
        self._plain_vllm = plain_vllm
        self._fleets = {model: self._new_fleet(model) for model in models}
        self._watching: list[asyncio.Task[None]] = []

    def _new_fleet(self, model: str) -> Fleet:
        """A stack of this machine has more to offer: a lock, its spec, and a supervisor."""
        if self._plain_vllm:
            return Fleet(
                self._http,
                StaticList((self.frontend_url,), model),
                model=model,
                admin=VllmAdmin(self._http, self._timeouts),
            )
        ask = canary(self._http, self.frontend_url, model)
        state = StackDir(self.name).read() if self.name else None
        if state is None:
            return Fleet(self._http, self.rl_url, model=model, canary=ask, timeouts=self._timeouts)
        fleet = Fleet(
            self._http,
            self.rl_url,
            model=model,
            timeouts=self._timeouts or AdminTimeouts(**state.timeouts),
            roots=[Path(root) for root in state.checkpoint_roots],
            reference=Path(state.model_paths.get(model, "")),
            canary=ask,
            replace=partial(local.replace_worker, self.name),
            guard=partial(machine_lock, f"refit/{state.run_id}/{model}"),
            supervised=partial(local.supervises, self.name),
            shelf=WeightsFile(self.name, state.run_id, model),
            secret=secret_of(state),
        )
        fleet.versions.tainted = True  # the launcher has done it
        return fleet

    @property
    def weights_secret(self) -> str:
        """What offers of weights to this stack's workers are signed with; a catalog of weights
        needs it too. Empty for a stack that this user did not start on this machine."""
        state = StackDir(self.name).read() if self.name else None
        return stack_secret() if state is None else secret_of(state)

    @property
    def invitation(self) -> dict[str, Any]:
        """Fields for the spec of workers that join this stack, also from another machine. They
        hold the secret that weights are signed with; of a stack that this user started here."""
        state = StackDir(self.name).read() if self.name else None
        if state is None:
            raise UsageError(
                "Only a stack that runs on this machine can say how to join it.",
                "Ask there: `rollway status NAME --json`.",
            )
        join = {**state.invitation["join"], "secret": secret_of(state)}
        return {**state.invitation, "join": join}

    @property
    def fleet(self) -> Fleet:
        """The workers of the only model; with several models use `fleet_of`."""
        return self.fleet_of(None)

    def fleet_of(self, model: str | None) -> Fleet:
        return self._fleets[self._model(model)]

    def rollouts(self, model: str | None = None, **options: Any) -> Rollouts:
        """A client for generating; options are those of `Sender`, and `wire` may be a name. With
        `adapter` it samples with that LoRA adapter: one version, `name@version`, or the newest that
        this process has loaded by then, `name`."""
        return self.sender(Rollouts, model, **options)

    def teacher(self, model: str | None = None, **options: Any) -> Teacher:
        """A client for scoring sequences; options as for `rollouts`."""
        return self.sender(Teacher, model, **options)

    def sender(self, kind: type[S], model: str | None = None, **options: Any) -> S:
        """Any client that sends what a ticket of the fleet allows."""
        chosen = self._model(model)
        fleet = self._fleets[chosen]
        wire = options.pop("wire", "vllm" if self._plain_vllm else "completions")
        adapter = options.pop("adapter", None)
        return kind(
            self._http,
            self.frontend_url,
            chosen,
            fleet.versions,
            refresh=fleet.refresh,
            confirms=fleet.confirms,
            wire=wire_named(wire) if isinstance(wire, str) else wire,
            adapter=None if adapter is None else fleet.adapters.newest(adapter),
            **options,
        )

    async def context_length(self, model: str | None = None) -> int:
        """How many tokens, prompt included, the model takes."""
        chosen = self._model(model)
        answer = await self._http.get(f"{self.frontend_url}/v1/models", timeout=10.0)
        for entry in answer["data"]:
            length = entry.get("context_window") or entry.get("max_model_len")
            if entry["id"] == chosen and isinstance(length, int):
                return length
        raise RequestFailed(
            f"The frontend does not say how long a context `{chosen}` takes.", status=200
        )

    async def refit(self, version: int, update: Weights, **options: Any) -> RefitReport:
        """Bring all workers of the only model to new weights; see `Fleet.refit`."""
        return await self.fleet.refit(version, update, **options)

    async def learn(self, *, watch: bool = True) -> None:
        """Ask the workers which version they serve, and go on noticing who joins and leaves.
        Mockers and stacks without RL have no versions, and their rollouts say so
        (`weight_version=None`)."""
        for fleet in self._fleets.values():
            with contextlib.suppress(Unreachable, RequestFailed, NoWorkers):
                await fleet.read_versions()
            if watch:
                self._watching.append(asyncio.create_task(fleet.watch()))

    async def unwatch(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching.clear()

    def _model(self, model: str | None) -> str:
        if model is None and len(self.models) == 1:
            return self.models[0]
        if model in self._fleets:
            return str(model)
        served = ", ".join(self.models)
        if model is None:
            raise UsageError(f"The stack serves several models: {served}.", "Name one of them.")
        raise UsageError(f"The stack does not serve `{model}`.", f"It serves: {served}.")


class _Opening:
    """What `up` and `attach` return: enter it with `with` or with `async with`."""

    def __init__(self) -> None:
        self._http = Http()
        self._portal: Portal | None = None
        self._stack: Stack | None = None
        self._watch = True

    async def _open(self) -> Stack:
        raise NotImplementedError

    async def _close(self) -> None:
        if self._stack is not None:
            await self._stack.unwatch()
        await self._http.close()

    async def __aenter__(self) -> Stack:
        try:
            self._stack = await self._open()
            await self._stack.learn(watch=self._watch)
            return self._stack
        except BaseException:
            await self._close()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    def __enter__(self) -> SyncStack:
        self._portal = Portal()
        try:
            return SyncStack(self._portal.run(self.__aenter__()), self._portal)
        except BaseException:
            self._portal.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._portal is not None
        try:
            self._portal.run(self._close())
        finally:
            self._portal.close()


class _Up(_Opening):
    def __init__(self, spec: StackSpec, progress: Progress | None) -> None:
        super().__init__()
        self._spec = spec
        self._watch = spec.join is None  # who started the frontend brings joiners up to date
        self._progress = progress
        self._running: RunningStack | None = None

    async def _open(self) -> Stack:
        self._running = await self._start()
        state = self._running.state
        return Stack(
            self._http, state.frontend, state.rl, state.models, state.name, Path(state.run_dir)
        )

    async def _start(self) -> RunningStack:
        """Start in a thread; cancelling this coroutine ends the start and waits for its end."""
        cancelled = threading.Event()

        def watch(state: StackState) -> None:
            if cancelled.is_set():
                cancelled.clear()  # once is enough: what follows is the stop, to be waited for
                raise StartError("The start was cancelled.")
            if self._progress is not None:
                self._progress(state)

        thread = asyncio.ensure_future(asyncio.to_thread(local.start, self._spec, watch))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            cancelled.set()
            with contextlib.suppress(RollwayError):
                # Ready at the very moment of the cancel: then it is ours to stop.
                self._running = await thread
            raise

    async def _close(self) -> None:
        await super()._close()
        running, self._running = self._running, None
        if running is not None:
            await asyncio.shield(asyncio.to_thread(running.stop, self._progress))


class _Attach(_Opening):
    def __init__(
        self, target: str, rl_url: str | None, watch: bool, timeouts: AdminTimeouts | None
    ) -> None:
        super().__init__()
        self._watch = watch
        self._timeouts = timeouts
        self._frontend, self._rl, self._name = _addresses(target, rl_url)

    async def _open(self) -> Stack:
        url = f"{self._frontend}/v1/models"
        try:
            answer = await self._http.get(url, timeout=10.0, retry=ONCE)
            named = [str(entry["id"]) for entry in answer["data"]]
            models = [name for name in named if not is_adapter(name)]
            plain_vllm = any(entry.get("owned_by") == "vllm" for entry in answer["data"])
        except Unreachable as error:
            raise Unreachable(
                f"No Dynamo frontend answers at {self._frontend}: {error.message}",
                "Is it running, and is the address right? `rollway status` lists local stacks.",
            ) from error
        except (RequestFailed, KeyError, TypeError) as error:
            raise RequestFailed(
                f"What answers at {self._frontend} is not a Dynamo frontend ({error}).",
                "Give the frontend's address, for example http://127.0.0.1:8000.",
                status=getattr(error, "status", 200),
            ) from error
        if self._name:  # while its only worker starts anew, a model is not listed
            state = StackDir(self._name).read()
            models = state.models if state is not None else models
        if not models:
            raise RollwayError(
                f"The frontend at {self._frontend} serves no model yet.",
                "Wait for its workers to register, then attach again.",
            )
        return Stack(
            self._http,
            self._frontend,
            self._rl,
            models,
            self._name,
            timeouts=self._timeouts,
            plain_vllm=plain_vllm,
        )


def up(
    spec: StackSpec | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | None = None,
    workers: int | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    **fields: Any,
) -> _Up:
    """Start a stack from a spec, a YAML file, or just a model path; ready when entered."""
    return _Up(
        make_spec(spec, model=model, workers=workers, overrides=overrides, **fields), progress
    )


def attach(
    target: str,
    *,
    rl_url: str | None = None,
    watch: bool = True,
    timeouts: AdminTimeouts | None = None,
) -> _Attach:
    """Use a running stack, by the frontend's address or by the name of a local stack; a plain vLLM
    server will do as well (with VLLM_SERVER_DEV_MODE=1, for refits). With `watch`,
    workers that join meanwhile are noticed and brought up to date. `timeouts` bound the calls to
    its workers; a local stack's are in its spec."""
    return _Attach(target, rl_url, watch, timeouts)


def make_spec(
    spec: StackSpec | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | None = None,
    workers: int | None = None,
    overrides: Sequence[str] = (),
    **fields: Any,
) -> StackSpec:
    """The spec that `up` would run; `workers` is the replica count of the single model."""
    if model is not None:
        fields["models"] = [{"path": str(model)}]
    if workers is not None:
        overrides = [*overrides, f"models.0.replicas={workers}"]
    return load_spec(spec, overrides, **fields)


def _addresses(target: str, rl_url: str | None) -> tuple[str, str, str]:
    if "://" not in target:
        state = StackDir(target).read()
        if state is None or not state.supervised:
            raise local.not_running(target)
        return state.frontend, rl_url or state.rl, target
    frontend = target.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(frontend)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise UsageError(f"`{target}` is not an HTTP address.", "Use http://host:port.")
    local_stack = _local_stack(host, port)
    if local_stack is not None:
        return frontend, rl_url or local_stack.rl, local_stack.name
    default = f"http://{f'[{host}]' if ':' in host else host}:{DEFAULT_RL_PORT}"
    return frontend, rl_url or default, ""


def _local_stack(host: str, port: int | None) -> StackState | None:
    """The recorded stack of this user whose frontend has that address."""
    if host not in ("localhost", "127.0.0.1", "::1"):
        return None
    states = (state for state in known_stacks() if state.supervised)
    return next((state for state in states if urlsplit(state.frontend).port == port), None)
