"""Rollouts that never stop while weights move, and a ledger in which each is accounted for."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from rollway.chaos.policies import COUNT, Policies
from rollway.errors import RollwayError
from rollway.rollout.client import Rollout, Rollouts, Span
from rollway.rollout.sampling import Sampling

TOLERANCE = 1e-3
"""Of a log-prob against torch's; policies differ by far more."""
SHARED_TOKENS, OWN_TOKENS = 48, 8
BUSY_SECONDS, CALM_SECONDS = 0.2, 3.0
_PREFIXES = 4


@dataclass(slots=True)
class Ledger:
    """What became of every rollout, and what its tokens were found to be."""

    issued: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Typed errors by kind: the caller was told."""
    lost_calls: int = 0
    """Ended in something that is neither a result nor a typed error."""
    cut: int = 0
    """Answered with fewer tokens than were asked for, without a word."""
    hangs: int = 0
    tokens_checked: int = 0
    wrong_logprobs: int = 0
    stale_tokens: int = 0
    spans: Counter[int] = field(default_factory=Counter)
    """How many rollouts had one span, two, …"""
    examples: list[str] = field(default_factory=list)

    @property
    def accounted(self) -> int:
        return self.answered + sum(self.errors.values()) + self.lost_calls + self.hangs


class Traffic:
    """A number of callers in a loop: prompts share prefixes, so old KV cache would be found."""

    def __init__(
        self,
        rollouts: Rollouts,
        policies: Policies,
        *,
        seed: int,
        vocabulary: int,
        callers: int,
        hang_seconds: float,
    ) -> None:
        self.ledger = Ledger()
        self.served = 0
        """The newest version whose refit has returned: from then on nothing older may come."""
        self.think_seconds = BUSY_SECONDS
        """Between two rollouts of a caller, on average."""
        self._rollouts = rollouts
        self._policies = policies
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._callers = callers
        self._hang_seconds = hang_seconds
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(_PREFIXES)]
        self._unchecked: list[tuple[Rollout, int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._open = asyncio.Event()
        self._open.set()
        self._busy = 0

    async def hold(self) -> None:
        """No new rollouts, and wait for those under way."""
        self._open.clear()
        while self._busy:  # noqa: ASYNC110 (a handful of callers, each bounded)
            await asyncio.sleep(0.1)

    def resume(self, rollouts: Rollouts) -> None:
        """Go on with another stack, once `release` is called; it begins at its base."""
        self._rollouts = rollouts
        self.served = 0

    def release(self) -> None:
        self._open.set()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._caller()) for _ in range(self._callers)]

    async def stop(self) -> None:
        """Let the callers finish what they have begun."""
        for task in self._tasks:
            task.cancel()  # between two rollouts only: a rollout is shielded from it
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def probe(self, count: int = 4) -> None:
        """A few rollouts now, on warm prefixes, and wait for them."""
        await asyncio.gather(*(self._one() for _ in range(count)))

    async def check(self) -> None:
        """Judge what came in since the last time; in a thread, so that traffic goes on."""
        batch, self._unchecked = self._unchecked, []

        await asyncio.to_thread(self._judge, batch)

    async def _caller(self) -> None:
        while True:
            await self._open.wait()
            rollout = asyncio.ensure_future(self._one())
            try:
                await asyncio.shield(rollout)
            except asyncio.CancelledError:
                await rollout
                raise
            await asyncio.sleep(self._random.uniform(0.0, 2 * self.think_seconds))

    async def _one(self) -> None:
        prompt = self._random.choice(self._prefixes) + self._tokens(OWN_TOKENS)
        length = self._random.choice((8, 24, 96))
        sampling = Sampling(max_tokens=length, ignore_eos=True)
        asked_at, ledger = self.served, self.ledger
        ledger.issued += 1
        self._busy += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._hang_seconds):
                (rollout,) = await self._rollouts.generate(prompt, sampling)
        except TimeoutError:
            ledger.hangs += 1
            self._note(f"no answer after {time.monotonic() - began:.0f} s")
        except RollwayError as error:
            ledger.errors[type(error).__name__] += 1
            self._note(f"{type(error).__name__}: {error.message[:160]}")
            await asyncio.sleep(0.2)  # a caller that spins would only count the same trouble
        except Exception as error:  # noqa: BLE001 (whatever it is, it is to be reported)
            ledger.lost_calls += 1
            self._note(f"{type(error).__name__}: {error}")
        else:
            ledger.answered += 1
            if rollout.finish_reason != "length" or len(rollout.token_ids) != length:
                ledger.cut += 1
                self._note(f"{len(rollout.token_ids)} of {length} ({rollout.finish_reason})")
            self._unchecked.append((rollout, asked_at))
        finally:
            self._busy -= 1

    def _judge(self, batch: list[tuple[Rollout, int]]) -> None:
        """Compare every span with its version, all spans of one set of weights together."""
        by_weights: dict[int, list[tuple[Rollout, Span, int]]] = {}
        for rollout, asked_at in batch:
            self.ledger.spans[len(rollout.spans)] += 1
            for span in rollout.spans:
                key = (span.version or 0) % COUNT
                by_weights.setdefault(key, []).append((rollout, span, asked_at))
        for key, entries in by_weights.items():
            expected = self._expected(key, [rollout for rollout, _, _ in entries])
            for (rollout, span, asked_at), row in zip(entries, expected, strict=True):
                self._judge_span(rollout, span, asked_at, row)

    def _judge_span(
        self, rollout: Rollout, span: Span, asked_at: int, expected: list[float]
    ) -> None:
        ledger, version = self.ledger, span.version or 0
        given = rollout.logprobs or []
        places = range(span.start, span.end)
        wrong = [i for i in places if _apart(given[i], expected[i])]
        ledger.tokens_checked += len(places)
        ledger.wrong_logprobs += len(wrong)
        if version < asked_at:
            ledger.stale_tokens += len(places)
            self._note(f"version {version} after the refit to {asked_at} had returned")
        elif wrong:
            # Other weights, or KV cache of other weights: not of the version it is stamped with.
            ledger.stale_tokens += len(wrong)
            self._note(f"{len(wrong)} of {len(places)} tokens are not of version {version}")

    def _expected(self, version: int, rollouts: list[Rollout]) -> list[list[float]]:
        return self._policies.logprobs(
            version, [r.prompt_ids for r in rollouts], [r.token_ids for r in rollouts]
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, self._vocabulary) for _ in range(count)]

    def _note(self, words: str) -> None:
        if len(self.ledger.examples) < 100 and words not in self.ledger.examples:
            self.ledger.examples.append(words)


def _apart(a: float, b: float) -> bool:
    return abs(a - b) > TOLERANCE
