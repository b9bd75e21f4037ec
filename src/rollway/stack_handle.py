"""A running stack for async code. `rollway.sync` has the same for code without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from rollway.errors import NoWorkers, RequestFailed, Unreachable, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.foreign import Answer, make_canary
from rollway.fleet.recording import DriverHistory
from rollway.fleet.report import RefitMode, RefitReport, SleepReport
from rollway.fleet.updates import Weights
from rollway.fleet.vllm_admin import VllmAdmin
from rollway.fleet.workers import RlListing, Source, StaticList, Worker
from rollway.http import Http
from rollway.observe.record import Recorder as RunRecorder
from rollway.observe.traces import open_tracer
from rollway.publishing import (
    AsyncPublisher,
    OpenPublishers,
    PublisherOptions,
    Transport,
    open_for_stack,
)
from rollway.rollout.client import Rollouts
from rollway.rollout.sender import ClientOptions, Sender
from rollway.rollout.teacher import Teacher
from rollway.rollout.wire import VLLM, get_wire
from rollway.signed_calls import read_stack_secret
from rollway.spec import AdminTimeouts
from rollway.stack.running import LocalAccess, StackAccess
from rollway.stack.state import StackState, choose_attached_dir, find_record_dir
from rollway.weights.transports.base import Publisher

S = TypeVar("S", bound=Sender)


class Stack:
    """A running stack, for async code; `rollway.Stack` describes it.

    Example:
        async with rollway.up(model="/models/policy", workers=2) as stack:
            (rollout,) = await stack.rollouts().generate(prompt_ids)
            await stack.refit(1, "/checkpoints/step-1")
    """

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
        access: StackAccess | None = None,
        listing: Source | None = None,
        secret: str | None = None,
        record: bool = False,
        label: str = "",
    ) -> None:
        self.name = name
        self._access = access or (LocalAccess(name) if name else None)
        self.run_dir = run_dir
        self.frontend_url = frontend_url
        self.rl_url = rl_url
        self.models = models
        self._http = http
        self._timeouts = timeouts
        self._plain_vllm = plain_vllm
        self._listing = listing or RlListing(rl_url, frontend_url)
        self._secret = secret
        self._fleets = {model: self._make_fleet(model) for model in models}
        self._history = self._open_history(record, label or frontend_url)
        self.tracer = open_tracer()
        """Makes spans of refits and rollouts; None unless OpenTelemetry's variables are set."""
        for fleet in self._fleets.values():
            fleet.history, fleet.tracer = self._history, self.tracer
        self._watchers: list[asyncio.Task[None]] = []
        self._publishers = OpenPublishers()

    def _make_fleet(self, model: str) -> Fleet:
        """Make the fleet of a model; a stack of Rollway adds its lock, spec and supervisors."""
        if self._plain_vllm:
            listed = StaticList((self.frontend_url,), model)
            admin = VllmAdmin(self._http, self._timeouts)
            canary = make_canary(self._http, self.frontend_url, model, VLLM)
            return Fleet(self._http, listed, model=model, admin=admin, canary=canary)
        canary = make_canary(self._http, self.frontend_url, model)
        access, state = self._access, self.read_state()
        if access is None or state is None:
            return Fleet(
                self._http,
                self._listing,
                model=model,
                canary=canary,
                timeouts=self._timeouts,
                secret=self._secret,
            )
        fleet = Fleet(
            self._http,
            self._listing,
            model=model,
            timeouts=self._timeouts or AdminTimeouts(**state.timeouts),
            roots=[Path(root) for root in state.checkpoint_roots],
            reference=Path(state.model_paths.get(model, "")),
            canary=canary,
            replace=access.replace_worker,
            guard=partial(access.hold_refit_lock, model),
            supervised=access.is_supervised,
            record=access.open_record(model),
            secret=access.read_secret(),
        )
        fleet.versions.tainted = True  # the launcher gave every worker the taint of its version
        return fleet

    def _open_history(self, record: bool, label: str) -> DriverHistory | None:
        """Open this process's part of the record; None for a stack that is not recorded. One that
        Rollway did not start is recorded here alone, if `record`, and called by its `label`."""
        state = self.read_state()
        if state is None and record:
            own = choose_attached_dir(label)
            return DriverHistory(own, label, own.name)
        directory = None if state is None else find_record_dir(state)
        if state is None or directory is None:
            return None
        return DriverHistory(directory, state.name, state.run_id)

    @property
    def record_dir(self) -> Path | None:
        """Where this stack is recorded; None if it is not."""
        return None if self._history is None else self._history.recorder.directory

    @property
    def run_recorder(self) -> RunRecorder | None:
        """What writes this process's part of the record; None if the stack is not recorded."""
        return None if self._history is None else self._history.recorder

    def close_history(self) -> None:
        """Write the rest of this process's part of the record."""
        if self._history is not None:
            self._history.close()
        if self.tracer is not None:
            self.tracer.flush()

    def read_state(self) -> StackState | None:
        """Read the state of the processes; None for a stack that Rollway did not start."""
        return None if self._access is None else self._access.read_state()

    @property
    def weights_secret(self) -> str:
        """The secret that offers of weights are signed with."""
        if self._access is None or self.read_state() is None:
            return read_stack_secret() if self._secret is None else self._secret
        return self._access.read_secret()

    def find_checkpoint(self, model: str | None) -> str | None:
        """Return the checkpoint that a model was started from; None if this process cannot know."""
        state = self.read_state()
        return None if state is None else state.model_paths.get(model or "")

    @property
    def join_spec(self) -> dict[str, Any]:
        """Fields for the spec of workers that join this stack, with the secret."""
        state = self.read_state()
        if state is None:
            raise UsageError(
                "Only a stack of this machine or of this Ray cluster can say how to join it.",
                "Run `rollway status NAME --json` on the machine where it was started.",
            )
        join = {**state.join_spec["join"], "secret": self.weights_secret}
        return {**state.join_spec, "join": join}

    @property
    def fleet(self) -> Fleet:
        """The workers of the only model; `fleet_of` returns those of one of several."""
        return self.fleet_of(None)

    def fleet_of(self, model: str | None) -> Fleet:
        """Return the workers of a model.

        Args:
            model: the name of a served model; None for the only one.

        Raises:
            UsageError: the stack does not serve it, or serves several and none is named.
        """
        return self._fleets[self._find_model(model)]

    def rollouts(self, model: str | None = None, **options: Unpack[ClientOptions]) -> Rollouts:
        """Return a client that samples.

        Args:
            model: the name of a served model; None for the only one.
            concurrency: how many requests may be in flight (default 256).
            timeout: seconds for one rollout, with all retries (default 3600).
            patience: seconds without progress after which a rollout fails (default 60).
            wire: the kind of frontend: "completions" (Dynamo, default) or "vllm".
            adapter: a LoRA adapter: one version, "name@version", or the newest loaded, "name".

        Raises:
            UsageError: an unknown model, wire or adapter.

        Example:
            group = stack.rollouts().generate(prompt_ids, rollway.Sampling(max_tokens=64), n=8)
        """
        return self.sender(Rollouts, model, **options)

    def teacher(self, model: str | None = None, **options: Unpack[ClientOptions]) -> Teacher:
        """Return a client that scores sequences; arguments and errors as for `rollouts`.

        Example:
            (scores,) = stack.teacher().score([rollout.prompt_ids + rollout.token_ids])
        """
        return self.sender(Teacher, model, **options)

    def sender(
        self, kind: type[S], model: str | None = None, **options: Unpack[ClientOptions]
    ) -> S:
        """Return a client of another kind, for example the gateway's."""
        model = self._find_model(model)
        fleet = self._fleets[model]
        remaining: dict[str, Any] = dict(options)
        wire = remaining.pop("wire", "vllm" if self._plain_vllm else "completions")
        adapter = remaining.pop("adapter", None)
        client = kind(
            self._http,
            self.frontend_url,
            model,
            fleet.versions,
            refresh=fleet.refresh,
            still_serves=fleet.still_serves,
            wire=get_wire(wire) if isinstance(wire, str) else wire,
            adapter=None if adapter is None else fleet.adapters.newest(adapter),
            **remaining,
        )
        client.tally = None if self._history is None else self._history.tally
        client.tracer = self.tracer
        return client

    async def context_length(self, model: str | None = None) -> int:
        """Return how many tokens, prompt included, a model accepts.

        Args:
            model: the name of a served model; None for the only one.

        Raises:
            RequestFailed: the frontend does not report it.
        """
        model = self._find_model(model)
        answer = await self._http.get(f"{self.frontend_url}/v1/models", timeout=10.0)
        for entry in answer["data"]:
            length = entry.get("context_window") or entry.get("max_model_len")
            if entry["id"] == model and isinstance(length, int):
                return length
        raise RequestFailed(
            f"The frontend does not say how long the context of `{model}` is.", status=200
        )

    def publisher(
        self,
        transport: Transport = "auto",
        model: str | None = None,
        **options: Unpack[PublisherOptions],
    ) -> AsyncPublisher:
        """Return a publisher of new weights, for `async with`; its methods are coroutines.

        Arguments and errors are those of `rollway.Stack.publisher`."""
        loop = asyncio.get_running_loop()

        def count_receivers() -> int:  # runs in the thread of `publish`
            counting = self.count_receivers(model)
            return asyncio.run_coroutine_threadsafe(counting, loop).result()

        async def open_publisher() -> Publisher:
            workers = await self.fleet_of(model).workers()
            return await asyncio.to_thread(
                partial(self.open_publisher, transport, model, options, workers, count_receivers)
            )

        return AsyncPublisher(open_publisher)

    def open_publisher(
        self,
        transport: Transport,
        model: str | None,
        options: PublisherOptions,
        workers: list[Worker],
        count_receivers: Callable[[], int],
    ) -> Publisher:
        """Open a publisher in this thread; `publisher` calls it with the workers it found."""
        model = self._find_model(model)
        publisher = open_for_stack(
            transport,
            options,
            stack=self.name or "attached",
            secret=self.weights_secret,
            checkpoint=self.find_checkpoint(model) or "",
            workers=workers,
            count_receivers=count_receivers,
            run_dir=self.run_dir,
        )
        self._publishers.add(publisher, model)
        return publisher

    async def count_receivers(self, model: str | None = None) -> int:
        """Return how many ranks receive a version: every rank of every worker that answers."""
        workers = await self.fleet_of(model).workers()
        return sum(worker.world_size for worker in workers if worker.error is None)

    async def refit(
        self,
        version: int | Weights,
        update: Weights | None = None,
        *,
        model: str | None = None,
        mode: RefitMode = "pause-all",
        share: float = 0.5,
        expected: Answer | None = None,
        allow_cast: bool = False,
    ) -> RefitReport:
        """Load new weights into every worker, and return when all of them serve the version.

        Once it has returned, the trainer may change the published weights again.

        Args:
            version: the number of the version, higher than all before. It may be left out: an offer
                has its own, and a checkpoint directory gets `next_version`.
            update: an offer of a publisher, or a checkpoint directory that all workers can read.
            model: the name of a served model; None for the only one.
            mode: "pause-all" pauses all workers at once, after running requests have finished;
                "in-flight" interrupts running requests and resumes them on the new weights;
                "rolling" updates a share of the workers at a time, so that generation never stops.
            share: with "rolling", the share of the workers that is updated at a time.
            expected: what the canary must answer afterwards; by default the workers must agree.
            allow_cast: accept another dtype than the served one.

        Returns:
            The state and the times of every worker.

        Raises:
            RefitError: not every worker serves the version; its `report` says which do.
            UsageError: a version that is not new or not the offer's, or weights that do not fit
                the model.
            WeightsError: published weights that are damaged, incomplete or gone.

        Example:
            report = stack.refit(weights.publish(stack.next_version, model.named_parameters()))
        """
        model = self._find_model(model)
        async with self._publishers.complete(version if update is None else update, model):
            return await self._fleets[model].refit(
                version, update, mode=mode, share=share, expected=expected, allow_cast=allow_cast
            )

    @property
    def version(self) -> int | None:
        """The version of new rollouts of the only model, as far as this process knows: 0 before the
        first refit, None where workers declare none. Another process's refit is known once the
        workers were asked, as by a rollout or `Fleet.read_versions`."""
        return self.fleet.versions.current

    @property
    def next_version(self) -> int:
        """The number for the next refit of the only model, above all that this process knows or has
        published, and all that the stack's record has."""
        published = self._publishers.find_next_version(self._find_model(None))
        return max(self.fleet.next_version, published)

    async def sleep(
        self, level: int = 1, mode: Literal["wait", "abort"] = "wait", *, model: str | None = None
    ) -> SleepReport:
        """Let every worker release its memory, for a trainer on the same devices.

        Sleeping workers get no requests: rollouts wait for as long as their `patience`, then fail.
        Workers on a GPU need `enable-sleep-mode: true` in the model's args; on CPU they stop, but
        keep their memory.

        Args:
            level: 1 keeps the weights in the host's memory, for `wake`; 2 forgets them, and only a
                refit brings the workers back. Both drop the KV cache.
            mode: "wait" lets running requests finish, "abort" ends them; their rollouts continue
                after the wake.
            model: the name of a served model; None for the only one.

        Returns:
            The memory of every worker before and asleep, and the seconds of each step.

        Raises:
            UsageError: an engine on a GPU without sleep mode; nothing was changed.
            AdminError: a worker refused, or does not answer; the others were woken.

        Example:
            stack.sleep(level=2)
            train_one_step(model)
            stack.refit(step, weights.publish(step, model.named_parameters()))
        """
        return await self.fleet_of(model).sleep(level, mode)

    async def wake(self, *, model: str | None = None) -> SleepReport:
        """Return workers that sleep at level 1 to service, with the version that they had.

        A refit wakes workers too, at both levels: before a refit this call is not needed.

        Args:
            model: the name of a served model; None for the only one.

        Returns:
            The memory of every worker before the sleep, asleep and now, and the seconds.

        Raises:
            AdminError: a worker could not take its memory back; it stays asleep, and may be woken
                again.
        """
        return await self.fleet_of(model).wake()

    async def learn(self, *, watch: bool = True) -> None:
        """Ask the workers which version they serve; with `watch`, then follow joins and leaves.

        Mockers and stacks without RL have no versions: rollouts have `weight_version=None`."""
        for fleet in self._fleets.values():
            with contextlib.suppress(Unreachable, RequestFailed, NoWorkers):
                await fleet.read_versions()
            if watch:
                self._watchers.append(asyncio.create_task(fleet.watch()))

    async def unwatch(self) -> None:
        """Stop watching the workers."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()

    def _find_model(self, model: str | None) -> str:
        if model is None and len(self.models) == 1:
            return self.models[0]
        if model in self._fleets:
            return str(model)
        served = ", ".join(self.models)
        if model is None:
            raise UsageError(f"The stack serves several models: {served}.", "Name one of them.")
        raise UsageError(f"The stack does not serve `{model}`.", f"It serves: {served}.")
