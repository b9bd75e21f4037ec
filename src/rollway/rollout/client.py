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
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from rollway.errors import RequestFailed, RolloutError, UsageError
from rollway.http import read_error_message
from rollway.observe.tally import RolloutTally, Tokens
from rollway.observe.traces import Span as TraceSpan
from rollway.rollout.completion import Assembly, Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import (
    Sender,
    Trouble,
    all_or_none,
    check_prompt,
    describe_error,
    is_temporary,
    make_retry_error,
)
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
        sample = self._sample if self.tracer is None else self._sample_traced
        if n == 1:  # in the caller's task, so a cancelled call is either complete or has no token
            return [await sample(prompt, chosen, group, version, salt)]
        session = group or uuid.uuid4().hex
        seeded = ((chosen.offset_seed(i), share_session(session, i)) for i in range(n))
        return await all_or_none(sample(prompt, *each, version, salt) for each in seeded)

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
            UsageError: the wire cannot stream.
            RolloutError: the stream broke, or its weights changed.
        """
        if not self.wire.streams:
            raise UsageError(f"The wire `{self.wire.name}` cannot stream.", "Use `completions`.")
        trajectory = Trajectory(check_prompt(prompt_ids), sampling or Sampling(), self.adapter)
        session, trouble = group, Trouble(self._patience)
        with self._trace() as span:
            async with self._slots, self._deadline():
                began, is_first = time.monotonic(), True
                while True:
                    ticket = await self._ticket(trouble)
                    body, assembly = self._request(trajectory, ticket, stream=True)
                    headers = self._make_headers(session, span)
                    try:
                        async with self._http.stream_lines(
                            self._url, body, timeout=self._timeout, headers=headers
                        ) as lines:
                            async for event in events(lines):
                                if tokens := assembly.add(event):
                                    trouble = Trouble(self._patience)
                                    if is_first and self.tally is not None:
                                        self.tally.add_first_token(time.monotonic() - began)
                                    is_first = False
                                    yield tokens
                    except RequestFailed as error:  # the status of the answer: no token has arrived
                        if not is_temporary(error):
                            raise
                        self._count_retry(error, span)
                        if self._is_session_refused(error, headers):
                            continue
                        # The session may be bound to a worker that serves an older version.
                        session = None
                        await trouble.wait(describe_error(error, self.model))
                        await self._refresh_workers()
                        continue
                    leg = assembly.finish()
                    rollout = await self._add_leg(trajectory, leg, ticket, streamed=True)
                    if rollout is not None:
                        break
                    if not leg.token_ids:
                        await trouble.wait(make_retry_error(leg))
            if span is not None:
                span.finish(describe_rollout(self.model, rollout))
        if self.tally is not None:
            self._count(self.tally, rollout, trajectory, began)
        yield rollout

    async def _sample_traced(
        self,
        prompt: list[int],
        sampling: Sampling,
        session: str | None,
        version: int | None,
        salt: str,
    ) -> Rollout:
        """Sample in a span, which is the parent of the frontend's."""
        assert self.tracer is not None
        span = self.tracer.begin("rollway.rollout", is_client=True)
        if not span.is_sampled:  # nobody asks how it ends
            return await self._sample(prompt, sampling, session, version, salt, span)
        try:
            rollout = await self._sample(prompt, sampling, session, version, salt, span)
        except BaseException as error:
            span.finish({"rollway.model": self.model}, error=error)
            raise
        span.finish(describe_rollout(self.model, rollout))
        return rollout

    async def _sample(
        self,
        prompt: list[int],
        sampling: Sampling,
        session: str | None,
        version: int | None,
        salt: str,
        span: TraceSpan | None = None,
    ) -> Rollout:
        """Sample until the rollout is complete and every token has a version."""
        trajectory = Trajectory(prompt, sampling, self.adapter, salt)
        attempt = self._attempt(session, span)
        async with self._slots, self._deadline():
            began = time.monotonic()
            while True:
                ticket = await self._ticket(attempt.trouble, version)
                body, assembly = self._request(trajectory, ticket, pin=attempt.pins.now)
                answer = await self._send(body, ticket, attempt)
                if answer is None:
                    continue
                assembly.add(answer)
                leg, before = assembly.finish(), len(trajectory.token_ids)
                with self._count_in_flight():
                    rollout = await self._add_leg(trajectory, leg, ticket)
                if rollout is not None:
                    if self.tally is not None:
                        self._count(self.tally, rollout, trajectory, began)
                    return rollout
                if span is not None:
                    span.add_event("retry", cause=leg.finish_reason)
                if len(trajectory.token_ids) > before:
                    attempt.trouble = Trouble(self._patience)
                else:
                    await attempt.retry_elsewhere(ticket, leg)

    def _count(
        self, tally: RolloutTally, rollout: Rollout, trajectory: Trajectory, began: float
    ) -> None:
        """Count a rollout that is about to be returned."""
        spans, tokens = rollout.spans, len(rollout.token_ids)
        versions: Sequence[Tokens] = (
            ((spans[0].version, tokens),)  # nearly always, and faster
            if len(spans) == 1
            else [(span.version, span.end - span.start) for span in spans]
        )
        tally.add_rollout(
            time.monotonic() - began,
            len(rollout.prompt_ids),
            rollout.cached_tokens,
            tokens,
            versions,
            trajectory.legs > 1,
        )

    async def _add_leg(
        self,
        trajectory: Trajectory,
        completion: Completion,
        ticket: Ticket,
        *,
        streamed: bool = False,
    ) -> Rollout | None:
        """Add a leg; return the rollout if it is complete, None if there is more to sample."""
        # The engine computed the experts of tokens before the change once more.
        has_wrong_experts = completion.is_mixed and trajectory.sampling.routed_experts
        if has_wrong_experts or not await self._is_attributed(ticket, completion):
            if self.tally is not None:
                self.tally.add_not_believed()
            if streamed:
                raise await self._make_stream_error(ticket)
            return None
        trajectory.add(completion, ticket.version)
        if completion.finish_reason != "aborted":
            return trajectory.rollout(completion.finish_reason, ticket.version)
        if trajectory.is_full:
            return trajectory.rollout("length", ticket.version)
        if not self.resumes:
            return trajectory.rollout("aborted", ticket.version)
        # Nobody ends a rollout through an engine: a caller cancels its call. What did cut it may
        # have left no trace by now, such as a refit that was cancelled and put the old version
        # back, so there is nothing to ask before it is continued.
        versions = self._versions
        if ticket.version == versions.current and not versions.changing:
            # Another process may have refitted the worker. Otherwise this process knows of the
            # refit, and hundreds of cut rollouts need not ask.
            await self._refresh_workers(now=True)
        if streamed and trajectory.sampling.has_penalties and trajectory.token_ids:
            raise RolloutError(
                "A streamed rollout was cut, and cannot be continued with penalties."
            )
        trajectory.cut()
        if self.tally is not None:
            self.tally.add_cut()
        return None

    def _request(
        self,
        trajectory: Trajectory,
        ticket: Ticket,
        *,
        pin: int | None = None,
        stream: bool = False,
    ) -> tuple[dict[str, Any], Assembly]:
        prompt, sampling = trajectory.next_leg()
        body = self.wire.request(
            self.model,
            prompt,
            sampling,
            cache_salt=ticket.add_salt(trajectory.salt),
            required_taint=ticket.taint,
            pin=pin,
            stamped=ticket.stamped,
            stream=stream,
        )
        return body, self.wire.assembly(sampling, len(prompt))


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


async def events(lines: AsyncIterator[bytes]) -> AsyncIterator[object]:
    """Yield the JSON objects of a server-sent event stream; raise if it ends before [DONE]."""
    async for line in lines:
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        data = text[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise RolloutError(f"The stream contains invalid JSON: {error}.") from error
        if isinstance(event, dict) and "choices" not in event:
            message = read_error_message(data.decode(errors="replace"))
            raise RolloutError(f"The stream ended with an error: {message}")
        yield event
    raise RolloutError("The stream broke off before [DONE].")
