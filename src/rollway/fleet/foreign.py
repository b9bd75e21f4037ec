"""Workers that Rollway does not manage: plain vLLM servers, and what others started.

Their engines take no orders, refuse no request and stamp no answer. A refit moves them by single
calls, with a weaker promise: that the weights were loaded shows a canary, or only the worker's own
word (`declared`).

    check ─► all leave the routing and pause ──────► a pause failed: restore all, raise
                     │
    each by itself:  ▼
    update ─► flush KV ─► abort what waits ─► canary ─► enter the routing ─► label
            └─ any failure: it stays paused, outside the routing, in doubt; replaced if supervised

All calls between the pause and the label go over one pinned connection: they reach one process,
never its successor at the same address.

An answer of a foreign worker counts if this process knew, when it sent the request, that the worker
serves the version, if no update was issued to the worker since, and if its label says so after the
answer. The first covers a router that sends requests to a worker that has just joined, the second
refits by this process, the third refits by others: versions only go up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollway.errors import AdminError, RequestFailed, RolloutError, RollwayError, Unreachable
from rollway.fleet.admin import (
    IN_DOUBT,
    UNVERIFIED,
    AnotherProcess,
    NoSuchMethod,
    PauseMode,
    collect_failures,
    leaving_label,
    run_to_the_end,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import COMPLETIONS, Wire
from rollway.versions import taint_of

if TYPE_CHECKING:
    from rollway.fleet.worker_refit import WorkerRefit


async def check(worker: WorkerRefit, why: NoSuchMethod) -> int | None:
    """Return the label of a foreign worker; raise if it cannot load the update. `why` says why it
    is one."""
    admin, refit = worker.admin, worker.refit
    facts = await admin.read(worker.worker)
    if facts.sleep_level:
        await admin.wake(worker.worker)  # it loads weights only with all of its memory
        facts = await admin.read(worker.worker)
    # The engine of a quantised model refuses requests of other versions, and stages nothing.
    refit.versions.note_facts(worker.instance_id, is_foreign=not facts.enforces)
    if facts.label is None and worker.is_supervised:
        return None
    await refit.update.check_foreign(worker.worker, why)
    is_out = facts.label is not None and facts.label < 0  # paused, so it could not answer
    if _answers_canaries(worker) and not is_out and refit.canaries is not None:
        await refit.canaries.record_before(worker.worker)
    return facts.label


def _answers_canaries(worker: WorkerRefit) -> bool:
    """Return whether a request reaches this worker for certain, and it answers alone."""
    has_router = worker.admin.taints
    is_reached = worker.instance_id >= 0 or not has_router  # nothing is pinned to a negative id
    return is_reached and not worker.worker.role


async def move(workers: Sequence[WorkerRefit], mode: PauseMode) -> None:
    """Pause foreign workers as a whole, then install the update in each of them."""
    began = time.monotonic()
    async with AsyncExitStack() as connections:
        moves = [
            _ForeignMove(worker, await connections.enter_async_context(worker.admin.pin()))
            for worker in workers
        ]
        await _pause_all(moves, mode)
        paused = [each for each in moves if each.worker.report.state == "paused"]
        ends = await asyncio.gather(*(m.install() for m in paused), return_exceptions=True)
    waited = max((each.worker.report.waited_seconds for each in paused), default=0.0)
    for each in paused:
        each.worker.report.paused_seconds = time.monotonic() - began - waited
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _pause_all(moves: Sequence[_ForeignMove], mode: PauseMode) -> None:
    """Take workers out of service. A worker that has died needs no pause. If any other cannot be
    paused, restore all of them and raise."""
    failures: list[tuple[_ForeignMove, BaseException]] = []
    is_complete = False
    try:
        for each, error in await collect_failures(moves, lambda each: each.leave(mode)):
            if isinstance(error, AnotherProcess):
                each.worker.mark_gone()
            elif not await each.worker.note_if_dead():
                failures.append((each, error))
        is_complete = not failures
    finally:
        if not is_complete:
            # A pause that timed out or was cancelled here may still take effect in the worker,
            # so all are resumed; that does no harm to a worker that was not paused.
            await run_to_the_end(_restore_all(moves))
    for each, error in failures:
        each.worker.report.error = str(error)
    if failures:
        raise AdminError(
            f"Not every worker could be paused: {failures[0][1]}",
            "The others were put back into service.",
        )


async def _restore_all(moves: Sequence[_ForeignMove]) -> None:
    for each, error in await collect_failures(moves, _ForeignMove.restore):
        worker = each.worker
        if isinstance(error, AnotherProcess):
            worker.mark_gone()
        elif not await worker.note_if_dead():
            worker.mark_in_doubt(error)
            worker.versions.forget(worker.instance_id)


@dataclass(slots=True, eq=False)
class _ForeignMove:
    """The single calls that move one worker."""

    worker: WorkerRefit
    connection: DynamoAdmin

    async def leave(self, mode: PauseMode) -> None:
        """Label the worker as leaving, take it out of the routing, and pause it."""
        worker, place = self.worker, self.worker.worker
        worker.lap()
        await worker.step("pause")
        await self._check_process(self.connection)
        if worker.label is not None and worker.label >= 0:
            # If this process dies now, others see that no version is served.
            await self.connection.declare_version(place, leaving_label(worker.label))
        await self.connection.set_taints(place, [])
        worker.lap("leave")
        began = time.monotonic()
        if mode == "wait" and not worker.is_out:
            await self.connection.pause(place, "wait", clear_cache=False)
            worker.report.waited_seconds = time.monotonic() - began
        # What has not begun is aborted: with prefill and decode apart it may wait for KV, and vLLM
        # does not clear its cache then.
        await self.connection.pause(place, "abort")
        worker.report.state = "paused"
        worker.lap("pause")
        worker.report.pause_seconds = sum(worker.report.steps[name] for name in ("leave", "pause"))

    async def restore(self) -> None:
        """Put the worker back into service as it was: no update was issued to it."""
        place, label = self.worker.worker, self.worker.label
        # A new connection: the failure may have broken the pinned one.
        async with self.worker.admin.pin() as connection:
            await self._check_process(connection)
            if not self.worker.is_out:  # in doubt since an earlier refit, it is never resumed
                await connection.resume(place)
                await connection.set_taints(place, [] if label is None else [taint_of(label)])
                if label is not None:
                    await connection.declare_version(place, label)
        self.worker.report.state = "restored"

    async def install(self) -> None:
        """Load the update, verify it and enter service. After a failure stay out of service: no
        sample is better than a wrong one."""
        try:
            await self._load()
            await self._verify()
            await self._enter_service()
        except BaseException as error:
            self.worker.mark_in_doubt(error)
            await run_to_the_end(self.worker.keep_out())
            if not isinstance(error, RollwayError):
                raise
            if self.worker.report.state == "in doubt":
                await self.worker.replace()

    async def _load(self) -> None:
        """Send the update, once, and clear the cache."""
        worker = self.worker
        worker.lap()
        worker.report.state = "updating"
        await worker.step("update")
        worker.versions.mark_issued(worker.instance_id)
        if worker.label is None:  # if this ends half done, no user's resume may revive it
            await self.connection.declare_version(worker.worker, IN_DOUBT)
        await worker.refit.update.load(self.connection, worker.worker, UNVERIFIED)
        worker.lap("update")
        await worker.step("flush")
        await self.connection.flush_cache(worker.worker)
        worker.lap("flush")

    async def _verify(self) -> None:
        """Raise unless the worker has the new weights, as far as that can be checked."""
        worker = self.worker
        await worker.step("verify")
        label = (await self.connection.read(worker.worker)).label
        if label != UNVERIFIED:
            raise AdminError(
                f"{worker.worker} reported success and has not applied the update (its label is "
                f"{label})."
            )
        # A router sent requests before it knew that the worker left; they are of other versions.
        await self.connection.pause(worker.worker, "abort")
        worker.report.proof = "declared"
        canaries = worker.refit.canaries
        if canaries is not None and _answers_canaries(worker):
            await self.connection.resume(worker.worker)
            if await canaries.verify(worker.worker, may_equal=worker.refit.update.may_equal):
                worker.report.proof = "canary"
        worker.lap("verify")
        steps = worker.report.steps
        worker.report.update_seconds = sum(steps[name] for name in ("update", "flush", "verify"))

    async def _enter_service(self) -> None:
        worker, place, version = self.worker, self.worker.worker, self.worker.refit.version
        await worker.step("open")
        await self.connection.set_taints(place, [taint_of(version)])
        worker.lap("open")
        await worker.step("resume")
        await self.connection.resume(place)
        # Last: a worker that is labelled with its version is in service.
        await self.connection.declare_version(place, version)
        worker.lap("resume")
        worker.report.resume_seconds = sum(worker.report.steps[name] for name in ("open", "resume"))
        worker.note_service(worker.report.proof)

    async def _check_process(self, connection: DynamoAdmin) -> None:
        """Raise unless the connection reaches the process whose label was read before."""
        before = self.worker.label
        label = (await connection.read(self.worker.worker)).label
        # The call that set the label may have worked although its answer was lost.
        if label == before or (before is not None and label == leaving_label(before)):
            return
        if label is not None and label < 0:
            # A process starts with no such label: this is the one, and an update that a cancelled
            # refit sent has taken effect since.
            raise AdminError(
                f"{self.worker.worker} took an update of an earlier refit meanwhile.",
                "Refit again.",
            )
        raise AnotherProcess(f"{self.worker.worker} is gone: another process has its address.")


# --- canaries -------------------------------------------------------------------------------------
#
# A refit asks each worker for the same few greedy tokens before and after the update. The answer
# must agree with the other workers on the new version, or with the answer that the trainer expects,
# and it must change:
#
#     changed                                    compare with the reference, or become it
#     as before ── others have changed ────────► compare: it had these weights already, as the
#                  │                             successor of a dead worker may, or it ignored them
#                  └─ nobody has changed ──────► an error, unless the weights may be the old ones

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
TOLERANCE = 5e-3
"""The largest difference of two log-probs that still agree."""
OTHERS_SECONDS = 10.0
"""How long a worker whose answer is the same as before waits for the answers of the others."""
_SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to the canary prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]

    def agrees(self, other: Answer) -> bool:
        """Return whether the log-probs are equal within the tolerance, up to the first token that
        differs. From there on the texts differ; at that token, a near tie may go either way."""
        for mine, theirs, a, b in zip(
            self.token_ids, other.token_ids, self.logprobs, other.logprobs, strict=False
        ):
            if not (math.isfinite(a) and abs(a - b) <= TOLERANCE):
                return False
            if mine != theirs:
                return True
        return len(self.token_ids) == len(other.token_ids)


Ask = Callable[[Worker], Awaitable[Answer]]
"""Asks one worker the canary prompt."""


def make_canary(
    http: Http, frontend_url: str, model: str, wire: Wire = COMPLETIONS, *, timeout: float = 60.0
) -> Ask:
    """Return a function that asks one worker, whatever the router would choose."""
    url = f"{frontend_url.rstrip('/')}{wire.path}"

    async def ask(worker: Worker) -> Answer:
        body = wire.request(
            model,
            PROMPT,
            _SAMPLING,
            # A cached prefix would be of the old weights, also one that another process has left.
            cache_salt=f"canary-{secrets.token_hex(8)}",
            pin=worker.instance_id,
        )
        assembly = wire.assembly(_SAMPLING, len(PROMPT))
        try:
            assembly.add(await http.post(url, body, timeout=timeout))
            completion = assembly.finish()
        except (RequestFailed, Unreachable, RolloutError) as error:
            raise AdminError(f"{worker} does not answer the canary: {error.message}") from error
        return Answer(tuple(completion.token_ids), tuple(completion.logprobs or ()))

    return ask


@dataclass(slots=True)
class CanaryCheck:
    """The canary answers of one refit, and the comparison of them."""

    ask: Ask
    expected: Answer | None = None
    """The trainer's answer; without it, the first worker's answer counts."""
    _before: dict[int, Answer] = field(default_factory=dict)
    _reference: Answer | None = None
    _has_changed: bool = False
    """Whether the reference is known to be of the new weights."""
    _unchanged: set[int] = field(default_factory=set)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def has_reference(self) -> bool:
        """Whether it is known what a worker on the version answers."""
        return (self.expected or self._reference) is not None

    async def record_before(self, worker: Worker) -> None:
        """Ask a worker before its update."""
        self._before[worker.instance_id] = await self.ask(worker)

    async def use_as_reference(self, worker: Worker) -> None:
        """Ask a worker that already serves the version; others must agree with its answer."""
        self._reference, self._has_changed = await self.ask(worker), True

    async def verify(self, worker: Worker, *, may_equal: bool = False) -> bool:
        """Ask a worker after its update; raise `AdminError` unless its answer is right.

        With `may_equal`, the weights may be those that all workers had. Return whether the answer
        proves that they were loaded: nothing does if nobody's answer changed."""
        answer = await self.ask(worker)
        is_unchanged = answer == self._before.get(worker.instance_id)
        if is_unchanged:
            await self._wait_for_others(worker)
        wanted = self.expected or self._reference
        if wanted is not None and not answer.agrees(wanted):
            raise AdminError(
                f"{worker} answers the canary differently than "
                f"{'expected' if self.expected else 'the other workers'}: log-probs "
                f"{[round(value, 4) for value in answer.logprobs]} against "
                f"{[round(value, 4) for value in wanted.logprobs]}."
            )
        self._has_changed |= not is_unchanged
        if wanted is None and is_unchanged and not may_equal:
            raise AdminError(
                f"{worker} answers the canary exactly as before the update.",
                "It did not load the new weights, or they equal the old ones; then no refit is "
                "needed.",
            )
        if wanted is None:
            async with self._news:
                self._reference = answer
                self._news.notify_all()
        return self.expected is not None or self._has_changed

    async def _wait_for_others(self, worker: Worker) -> None:
        """Wait until a worker has another answer than before, or all have the same."""
        self._unchanged.add(worker.instance_id)

        def is_decided() -> bool:
            has_wanted = self.expected is not None or self._reference is not None
            return has_wanted or self._unchanged >= self._before.keys()

        async with self._news:
            self._news.notify_all()
            with contextlib.suppress(TimeoutError):  # one of them may have failed
                await asyncio.wait_for(self._news.wait_for(is_decided), OTHERS_SECONDS)
