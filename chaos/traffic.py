"""Rollouts without a break while weights change, and the account of each.

`Policies` are sets of clearly different weights, and the log-probs that each gives: the reference
for tokens.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from rollway.demo.grpo import token_logprobs
from rollway.errors import RollwayError
from rollway.rollout.client import Rollout, Span
from rollway.rollout.sampling import Sampling
from rollway.weights.checkpoint import publish_checkpoint

COUNT = 4
"""The number of sets. Versions cycle through them, so that neighbours always differ."""
_BATCH = 32


class Policies:
    """The base checkpoint and others of its shape; version v serves number v modulo COUNT."""

    def __init__(self, base: Path, directory: Path) -> None:
        self.paths = [base]
        self._models = [_load(base)]
        for seed in range(1, COUNT):
            path = directory / f"policy-{seed}"
            self.paths.append(publish_checkpoint(path, partial(perturb, base, seed)))
            self._models.append(_load(path))

    def path(self, version: int) -> Path:
        return self.paths[version % COUNT]

    def logprobs(
        self, version: int, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[float]]:
        """Return the log-prob of each token, by a plain float32 forward pass in torch."""
        logprobs: list[list[float]] = []
        for start in range(0, len(prompts), _BATCH):
            batch = slice(start, start + _BATCH)
            with torch.no_grad():
                model = self._models[version % COUNT]
                rows = token_logprobs(model, prompts[batch], completions[batch]).tolist()
            pairs = zip(rows, completions[batch], strict=True)
            logprobs += [row[: len(ids)] for row, ids in pairs]
        return logprobs


hf_logging.disable_progress_bar()


def _load(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def perturb(base: Path, seed: int, directory: Path) -> None:
    """Write a checkpoint of the same shape with clearly different weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * 1.5)
    model.save_pretrained(directory)
    for extra in base.iterdir():  # the tokenizer and other files, as a trainer saves them
        if extra.is_file() and not (directory / extra.name).exists():
            shutil.copy(extra, directory)


# --- traffic -------------------------------------------------------------------------------------


TOLERANCE = 1e-3
"""The largest difference of a log-prob from torch's; policies differ by far more."""
SHARED_TOKENS, OWN_TOKENS = 48, 8
BUSY_SECONDS, CALM_SECONDS = 0.2, 3.0
_PREFIXES = 4


@dataclass(slots=True)
class RolloutLedger:
    """The outcome of every rollout, and the check of its tokens."""

    issued: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Typed errors by kind, which the caller received."""
    lost_calls: int = 0
    """Calls that ended in neither a result nor a typed error."""
    cut: int = 0
    """Answers that silently have fewer tokens than requested."""
    hangs: int = 0
    tokens_checked: int = 0
    wrong_logprobs: int = 0
    stale_tokens: int = 0
    largest_difference: float = 0.0
    """Of a log-prob that was right from torch's: how close the tolerance is to refusing it."""
    spans: Counter[int] = field(default_factory=Counter)
    """The number of rollouts by their number of spans."""
    examples: list[str] = field(default_factory=list)

    @property
    def outcomes(self) -> int:
        return self.answered + sum(self.errors.values()) + self.lost_calls + self.hangs


class Generates(Protocol):
    """Samples rollouts, as `Rollouts` does."""

    async def generate(self, prompt: list[int], sampling: Sampling) -> list[Rollout]: ...


