"""Canary generations verify the weights of workers that cannot compare their parameters.

A refit asks each of these workers for the same few greedy tokens before and after the update. The
answer must agree with the other workers on the new version, or with the answer that the trainer
expects, and it must change:

    changed                                    compare with the reference, or become it
    as before ── others have changed ────────► compare: it had these weights already, as the
                 │                             successor of a dead worker may, or it ignored them
                 └─ nobody has changed ──────► an error, unless the weights may be the old ones
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollway.errors import AdminError, RequestFailed, RolloutError, Unreachable
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request

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


def make_canary(http: Http, frontend_url: str, model: str, *, timeout: float = 60.0) -> Ask:
    """Return a function that asks one worker, whatever the router would choose."""
    url = f"{frontend_url.rstrip('/')}/v1/completions"
    runs = 0

    async def ask(worker: Worker) -> Answer:
        nonlocal runs
        runs += 1
        body = completion_request(
            model,
            PROMPT,
            _SAMPLING,
            cache_salt=f"canary-{runs}",  # a cached prefix would be of the old weights
            pin=worker.instance_id,
        )
        assembly = DynamoAssembly(_SAMPLING, len(PROMPT))
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
