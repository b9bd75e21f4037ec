"""`Rollouts`: token ids in, token ids with log-probs and their weight version out.

    rollouts = stack.rollouts()
    group = await rollouts.generate(prompt_ids, Sampling(max_tokens=64), n=8)

The n rollouts of a call form a group. They share a session id, which the router keeps on one
worker, so the prompt is computed once. Every request requires the taint of its weight version, so
no worker of another version samples its tokens. The KV cache is salted with the version, so a block
computed under one version is never read under another.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from rollway.errors import RolloutError, UsageError
from rollway.observe.tally import Tokens
from rollway.rollout.completion import Assembly, Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import Chunk, Question, Sender, all_or_none, check_prompt
from rollway.rollout.trajectory import Rollout, Span, Trajectory
from rollway.versions import Ticket

__all__ = ["Rollout", "Rollouts", "Span"]

SIBLINGS = 16


class Rollouts(Sender):
    """Samples completions. `Stack.rollouts` creates it."""

    resumes = True
    """Whether a rollout that an engine aborted is continued, whatever the cause. Otherwise it is
    returned as `aborted`, with the tokens it has."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        group: str | None = None,
        version: int | None = None,
        salt: str = "",
    ) -> list[Rollout]:
        """Sample n rollouts of one prompt.

        Args:
            prompt_ids: The token ids of the prompt.
            sampling: Sampling parameters; by default the policy's own distribution.
            n: How many rollouts. They form a group and share the cached prompt.
            group: A session id that keeps several calls on one worker.
            version: A weight version that some worker still serves; by default the current one.
            salt: Requests with another salt share no cached prompt with these.

        Returns:
            The rollouts, each with token ids, log-probs and the version of every token.

        Raises:
            RolloutError: The engine's answer is wrong, or retries did not help for `patience` s.
            Unreachable: The frontend does not answer, or a rollout took longer than `timeout`.
            UsageError: The prompt or n is invalid.

        Cancelling the call also ends its requests on the workers.

            group = await rollouts.generate(prompt_ids, Sampling(max_tokens=64), n=8)
        """
        prompt = check_prompt(prompt_ids)
        if n < 1:
            raise UsageError(f"n is {n}.", "Ask for at least one rollout.")
        chosen = sampling or Sampling()
        if n == 1:  # in the caller's task, so a cancelled call is either complete or has no token
            return [await self._sample(prompt, chosen, group, version, salt)]
        session = group or uuid.uuid4().hex
        seeded = ((chosen.offset_seed(i), share_session(session, i)) for i in range(n))
        return await all_or_none(self._sample(prompt, *each, version, salt) for each in seeded)

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, n: int = 1
    ) -> list[list[Rollout]]:
        """Sample n rollouts for each of several prompts.

        Args:
            prompts: the token ids of each prompt.
            sampling: how to sample. With a seed, every rollout of the batch has its own.
            n: how many rollouts for each prompt.

        Returns:
            One list of n rollouts for each prompt, in the order of the prompts.

        Raises:
            RollwayError: as `generate`; the first failure cancels the others.
        """
        chosen = sampling or Sampling()
        return await all_or_none(
            self.generate(prompt, chosen.offset_seed(position * n), n)
            for position, prompt in enumerate(prompts)
        )

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        group: str | None = None,
    ) -> AsyncIterator[list[int] | Rollout]:
        """Yield token ids as they are sampled, and last the complete Rollout.

        A request that is refused before its first token is sent again, and one that a refit
        interrupts resumes on the new weights. A stream that breaks raises; nothing is sampled a
        second time.

        Args:
            prompt_ids: the token ids of the prompt.
            sampling: how to sample.
            group: a session id; calls with the same id are sent to the same worker.

        Raises:
            RolloutError: the stream broke, or its weights changed.
        """
        trajectory = Trajectory(check_prompt(prompt_ids), sampling or Sampling(), self.adapter)
        sample = _Sample(self, trajectory, session=group, is_streamed=True)
        is_first = True
        # Close at once: the worker must not sample for a caller that is gone.
        with self._trace(sample):
            async with aclosing(self._ask(sample)) as parts:
                async for part in parts:
                    if isinstance(part, Chunk) and part.token_ids:
                        if is_first and self.tally is not None:
                            self.tally.add_first_token(time.monotonic() - sample.began)
                        is_first = False
                        yield part.token_ids
        self._finish(sample, part)
        yield part

    async def _sample(
        self,
        prompt: list[int],
        sampling: Sampling,
        session: str | None,
        version: int | None,
        salt: str,
    ) -> Rollout:
        """Sample until the rollout is complete and every token has a version."""
        trajectory = Trajectory(prompt, sampling, self.adapter, salt)
        sample = _Sample(self, trajectory, session=session, version=version)
        with self._trace(sample):
            rollout = await self._answer(sample)
        self._finish(sample, rollout)
        return rollout

    @contextmanager
    def _trace(self, sample: _Sample) -> Iterator[None]:
        """Give a sample its span, which is the parent of the frontend's; end it if the block
        raises."""
        if self.tracer is not None:
            sample.span = self.tracer.begin("rollway.rollout", is_client=True)
        try:
            yield
        except BaseException as error:
            if sample.span is not None:
                sample.span.finish({"rollway.model": self.model}, error=error)
            raise

    def _finish(self, sample: _Sample, rollout: Rollout) -> None:
        """Count a rollout that is about to be returned, and end its span."""
        if sample.span is not None:
            sample.span.finish(describe_rollout(self.model, rollout))
        if self.tally is None:
            return
        spans, tokens = rollout.spans, len(rollout.token_ids)
        versions: Sequence[Tokens] = (
            ((spans[0].version, tokens),)  # nearly always, and faster
            if len(spans) == 1
            else [(span.version, span.end - span.start) for span in spans]
        )
        self.tally.add_rollout(
            time.monotonic() - sample.began,
            len(rollout.prompt_ids),
            rollout.cached_tokens,
            tokens,
            versions,
            sample.trajectory.legs > 1,
        )