class Traffic:
    """Callers in a loop. Their prompts share prefixes, so that they would hit stale KV cache."""

    def __init__(
        self,
        rollouts: Generates,
        policies: Policies,
        *,
        seed: int,
        vocabulary: int,
        callers: int,
        hang_seconds: float,
    ) -> None:
        self.ledger = RolloutLedger()
        self.served = 0
        """The newest version whose refit has returned; later answers may not be older."""
        self.think_seconds = BUSY_SECONDS
        """The mean time between two rollouts of a caller."""
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
        """Start no new rollouts, and wait for those in flight."""
        self._open.clear()
        while self._busy:  # noqa: ASYNC110 (a handful of callers, each bounded)
            await asyncio.sleep(0.1)

    def resume(self, rollouts: Generates) -> None:
        """Use another stack once `release` is called; it starts at its base version."""
        self._rollouts = rollouts
        self.served = 0

    def release(self) -> None:
        self._open.set()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._caller()) for _ in range(self._callers)]

    async def stop(self) -> None:
        """End the callers after their current rollouts."""
        for task in self._tasks:
            task.cancel()  # between two rollouts only: a rollout is shielded from it
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def probe(self, count: int = 4) -> None:
        """Generate some rollouts on warm prefixes now, and wait for them."""
        await asyncio.gather(*(self._generate() for _ in range(count)))

    async def check(self) -> None:
        """Check the rollouts since the last call, in a thread, so that traffic continues."""
        batch, self._unchecked = self._unchecked, []
        await asyncio.to_thread(self._judge, batch)

    async def _caller(self) -> None:
        while True:
            await self._open.wait()
            rollout = asyncio.ensure_future(self._generate())
            try:
                await asyncio.shield(rollout)
            except asyncio.CancelledError:
                await rollout
                raise
            await asyncio.sleep(self._random.uniform(0.0, 2 * self.think_seconds))

    async def _generate(self) -> None:
        prompt = self._random.choice(self._prefixes) + self._tokens(OWN_TOKENS)
        length = self._random.choice((8, 24, 96))
        sampling = Sampling(max_tokens=length, ignore_eos=True)
        served, ledger = self.served, self.ledger
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
            await asyncio.sleep(0.2)  # a spinning caller would only count the same failure again
        except Exception as error:  # noqa: BLE001 (the report must contain it)
            ledger.lost_calls += 1
            self._note(f"{type(error).__name__}: {error}")
        else:
            ledger.answered += 1
            if rollout.finish_reason != "length" or len(rollout.token_ids) != length:
                ledger.cut += 1
                self._note(f"{len(rollout.token_ids)} of {length} ({rollout.finish_reason})")
            self._unchecked.append((rollout, served))
        finally:
            self._busy -= 1

    def _judge(self, batch: list[tuple[Rollout, int]]) -> None:
        """Compare every span with its version; spans of one set of weights are checked together."""
        by_weights: dict[int, list[tuple[Rollout, Span, int]]] = {}
        for rollout, served in batch:
            self.ledger.spans[len(rollout.spans)] += 1
            for span in rollout.spans:
                key = (span.version or 0) % COUNT
                by_weights.setdefault(key, []).append((rollout, span, served))
        for key, entries in by_weights.items():
            expected = self._compute_expected(key, [rollout for rollout, _, _ in entries])
            for (rollout, span, served), row in zip(entries, expected, strict=True):
                self._judge_span(rollout, span, served, row)

    def _judge_span(self, rollout: Rollout, span: Span, served: int, expected: list[float]) -> None:
        ledger, version = self.ledger, span.version or 0
        logprobs = rollout.logprobs or []
        places = range(span.start, span.end)
        differences = {i: abs(logprobs[i] - expected[i]) for i in places}
        wrong = [i for i, difference in differences.items() if difference > TOLERANCE]
        right = [difference for difference in differences.values() if difference <= TOLERANCE]
        ledger.largest_difference = max([ledger.largest_difference, *right])
        ledger.tokens_checked += len(places)
        ledger.wrong_logprobs += len(wrong)
        if version < served:
            ledger.stale_tokens += len(places)
            self._note(f"version {version} after the refit to {served} had returned")
        elif wrong:
            # The tokens came from other weights, or from the KV cache of other weights.
            ledger.stale_tokens += len(wrong)
            self._note(f"{len(wrong)} of {len(places)} tokens are not of version {version}")

    def _compute_expected(self, version: int, rollouts: list[Rollout]) -> list[list[float]]:
        return self._policies.logprobs(
            version, [r.prompt_ids for r in rollouts], [r.token_ids for r in rollouts]
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, self._vocabulary) for _ in range(count)]

    def _note(self, example: str) -> None:
        if len(self.ledger.examples) < 100 and example not in self.ledger.examples:
            self.ledger.examples.append(example)
