"""`Teacher`: the log-probs that a served model gives to token sequences it did not sample.

    teacher = stack.teacher()
    (scores,) = await teacher.score([prompt_ids + completion_ids])
    scores.logprobs[0] is None          # nothing comes before the first token
    scores.logprobs[len(prompt_ids):]   # of the completion

For distillation, for reference models, and to check what another engine said. A sequence goes to
the engine as a prompt whose own log-probs are asked for; vLLM computes it whole, past its prefix
cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollway.errors import RolloutError
from rollway.rollout.completion import Nvext, only_choice, parsed
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import Sender, all_or_none, checked_prompt
from rollway.rollout.wire import GENERATE
from rollway.versions import Ticket

# One token must be sampled for the prompt to be looked at; it is thrown away.
_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0, logprobs=False)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model thinks of one sequence."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Of each token given those before it; None for the first."""
    weight_version: int | None


class Teacher(Sender):
    """Scores. Its options are those of `Sender`; all wires will do."""

    async def score(
        self, sequences: Sequence[Sequence[int]], *, version: int | None = None
    ) -> list[Scores]:
        """One result per sequence, in order; `version` as in `Rollouts.generate`."""
        return await all_or_none(self._one(checked_prompt(ids), version) for ids in sequences)

    async def _one(self, ids: list[int], version: int | None) -> Scores:
        attempt = self._attempt()
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(attempt.trouble, version)
                answer = await self._send(
                    self._request(ids, ticket, attempt.pins.now), ticket, attempt
                )
                if answer is None:
                    continue
                found, worker = _read(answer)
                if await self._vouched(ticket, worker):
                    return Scores(ids, flatten(found, ids), ticket.version)
                await attempt.not_attributed(ticket)

    def _request(self, ids: list[int], ticket: Ticket, pin: int | None) -> dict[str, Any]:
        body = self.wire.request(
            self.model,
            ids,
            _ONE_TOKEN,
            cache_salt=ticket.salt,
            required_taint=ticket.taint,
            pin=pin,
        )
        asked = body["sampling_params"] if self.wire is GENERATE else body
        asked["prompt_logprobs"] = 0  # of the tokens themselves, and no others
        if "nvext" in body:
            body["nvext"] = {**body["nvext"], "extra_fields": ["prompt_logprobs", "worker_id"]}
        return body


def flatten(raw: Any, ids: Sequence[int]) -> list[float | None]:
    """One log-prob per token, whichever way the engine lists them: an entry is a number, or maps
    token ids (as text or number) to numbers or to {"logprob": …}. Only the entry of the token
    itself counts: engines list the likeliest token beside it, often first."""
    if not isinstance(raw, list) or len(raw) != len(ids):
        count = len(raw) if isinstance(raw, list) else "no"
        raise RolloutError(
            f"{count} prompt log-probs came for {len(ids)} tokens.",
            "The engine must support prompt_logprobs (the mocker does not).",
        )
    found: list[float | None] = [None]
    for position, (entry, token) in enumerate(zip(raw, ids, strict=True)):
        if position:
            found.append(_of_token(entry, token, position))
    return found


def _of_token(entry: Any, token: int, position: int) -> float:
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
    """Dynamo's completions put them under nvext, vLLM's into the choice, generate at the top."""

    choices: list[_Choice] = []
    prompt_logprobs: Any = None
    nvext: Nvext | None = None


def _read(raw: Any) -> tuple[Any, int | None]:
    """The prompt log-probs as they came, and the worker."""
    answer = parsed(raw, _Answer)
    nvext, choice = answer.nvext or Nvext(), only_choice(answer.choices) or _Choice()
    places = (nvext.prompt_logprobs, choice.prompt_logprobs, answer.prompt_logprobs)
    return next((place for place in places if place is not None), None), nvext.worker
