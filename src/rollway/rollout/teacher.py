"""`Teacher`: the log-probs that a served model gives to token sequences it did not sample.

    teacher = stack.teacher()
    (scores,) = await teacher.score([prompt_ids + completion_ids])
    scores.logprobs[0] is None          # nothing precedes the first token
    scores.logprobs[len(prompt_ids):]   # the completion's

Use it for distillation, for reference models, and to check another engine. A sequence is sent as a
prompt whose own log-probs are requested; vLLM computes all of it, without its prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollway.errors import RolloutError
from rollway.rollout.completion import Nvext, only_choice, parse
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import Sender, all_or_none, check_prompt
from rollway.rollout.wire import GENERATE
from rollway.versions import Ticket

# The engine must sample one token to process the prompt; Rollway discards it.
_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0, logprobs=False)


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probs that a model gives to one sequence.

    Example:
        (scores,) = stack.teacher().score([prompt_ids + completion_ids])
        scores.logprobs[0] is None  # no token precedes the first
    """

    token_ids: list[int]
    logprobs: list[float | None]
    """The log-prob of each token given those before it; None for the first."""
    weight_version: int | None


class Teacher(Sender):
    """Scores token sequences, on any wire. `Stack.teacher` creates it."""

    async def score(
        self, sequences: Sequence[Sequence[int]], *, version: int | None = None
    ) -> list[Scores]:
        """Return the log-prob of every token of some sequences.

        Args:
            sequences: the token ids of each sequence.
            version: a weight version that some worker still serves; None for the current one.

        Returns:
            One `Scores` for each sequence, in order.

        Raises:
            RolloutError: the engine returned no log-probs, or they cannot be attributed to one
                version.
        """
        return await all_or_none(self._score(check_prompt(ids), version) for ids in sequences)

    async def _score(self, ids: list[int], version: int | None) -> Scores:
        attempt = self._attempt()
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(attempt.trouble, version)
                answer = await self._send(
                    self._request(ids, ticket, attempt.pins.now), ticket, attempt
                )
                if answer is None:  # a temporary failure; `_send` has waited
                    continue
                raw, worker = read_prompt_logprobs(answer)
                if await self._is_attributed(ticket, worker):
                    return Scores(ids, flatten(raw, ids), ticket.version)
                await attempt.retry_elsewhere(ticket)

    def _request(self, ids: list[int], ticket: Ticket, pin: int | None) -> dict[str, Any]:
        body = self.wire.request(
            self.model,
            ids,
            _ONE_TOKEN,
            cache_salt=ticket.salt,
            required_taint=ticket.taint,
            pin=pin,
        )
        parameters = body["sampling_params"] if self.wire is GENERATE else body
        parameters["prompt_logprobs"] = 0  # no alternatives: only the sequence's own tokens
        if "nvext" in body:
            body["nvext"] = {**body["nvext"], "extra_fields": ["prompt_logprobs", "worker_id"]}
        return body


def flatten(raw: Any, ids: Sequence[int]) -> list[float | None]:
    """Return one log-prob per token from any of the engines' forms.

    An entry is a number, or maps token ids (text or number) to numbers or to {"logprob": …}. Only
    the entry of the token itself counts: engines also list the likeliest token, often first."""
    if not isinstance(raw, list) or len(raw) != len(ids):
        count = len(raw) if isinstance(raw, list) else "no"
        raise RolloutError(
            f"The engine sent {count} prompt log-probs for {len(ids)} tokens.",
            "The engine must support prompt_logprobs: the mocker does not, and vLLM on a CPU not "
            "while an adapter is loaded; serve the teacher as a model without adapters.",
        )
    logprobs: list[float | None] = [None]
    for position, (entry, token) in enumerate(zip(raw, ids, strict=True)):
        if position:
            logprobs.append(_logprob_of(entry, token, position))
    return logprobs


def _logprob_of(entry: Any, token: int, position: int) -> float:
    value = entry
    if isinstance(entry, Mapping):
        value = entry.get(str(token), entry.get(token))
        if value is None:
            raise RolloutError(f"The engine left out the log-prob of token {token} at {position}.")
    if isinstance(value, Mapping):
        value = value.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RolloutError(f"The log-prob of the token at {position} is {value!r}.")
    return float(value)


class _Choice(msgspec.Struct):
    prompt_logprobs: Any = None


class _Answer(msgspec.Struct):
    """The three places for prompt log-probs: Dynamo has them under `nvext`, vLLM in the choice, and
    the generate route at the top."""

    choices: list[_Choice] = []
    prompt_logprobs: Any = None
    nvext: Nvext | None = None


def read_prompt_logprobs(raw: Any) -> tuple[Any, int | None]:
    """Return the prompt log-probs as the engine sent them, and the worker."""
    answer = parse(raw, _Answer)
    nvext, choice = answer.nvext or Nvext(), only_choice(answer.choices) or _Choice()
    places = (nvext.prompt_logprobs, choice.prompt_logprobs, answer.prompt_logprobs)
    return next((place for place in places if place is not None), None), nvext.worker
