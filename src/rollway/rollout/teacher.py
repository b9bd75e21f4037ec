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

from rollway.errors import RolloutError
from rollway.rollout.completion import Assembly, Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import Question, Sender, all_or_none, check_prompt
from rollway.rollout.trajectory import Rollout, Trajectory
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
        rollout, logprobs = await self.sample(ids, _ONE_TOKEN, version=version)
        return Scores(ids, logprobs, rollout.weight_version)

    async def sample(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        version: int | None = None,
        session: str | None = None,
        salt: str = "",
    ) -> tuple[Rollout, list[float | None]]:
        """Return a rollout and the log-prob of each prompt token, in one request of one version:
        what a refit cuts is sampled again."""
        return await self._answer(
            _Scored(self, prompt, sampling, salt, version=version, session=session)
        )


@dataclass(slots=True)
class _Scored(Question[tuple[Rollout, list[float | None]]]):
    """Asks for the log-probs of a prompt, and for a rollout of it."""

    teacher: Teacher
    prompt: list[int]
    sampling: Sampling
    salt: str

    def build(self, ticket: Ticket) -> tuple[dict[str, Any], Assembly]:
        wire = self.teacher.wire
        body = wire.request(
            self.teacher.model,
            self.prompt,
            self.sampling,
            cache_salt=ticket.add_salt(self.salt),
            required_taint=ticket.taint,
            stamped=ticket.stamped,
            prompt_logprobs=True,
        )
        return body, wire.assembly(self.sampling, len(self.prompt))

    def take(
        self, completion: Completion, ticket: Ticket, raw: Any
    ) -> tuple[Rollout, list[float | None]]:
        trajectory = Trajectory(self.prompt, self.sampling, self.teacher.adapter)
        trajectory.add(completion, ticket.version)
        rollout = trajectory.rollout(completion.finish_reason, ticket.version)
        return rollout, flatten(completion.prompt_logprobs, self.prompt)


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
