"""Canary generations: does a worker answer as its weights should?

For workers in which no code of ours can compare parameters. Each is asked for the same few greedy
tokens before and after an update. Its answer must change when the weights did, and must agree with
that of the others on the new version, or with what the trainer expects.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollway.errors import AdminError, RequestFailed, RolloutError, Unreachable
from rollway.fleet.discovery import Worker
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
_SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said to the canary's prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]

    def agrees(self, other: Answer, tolerance: float) -> bool:
        """Up to the first token on which they part; there, a near tie may fall either way."""
        for mine, theirs, a, b in zip(
            self.token_ids, other.token_ids, self.logprobs, other.logprobs, strict=False
        ):
            if not (math.isfinite(a) and abs(a - b) <= tolerance):
                return False
            if mine != theirs:
                return True
        return len(self.token_ids) == len(other.token_ids)


Ask = Callable[[Worker], Awaitable[Answer]]


@dataclass(slots=True)
class Agreement:
    """The canaries of one refit."""

    ask: Ask
    expected: Answer | None = None
    tolerance: float = 5e-3
    _before: dict[int, Answer] = field(default_factory=dict)
    _agreed: Answer | None = None

    async def before(self, worker: Worker) -> None:
        self._before[worker.instance_id] = await self.ask(worker)

    async def agree_with(self, worker: Worker) -> None:
        """Take the answer of a worker that serves the version for the right one."""
        self._agreed = await self.ask(worker)

    async def after(self, worker: Worker) -> None:
        answer = await self.ask(worker)
        if answer == self._before.get(worker.instance_id):
            raise AdminError(
                f"{worker} answers the canary exactly as before the update.",
                "It did not load the new weights; or they are the old ones, then no refit is due.",
            )
        wanted = self.expected or self._agreed
        if wanted is None:
            self._agreed = answer
        elif not answer.agrees(wanted, self.tolerance):
            raise AdminError(
                f"{worker} answers the canary otherwise than "
                f"{'expected' if self.expected else 'the other workers'}: log-probs "
                f"{[round(x, 4) for x in answer.logprobs]} against "
                f"{[round(x, 4) for x in wanted.logprobs]}."
            )


def canary(http: Http, frontend_url: str, model: str, *, timeout: float = 60.0) -> Ask:
    """How to ask one worker, past the routing."""
    url = f"{frontend_url.rstrip('/')}/v1/completions"
    runs = 0

    async def ask(worker: Worker) -> Answer:
        nonlocal runs
        runs += 1
        body = completion_request(
            model,
            PROMPT,
            _SAMPLING,
            cache_salt=f"canary-{runs}",  # its prefix must be computed anew each time
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