@dataclass(slots=True)
class _Sample(Question[Rollout]):
    """Asks for a rollout, leg by leg: what a refit or a dead worker cut is continued."""

    client: Rollouts
    trajectory: Trajectory

    def build(self, ticket: Ticket) -> tuple[dict[str, Any], Assembly]:
        prompt, sampling = self.trajectory.next_leg()
        wire = self.client.wire
        body = wire.request(
            self.client.model,
            prompt,
            sampling,
            cache_salt=ticket.add_salt(self.trajectory.salt),
            required_taint=ticket.taint,
            stamped=ticket.stamped,
            stream=self.is_streamed,
        )
        return body, wire.assembly(sampling, len(prompt))

    def counts(self, completion: Completion) -> bool:
        # Of a mixed answer, the engine computed the experts before the change once more.
        return not (completion.is_mixed and self.trajectory.sampling.routed_experts)

    def take(self, completion: Completion, ticket: Ticket, raw: Any) -> Rollout | None:
        trajectory = self.trajectory
        trajectory.add(completion, ticket.version)
        if completion.finish_reason != "aborted":
            return trajectory.rollout(completion.finish_reason, ticket.version)
        if trajectory.is_full:
            return trajectory.rollout("length", ticket.version)
        if not self.client.resumes:
            return trajectory.rollout("aborted", ticket.version)
        if self.is_streamed and trajectory.sampling.has_penalties and trajectory.token_ids:
            raise RolloutError(
                "A streamed rollout was cut, and cannot be continued with penalties."
            )
        trajectory.cut()
        if self.client.tally is not None:
            self.client.tally.add_cut()
        return None

    def count_kept(self) -> int:
        return len(self.trajectory.token_ids)


def describe_rollout(model: str, rollout: Rollout) -> dict[str, Any]:
    """Return the attributes of a rollout's span."""
    worker = rollout.worker_id
    return {
        "rollway.model": model,
        "rollway.version": rollout.weight_version,
        "rollway.worker": None if worker is None else str(worker),
        "rollway.tokens": len(rollout.token_ids),
        "rollway.prompt_tokens": len(rollout.prompt_ids),
        "rollway.cached_tokens": rollout.cached_tokens,
        "rollway.finish_reason": rollout.finish_reason,
        "rollway.spans": len(rollout.spans),
    }


def share_session(session: str, index: int) -> str:
    """Return the session id of a rollout in a group.

    A large group would fill one worker while others are idle, so every SIBLINGS rollouts have their
    own session (64 rollouts on 4 workers: 4.7 s instead of 14.0 s)."""
    return session if index < SIBLINGS else f"{session}/{index // SIBLINGS}"
