"""`Rollouts`: token ids in, token ids with log-probs and their weight version out.

    rollouts = stack.rollouts()
    group = await rollouts.generate(prompt_ids, Sampling(max_tokens=64), n=8)

The n rollouts of a call are one group: they carry one session id, which the router keeps on one
worker, so that the prompt is computed once. Every request requires the taint of its weight version,
so no worker on another version samples a token of it, and KV cache is salted with the version, so
a block computed under one is never read under another.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from rollway.errors import RequestFailed, RolloutError, UsageError
from rollway.http import server_message
from rollway.rollout.completion import Assembly, Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import (
    SESSION_HEADER,
    Sender,
    Trouble,
    all_or_none,
    checked_prompt,
    explained,
    temporary,
)
from rollway.rollout.trajectory import Rollout, Span, Trajectory
from rollway.versions import Ticket

__all__ = ["Rollout", "Rollouts", "Span"]

SIBLINGS = 16


class Rollouts(Sender):
    """Samples. Its options are those of `Sender`."""

    resumes = True
    """Whether a rollout that a pause or a refit cut short goes on by itself; else it is returned
    as `aborted`, with what it has."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        group: str | None = None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Sample n rollouts of one prompt, from the current weights or from a `version` that some
        worker still serves. Cancelling the call ends them on the workers too."""
        prompt = checked_prompt(prompt_ids)
        if n < 1:
            raise UsageError(f"n is {n}.", "Ask for at least one rollout.")
        session = group or uuid.uuid4().hex
        chosen = sampling or Sampling()
        if n == 1:  # in the caller's task: whoever cancels it finds it done or without a token
            return [await self._one(prompt, chosen, session, version)]
        return await all_or_none(
            self._one(prompt, chosen.shifted(index), shared_session(session, index), version)
            for index in range(n)
        )

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        n: int = 1,
    ) -> list[list[Rollout]]:
        """A group of n rollouts for each prompt, in the order of the prompts.

        With a seed, every rollout of the batch gets its own: seed, seed + 1, …"""
        chosen = sampling or Sampling()
        return await all_or_none(
            self.generate(prompt, chosen.shifted(position * n), n)
            for position, prompt in enumerate(prompts)
        )

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        group: str | None = None,
    ) -> AsyncIterator[list[int] | Rollout]:
        """Yield token ids as they come, and the whole checked Rollout last.

        A stream that breaks raises; nothing is sampled again behind the reader's back. One that is
        refused before it begins, as a router does for a moment after a refit, is asked for again.
        One that a refit cut short goes on with the new weights."""
        if not self.wire.streams:
            raise UsageError(f"The wire `{self.wire.name}` cannot stream.", "Use `completions`.")
        trajectory = Trajectory(checked_prompt(prompt_ids), sampling or Sampling(), self.adapter)
        session, trouble = group or uuid.uuid4().hex, Trouble(self._patience)
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(trouble)
                body, assembly = self._request(trajectory, ticket, stream=True)
                try:
                    async with self._http.stream_lines(
                        self._url, body, timeout=self._timeout, headers={SESSION_HEADER: session}
                    ) as lines:
                        async for event in events(lines):
                            if tokens := assembly.add(event):
                                trouble = Trouble(self._patience)
                                yield tokens
                except RequestFailed as error:  # the answer's status: not a token has come
                    if not temporary(error):
                        raise
                    session = uuid.uuid4().hex  # it may be bound to a worker that has fallen behind
                    await trouble.wait(explained(error, self.model))
                    await self._look_again()
                    continue
                rollout = await self._take(trajectory, assembly.finish(), ticket, streamed=True)
                if rollout is not None:
                    break
        yield rollout

    async def _one(
        self, prompt: list[int], sampling: Sampling, session: str, version: int | None
    ) -> Rollout:
        """Sample until the rollout is whole and every token of it has a version."""
        trajectory = Trajectory(prompt, sampling, self.adapter)
        attempt = self._attempt(session)
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(attempt.trouble, version)
                body, assembly = self._request(trajectory, ticket, pin=attempt.pins.now)
                answer = await self._send(body, ticket, attempt)
                if answer is None:
                    continue
                assembly.add(answer)
                before = len(trajectory.token_ids)
                with self._counted():
                    rollout = await self._take(trajectory, assembly.finish(), ticket)
                if rollout is not None:
                    return rollout
                if len(trajectory.token_ids) > before:
                    attempt.trouble = Trouble(self._patience)
                else:
                    await attempt.not_attributed(ticket)

    async def _take(
        self,
        trajectory: Trajectory,
        completion: Completion,
        ticket: Ticket,
        *,
        streamed: bool = False,
    ) -> Rollout | None:
        """Add a leg; the rollout if it is whole, None if there is more to sample."""
        book, by = self._versions, completion.worker_id
        if not await self._vouched(ticket, by):
            if streamed:
                raise RolloutError("The weights changed while this rollout was streamed.")
            return None
        trajectory.add(completion, ticket.version)
        if completion.finish_reason != "aborted":
            return trajectory.rollout(completion.finish_reason, ticket.version)
        if trajectory.full:
            return trajectory.rollout("length", ticket.version)
        if not self.resumes:
            return trajectory.rollout("aborted", ticket.version)
        await self._look_again(now=True)
        if ticket.version == book.current and not book.changing and self._serves(ticket, by):
            return trajectory.rollout("aborted", ticket.version)  # somebody meant this rollout
        if streamed and trajectory.sampling.penalised and trajectory.token_ids:
            raise RolloutError("A refit cut a streamed rollout that penalties keep from going on.")
        trajectory.cut()
        return None

    def _serves(self, ticket: Ticket, worker: int | None) -> bool:
        """Whether a worker is as it was; if not, another process is changing its weights."""
        return ticket.version is None or worker in self._versions.served_by(ticket.version)

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
            cache_salt=ticket.salt,
            required_taint=ticket.taint,
            pin=pin,
            stream=stream,
        )
        return body, self.wire.assembly(sampling, len(prompt))


def shared_session(session: str, index: int) -> str:
    """A large group would fill one worker while others have nothing to do: each SIBLINGS rollouts
    of it are a group of their own (64 rollouts on 4 workers: 4.7 s instead of 14.0 s)."""
    return session if index < SIBLINGS else f"{session}/{index // SIBLINGS}"


async def events(lines: AsyncIterator[bytes]) -> AsyncIterator[object]:
    """The JSON objects of a server-sent event stream, up to [DONE]; anything less is an error."""
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
            raise RolloutError(f"The stream holds something that is not JSON: {error}.") from error
        if isinstance(event, dict) and "choices" not in event:
            said = server_message(data.decode(errors="replace"))
            raise RolloutError(f"The stream ended with an error: {said}")
        yield event
    raise RolloutError("The stream broke off before it was done.")
