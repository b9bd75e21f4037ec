"""All workers of a model as one object: list, pause, refit and resume them, know what each serves.

`refit` runs the protocol of rollway.fleet.refit. `watch` maintains the fleet between refits: a
worker that joins or restarts has the base checkpoint, and is moved to the current version before it
gets any requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.adapters import Adapters
from rollway.fleet.admin import (
    Facts,
    PauseMode,
    call_all,
    call_living,
    leaving_label,
    run_to_the_end,
    version_left,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.foreign import Answer, Ask, CanaryCheck
from rollway.fleet.recording import DriverHistory, RefitRecording
from rollway.fleet.refit import Observer, Refit, Replace, Supervised, split_in_stages
from rollway.fleet.report import RefitMode, RefitReport, SleepReport
from rollway.fleet.sleep import Sleeper, asleep_error
from rollway.fleet.updates import Recipes, Update, Weights
from rollway.fleet.workers import (
    POLL_SECONDS,
    Membership,
    RlListing,
    Source,
    Worker,
    no_workers_error,
    refuse_silent,
)
from rollway.http import Http
from rollway.observe.traces import Tracer
from rollway.signed_calls import read_stack_secret
from rollway.spec import AdminTimeouts
from rollway.versions import FleetVersions, Ticket, VersionRecord, taint_of
from rollway.weights.checkpoint import check_checkpoint
from rollway.weights.offer import Offer

log = logging.getLogger(__name__)

Guard = Callable[[], AbstractAsyncContextManager[Any]]
"""Returns a lock that keeps refits of one fleet apart, also those of several processes."""
ROUTING_SECONDS = 0.05
"""A router may still send requests that it placed before it received new taints (10 to 30 ms
measured)."""
_REFRESH_SECONDS = 1.0


class Fleet:
    """All RL workers of one model."""

    def __init__(
        self,
        http: Http,
        source: Source | str,
        *,
        model: str | None = None,
        timeouts: AdminTimeouts | None = None,
        admin: DynamoAdmin | None = None,
        roots: Sequence[Path] = (),
        reference: Path | None = None,
        canary: Ask | None = None,
        replace: Replace | None = None,
        guard: Guard = nullcontext,
        supervised: Supervised = lambda _: False,
        record: VersionRecord | None = None,
        secret: str | None = None,
    ) -> None:
        self.model = model
        self.versions = FleetVersions()
        self._secret = read_stack_secret() if secret is None else secret
        self.admin: DynamoAdmin = admin or DynamoAdmin(http, timeouts, self._secret)
        self.membership = Membership(
            http,
            RlListing(source) if isinstance(source, str) else source,
            model,
            note_roles=self.versions.note_roles,
        )
        self._refreshed_at = float("-inf")
        self.observer: Observer | None = None
        """Called with each step of a refit and its worker, before the step."""
        self.history: DriverHistory | None = None
        """Where refits, joins and leaves are recorded."""
        self.tracer: Tracer | None = None
        """Makes a span of each refit."""
        self.adapters = Adapters(self.admin, self._secret)
        self._sleeper = Sleeper(self.admin, self.versions, lambda worker: self._supervised(worker))
        self._roots = roots
        self._recipes = Recipes(roots, reference, self._secret, record)
        self._canary = canary
        self._replace = replace
        self._guard = guard
        self._supervised = supervised
        self._record = record
        self._lock = asyncio.Lock()
        self._waiting = 0
        """Refits that wait for the lock."""
        self._doubtful: set[int] = set()

    async def workers(self, *, fresh: bool = True) -> list[Worker]:
        """Return the workers that are listed, also those in error.

        Args:
            fresh: ask the frontend now; False may return a list that is a moment old.

        Returns:
            The workers; `error` says why one of them does not answer.

        Raises:
            Unreachable: the RL worker listing does not answer.
        """
        return await self.membership.workers(fresh=fresh)

    async def pause(self, mode: PauseMode = "wait", *, clear_cache: bool = True) -> None:
        """Pause every worker and remove it from routing, so that no request waits at a paused
        worker.

        If one worker fails, the others are resumed.

        Args:
            mode: "wait" lets running requests finish, "keep" freezes them, "abort" ends them; their
                rollouts continue after the resume.
            clear_cache: clear the prefix caches.

        Raises:
            AdminError: a worker refused, or does not answer.
            NoWorkers: no worker is listed.
        """
        async with self._lock, self._guard():
            workers = await self.membership.list_answering()
            self.versions.close(is_pause=True)
            try:
                for stage in split_in_stages(workers, mode, lambda worker: worker.role):
                    await call_living(stage, lambda w: self._pause(w, mode, clear_cache))
            except BaseException:
                await run_to_the_end(self._undo_pause(workers))
                raise

    async def resume(self) -> None:
        """Resume every worker whose weights are known.

        Raises:
            AdminError: a worker does not answer, or a refit left it between two versions; it
                stays paused.
        """
        async with self._lock, self._guard():
            workers = await self.workers()
            answering = [worker for worker in workers if worker.error is None]
            facts = await self._read_facts(answering)
            asleep = [w for w in answering if facts[w.instance_id].sleep_level]
            awake = [w for w in answering if w not in asleep]
            doubtful = [w for w in awake if (facts[w.instance_id].label or 0) < 0]
            try:
                await call_living([w for w in awake if w not in doubtful], self._put_back)
            finally:
                self.versions.open()
            await refuse_silent(workers)
            if doubtful:
                raise AdminError(
                    f"{len(doubtful)} of {len(workers)} workers were left between two versions and "
                    f"stay paused: {'; '.join(map(str, doubtful))}.",
                    "Refit them, or restart them.",
                )
            if asleep:
                raise asleep_error(asleep, len(workers))

    async def _undo_pause(self, workers: Sequence[Worker]) -> None:
        await call_all(workers, self._put_back)
        self.versions.open()

    async def _pause(self, worker: Worker, mode: PauseMode, clear_cache: bool) -> None:
        await self.admin.set_taints(worker, [])
        if mode == "keep":
            await self.admin.pause(worker, mode, clear_cache=clear_cache)
            return
        await self.admin.pause(worker, mode, clear_cache=False)
        # Requests that a router sent meanwhile would hang until the resume. With prefill and decode
        # apart, some may wait for KV, and vLLM does not clear its cache then.
        await asyncio.sleep(ROUTING_SECONDS)
        await self.admin.pause(worker, "abort", clear_cache=clear_cache)

    async def _put_back(self, worker: Worker) -> None:
        """Resume a worker with the version that its label declares. One that a refit has left
        between two versions is never resumed."""
        label = (await self.admin.read(worker)).label
        if label is None or label >= 0:
            await self.admin.resume(worker)
            await self.admin.set_taints(worker, [] if label is None else [taint_of(label)])

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> SleepReport:
        """Let every worker release its memory, until `wake` or the next refit.

        Sleeping workers get no requests. Rollouts wait for as long as their `patience`, then they
        fail. Workers that sleep already stay asleep; a worker that is still starting is left
        alone. If one worker fails, the others are woken.

        Args:
            level: 1 keeps the weights in the host's memory; 2 forgets them, so that only a refit
                brings the workers back.
            mode: "wait" lets running requests finish, "abort" ends them; their rollouts continue
                after the wake.

        Returns:
            The memory of every worker before and asleep, and the seconds of each step.

        Raises:
            UsageError: an engine on a GPU without sleep mode, or one that would lose more than a
                refit brings back; nothing was changed.
            AdminError: a worker refused, or does not answer.
            NoWorkers: no worker is listed.
        """
        async with self._lock, self._guard():
            self._learn_claims()
            return await self._sleeper.sleep(await self.membership.list_answering(), level, mode)

    async def wake(self) -> SleepReport:
        """Wake the workers that sleep at level 1, and return them to service with their version.

        Workers without weights stay asleep: the next refit wakes them. Workers that are awake stay
        as they are.

        Returns:
            The memory of every worker before the sleep, asleep and now, and the seconds.

        Raises:
            AdminError: a worker could not take its memory back, or does not answer. It stays
                asleep, and may be woken again.
        """
        async with self._lock, self._guard():
            self._learn_claims()
            workers = await self.workers()
            report = await self._sleeper.wake([w for w in workers if w.error is None])
            await refuse_silent(workers)
            return report

    async def flush_cache(self) -> None:
        """Clear the prefix cache of every worker.

        Raises:
            AdminError: a worker refused, or does not answer.
            NoWorkers: no worker is listed.
        """
        await call_living(await self.membership.list_answering(), self.admin.flush_cache)

    async def read_versions(self) -> dict[int, int | None]:
        """Return the version that each worker declares, by instance id.

        Returns:
            The version; None where a worker declares none or does not answer, a negative number
                while its weights change or after that failed.

        Raises:
            NoWorkers: no worker is listed.
            Unreachable: the RL worker listing does not answer.
        """
        versions, learned = self.versions, self.versions.learned
        workers = await self.membership.workers(fresh=True)
        if not workers:
            raise no_workers_error(self.membership.source)
        facts = await self._read_facts(workers)
        labels = {instance: each.label for instance, each in facts.items()}
        # A refit of this process knows better than labels that were read while it ran.
        if versions.learned == learned and not versions.changing:
            versions.learn(
                {i: label for i, label in labels.items() if label is not None and label >= 0},
                [i for i, each in facts.items() if each.sleep_level],
                [i for i, each in facts.items() if each.is_paused],
            )
            # Of workers that sleep, or that a refit is about to change: no version goes back.
            for label in labels.values():
                if (version := version_left(label)) is not None:
                    versions.note_served(version)
        return labels

    async def _read_facts(self, workers: Sequence[Worker]) -> dict[int, Facts]:
        """Return what these workers say of themselves, by their ids; nothing is known of those that
        do not answer."""
        answering = [worker for worker in workers if worker.error is None]
        results = await call_all(answering, self.admin.read)
        facts = {worker.instance_id: Facts(None) for worker in workers}
        for worker, result in zip(answering, results, strict=True):
            if isinstance(result, Facts):
                facts[worker.instance_id] = result
                self.versions.note_facts(worker.instance_id, is_foreign=not result.enforces)
        return facts

    async def is_paused(self, worker: Worker) -> bool:
        """Return whether a worker was paused when its version was last read, and not by a refit.

        Args:
            worker: one of `workers`.

        Returns:
            Whether it is paused; `resume` resumes it.
        """
        return worker.instance_id in self.versions.paused

    async def refresh(self, *, now: bool = False) -> None:
        """Read the versions again, at most once a second unless `now`; never raise."""
        if not now and time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = time.monotonic()
        try:
            await self.read_versions()
        except RollwayError as error:
            log.debug("versions cannot be read: %s", error.message)

    async def still_serves(self, ticket: Ticket, instance: int | None) -> bool:
        """Return whether a foreign worker that has just answered has served the ticket's version
        all the time; with `instance` None, whether all workers have (see `fleet.foreign`)."""
        if not self.versions.has_served(ticket, instance):
            return False
        assert ticket.version is not None
        accepted = {ticket.version, leaving_label(ticket.version)}
        try:
            # Any worker may have given an answer without a name, even one that joined a moment ago
            # and is missing from a recent listing.
            listed = await self.membership.workers(fresh=instance is None)
            candidates = [w for w in listed if instance in (None, w.instance_id)]
            labels = [(await self.admin.read(worker)).label for worker in candidates]
        except RollwayError:
            return False  # without an answer nothing is known, and the rollout is repeated
        # An update may have been issued while the worker was asked.
        is_same = bool(labels) and accepted.issuperset(labels)
        return is_same and self.versions.has_served(ticket, instance)

    async def _is_any_behind(self) -> bool:
        """Return whether a worker that answers is not known to serve the current version."""
        served, current = self.versions.by_worker, self.versions.newest
        return any(
            worker.error is None and (current is None or served.get(worker.instance_id) != current)
            for worker in await self.membership.workers(fresh=False)
        )

    def _learn_claims(self) -> None:
        """Learn the versions that other processes have claimed, before this one changes weights."""
        if self._record is not None:
            self.versions.learn_claims(self._record.claims())

    async def refit(
        self,
        version: int | Weights,
        update: Weights | None = None,
        *,
        mode: RefitMode = "pause-all",
        share: float = 0.5,
        expected: Answer | None = None,
        allow_cast: bool = False,
        needs_config: bool = True,
    ) -> RefitReport:
        """Load new weights into every worker, and return when all of them serve the version.

        A second refit waits for the first. `Stack.refit` also completes transfers in which the
        publisher takes part; prefer it.

        Args:
            version: the number of the version, which may be left out, see `Stack.refit`.
            update: an offer of a publisher, or a checkpoint directory that all workers can read.
            mode: "pause-all", "rolling" or "in-flight", see `Stack.refit`.
            share: with "rolling", the share of the workers that is updated at a time.
            expected: what the canary must answer afterwards; by default the workers must agree.
            allow_cast: accept another dtype than the served one.
            needs_config: refuse a checkpoint directory without config.json.

        Returns:
            The state and the times of every worker.

        Raises:
            RefitError: not every worker serves the version; its `report` says which do.
            UsageError: a wrong argument, or weights that do not fit the model.
            WeightsError: published weights that are damaged, incomplete or gone.
        """
        if mode not in get_args(RefitMode) or not 0.0 < share <= 1.0:
            raise UsageError(
                f"A refit is not possible with mode {mode!r} and share {share!r}.",
                f"Modes are {', '.join(get_args(RefitMode))}; a share is above 0 and at most 1.",
            )
        number, weights = _split_version(version, update)
        chosen = await self._recipes.make_update(weights, allow_cast, needs_config)
        async with self._wait_for_turn(), self._guard():
            self._learn_claims()
            version = await self.choose_version("") if number is None else number
            async with self._run(version, chosen, expected) as (refit, recording):
                refit.mode, refit.share = mode, share
                try:
                    return await recording.follow(refit, refit.run())
                finally:
                    if refit.is_claimed and self.versions.newest == version:
                        self._recipes.put(version, chosen)

    @property
    def next_version(self) -> int:
        """A version that is above all that this process knows, and all that others claimed."""
        self._learn_claims()
        return self.versions.choose_version("")

    async def choose_version(self, identity: str) -> int:
        """Return the version for a refit to these weights, for a trainer that repeats its steps:
        the newest version if it names them already, else a new one."""
        self._learn_claims()
        if self.versions.newest is None:
            await self.read_versions()
        return self.versions.choose_version(identity)

    async def load_adapter(
        self, name: str, version: int, offer: Offer, config: Mapping[str, Any], *, keep: int = 2
    ) -> str:
        """Load a LoRA adapter into every worker, beside its older versions.

        Args:
            name: the name of the adapter.
            version: the number of its version, higher than all before.
            offer: what a publisher returned for the adapter's tensors.
            config: PEFT's config of the adapter (adapter_config.json).
            keep: how many versions stay loaded.

        Returns:
            The name that requests use, `name@version`.

        Raises:
            AdminError: a worker refused, or does not answer.
            WeightsError: published weights that are damaged, incomplete or gone.
        """
        if offer.transport == "files":
            path = Path(offer.where["path"])
            await asyncio.to_thread(check_checkpoint, path, roots=self._roots, whole=False)
        async with self._lock, self._guard():
            workers = await self.membership.list_answering()
            with self._record_adapters():
                return await self.adapters.load(workers, name, version, offer, config, keep)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its running requests end first.

        Args:
            name: `name` for all versions, `name@version` for one.

        Raises:
            AdminError: a worker refused, or does not answer.
        """
        async with self._lock, self._guard():
            with self._record_adapters():
                await self.adapters.unload(await self.membership.list_answering(), name)

    async def admit(self) -> RefitReport | None:
        """Bring workers that joined or restarted to the current version, while the others serve.

        Returns:
            The report; None when no worker is behind, the current weights cannot be published
                again, or workers sleep.

        Raises:
            RefitError: a worker could not be brought to the version.
        """
        async with self._lock, self._guard():
            self._learn_claims()
            await self.read_versions()
            version = self._recipes.find_newest(self.versions.newest)
            update = None if version is None else self._recipes.find(version)
            if version is None or update is None or not update.repeatable:
                return None
            if self.versions.asleep:
                return None  # their memory is somebody else's now, and so may a joiner's be
            if not await self._is_any_behind():
                return None
            async with self._run(version, update) as (refit, recording):
                refit.mode, refit.skip = "rolling", frozenset(self._doubtful)
                return await recording.follow(refit, refit.catch_up())

    async def watch(self, seconds: float = POLL_SECONDS) -> None:
        """Notice joins and leaves, and admit workers that join, until cancelled."""
        while True:
            if await self._look_around() and await self._is_any_behind():
                try:
                    await self.admit()
                except RollwayError as error:
                    log.warning("a worker could not be moved to the current version: %s", error)
                except Exception:
                    log.exception("a worker could not be moved to the current version")
            try:
                await self._admit_to_adapters()
            except RollwayError as error:
                log.warning("a worker could not load the adapters: %s", error)
            await self.membership.wait_for_change(seconds)

    async def _look_around(self) -> bool:
        """List the workers, and note who joined and left; return False if the listing failed."""
        changes = await self.membership.poll()
        if changes is None:
            return False
        for worker in changes.left:
            self.versions.forget(worker.instance_id)
        if self.history is not None and (changes.joined or changes.left):
            self.history.note_changes(changes)
            self.history.note_workers(self.model, self.membership.known, self.versions)
        return True

    async def _admit_to_adapters(self) -> None:
        """Load the adapters on workers that have joined and are on the current version."""
        if not self.adapters.loaded:
            return
        listed = await self.workers(fresh=False)
        if self.adapters.missing(listed):
            async with self._lock, self._guard():
                current, served = self.versions.newest, self.versions.by_worker
                ready = [w for w in listed if served.get(w.instance_id) == current]
                await self.adapters.catch_up(ready)

    @contextmanager
    def _record_adapters(self) -> Iterator[None]:
        """Record the adapters that are loaded after the block, also one that failed."""
        try:
            yield
        finally:
            if self.history is not None:
                self.history.note_adapters(self.adapters.counts)

    @asynccontextmanager
    async def _wait_for_turn(self) -> AsyncIterator[None]:
        """Hold the lock. An admission that holds it knows that somebody waits."""
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    @asynccontextmanager
    async def _run(
        self, version: int, update: Update, expected: Answer | None = None
    ) -> AsyncIterator[tuple[Refit, RefitRecording]]:
        """Make a refit, and remember afterwards which workers it left in doubt."""
        recording = RefitRecording(version, self.observer, self.history, self.tracer)
        refit = Refit(
            self.admin,
            self.versions,
            update,
            version,
            self.membership,
            self._supervised,
            is_awaited=lambda: self._waiting > 0,
            canaries=None if self._canary is None else CanaryCheck(self._canary, expected),
            replace=self._replace,
            observer=recording.note_step,
            record=None if self._record is None else self._record.claim,
        )
        try:
            yield refit, recording
        finally:
            self._note_doubts(refit)
            if self.history is not None:
                self.history.note_workers(self.model, self.membership.known, self.versions)

    def _note_doubts(self, refit: Refit) -> None:
        for instance, worker in refit.workers.items():
            if worker.report.state == "in doubt":
                self._doubtful.add(instance)
            elif worker.report.state != "untouched":
                self._doubtful.discard(instance)


def _split_version(version: int | Weights, update: Weights | None) -> tuple[int | None, Weights]:
    """Return the arguments of a refit; the version is None where neither they nor the offer have
    one."""
    if update is None and not isinstance(version, int):
        return (version.version if isinstance(version, Offer) else None), version
    if update is None or not isinstance(version, int):
        raise UsageError(
            f"A refit is not possible with version {version!r} and weights {update!r}.",
            "Pass an offer or a checkpoint directory, or a whole number and one of them.",
        )
    if isinstance(update, Offer) and update.version != version:
        raise UsageError(
            f"The offer is of version {update.version}, and not of {version}.",
            "Pass the offer alone, or publish it under the number of the refit.",
        )
    return version, update
