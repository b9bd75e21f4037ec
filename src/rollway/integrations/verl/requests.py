"""The requests of a pool: admitted, sampled, aborted, and held back while the engines sleep.

    verl ── generate ── gate ── client ── router ──► engine
                         ▲
    abort    shut the gate; engines return the tokens so far; cancel requests that no engine has
    resume   open it
    sleep    shut it; wait for the requests in flight; engines release their memory
    wake     "weights": nothing, because the refit that follows takes the memory back by itself;
             "kv_cache": wake engines that were not refitted, and open the gate

verl calls these for every replica of a pool at once; the second call finds the work done.

`RequestLog` counts requests and their cache hits: a line per trainer step, and, if the user sets
`request_log`, a file with a line per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollway.aio import Stack
from rollway.errors import NoWorkers, RolloutError, RollwayError
from rollway.integrations.verl.generation import (
    make_empty_output,
    make_output,
    make_sampling,
    make_scores_output,
)
from rollway.integrations.verl.spec import Affinity, Options
from rollway.integrations.verl.weights import Versions
from rollway.rollout.client import Rollouts


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that was answered."""

    group: str | None
    """The id that all rollouts of a prompt share."""
    trajectory: str | None
    worker: int | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine had cached, by its own count."""
    output_tokens: int
    seconds: float


class RequestLog:
    """Sums over the requests since the last summary."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._requests = self._prompt_tokens = self._cached_tokens = 0

    def add(self, record: RequestRecord) -> None:
        self._requests += 1
        self._prompt_tokens += record.prompt_tokens
        self._cached_tokens += record.cached_tokens
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def summarize(self) -> str | None:
        """Describe the requests and reset the sums; return None if there were no requests."""
        if not self._requests:
            return None
        hits = self._cached_tokens / self._prompt_tokens
        summary = (
            f"{self._requests} requests, {hits:.1%} of {self._prompt_tokens} prompt tokens from "
            "cache"
        )
        self._requests = self._prompt_tokens = self._cached_tokens = 0
        return summary


# --- requests ------------------------------------------------------------------------------------


CONCURRENCY = 100_000
ABORT_INTERVAL_SECONDS = 0.5
"""Aborts are repeated, since a router may deliver a request to an engine after the first."""


class Gate:
    """Open, shut, or shut and rejecting. Waiting requests see every change."""

    def __init__(self) -> None:
        self._open, self._rejects = True, False
        self._changed = asyncio.Event()

    def open(self) -> None:
        self._set(is_open=True, rejects=False)

    def shut(self, *, rejects: bool | None = None) -> None:
        """Close the gate. `rejects` says whether requests are rejected instead of waiting; None
        leaves that as it is."""
        self._set(is_open=False, rejects=self._rejects if rejects is None else rejects)

    async def admit(self) -> bool:
        """Wait until the gate is open; return False if it rejects requests. The result holds until
        the caller awaits something else."""
        while not self._open:
            if self._rejects:
                return False
            await self._changed.wait()
        return True

    def _set(self, *, is_open: bool, rejects: bool) -> None:
        self._open, self._rejects = is_open, rejects
        # A new event for each change: a waiter rechecks, even if the gate opens and shuts at once.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Requests:
    """Requests in flight, and whether the engines serve them.

    `control` is held by whatever changes the engines: aborts, resumes, sleep and new weights."""

    def __init__(
        self,
        stack: Stack,
        rollout: Any,
        options: Options,
        versions: Versions,
        control: asyncio.Lock,
        *,
        frees_memory: bool,
    ) -> None:
        self._stack, self._rollout, self._options = stack, rollout, options
        self._versions, self._control, self._frees_memory = versions, control, frees_memory
        self.log = RequestLog(options.request_log)
        self.affinity: Affinity = options.affinity
        self._gate = Gate()
        self._paused = self._asleep = False
        self._failure = ""
        self._tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._aborted: set[str] = set()
        self._client = self._make_client()
        self._old_clients: list[Rollouts] = []
        """Clients of earlier adapters that still have requests."""

    def _make_client(self, adapter: str | None = None) -> Rollouts:
        client = self._stack.rollouts(
            concurrency=CONCURRENCY,
            timeout=self._options.request_timeout_s,
            patience=self._options.start_seconds,  # a pool's only engine may have to restart
            adapter=adapter,
        )
        client.resumes = False  # verl's own client continues aborted answers
        return client

    def use_adapter(self, adapter: str) -> None:
        """Sample with this adapter from now on."""
        self._old_clients.append(self._client)
        self._client = self._make_client(adapter)

    def fail(self, cause: str) -> None:
        """Answer all requests with this error, those in flight as well."""
        self._failure = cause
        self._gate.open()
        for task in self._tasks.values():
            task.cancel()

    # --- generation ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int],
        params: dict[str, Any],
        request_id: str,
        group: str | None,
        trajectory: str | None,
    ) -> dict[str, Any]:
        """Return the fields of a `TokenOutput`."""
        if not await self._gate.admit():
            return make_empty_output("aborted")
        if self._failure:
            raise RolloutError(self._failure)
        if params.get("prompt_logprobs") is not None:
            return await self._score(prompt, params["prompt_logprobs"])
        key = f"{request_id}/{uuid.uuid4().hex}"  # verl may send a request id twice
        task = asyncio.ensure_future(self.sample(list(prompt), params, group, trajectory))
        self._tasks[key] = task
        try:
            return await task
        except asyncio.CancelledError:
            if self._failure:
                raise RolloutError(self._failure) from None
            if key not in self._aborted:
                raise
            return make_empty_output("aborted")
        except RollwayError as error:
            # Ray wraps the class of an exception and keeps the message, so it must say everything.
            raise RuntimeError(f"rollway: {error} (rollway logs {self._stack.name})") from error
        finally:
            del self._tasks[key]
            self._aborted.discard(key)

    async def sample(
        self, prompt: list[int], params: dict[str, Any], group: str | None, trajectory: str | None
    ) -> dict[str, Any]:
        replays_routing = bool(getattr(self._rollout, "enable_rollout_routing_replay", False))
        sampling = make_sampling(params, len(prompt), self._rollout, routed_experts=replays_routing)
        if sampling is None:
            step = self._versions.step_of(self._versions.current)
            return make_empty_output("completed", step)
        session = {"group": group, "trajectory": trajectory, "off": None}[self.affinity]
        start = time.monotonic()
        (rollout,) = await self._client.generate(prompt, sampling, group=session)
        self.log.add(
            RequestRecord(
                group=group,
                trajectory=trajectory,
                worker=rollout.worker_id,
                prompt_tokens=len(prompt),
                cached_tokens=rollout.cached_tokens,
                output_tokens=len(rollout.token_ids),
                seconds=time.monotonic() - start,
            )
        )
        return make_output(rollout, self._versions.step_of)

    async def _score(self, prompt: Sequence[int], top_tokens: int) -> dict[str, Any]:
        if top_tokens:
            raise RolloutError(
                f"verl requested a teacher's {top_tokens} most likely tokens; rollout.name=dynamo "
                "returns the log-probs of the prompt's own tokens alone."
            )
        teacher = self._stack.teacher(timeout=self._options.request_timeout_s)
        (scores,) = await teacher.score([list(prompt)])
        return make_scores_output(scores, self._versions.step_of)

    # --- control ---------------------------------------------------------------------------------

    async def abort(self, *, rejects: bool) -> list[str]:
        """Answer requests in flight with the tokens so far; return their ids. Later requests wait
        for `resume`, or get empty answers if the pool `rejects` them."""
        self._gate.shut(rejects=rejects)
        async with self._control:
            self._gate.shut(rejects=rejects)  # a resume that held `control` may have opened it
            tasks = dict(self._tasks)
            if not self._paused:
                with contextlib.suppress(NoWorkers):  # all have died: there is nothing to abort
                    await self._stack.fleet.pause("abort")
                self._paused = True
            if tasks:
                await self._wait_for_engines(tasks)
                await self._cancel_unsent(tasks)
        return [key.split("/")[0] for key in tasks]

    async def _wait_for_engines(self, tasks: dict[str, asyncio.Task[Any]]) -> None:
        """Wait until no engine has any of the requests, however slowly it returns its tokens."""
        pending = set(tasks.values())
        deadline = time.monotonic() + self._options.abort_seconds
        while in_flight := self._count_in_flight():
            _, pending = await asyncio.wait(pending, timeout=ABORT_INTERVAL_SECONDS)
            if not pending:
                return
            if time.monotonic() > deadline:
                raise RolloutError(f"{in_flight} requests could not be aborted.")
            with contextlib.suppress(RollwayError):  # a dead engine fails its requests itself
                await self._stack.fleet.pause("abort")

    async def _cancel_unsent(self, tasks: dict[str, asyncio.Task[Any]]) -> None:
        """Cancel requests that no engine has: they would wait for the resume, and have no tokens
        to lose."""
        unsent = {key: task for key, task in tasks.items() if not task.done()}
        self._aborted.update(unsent)
        for task in unsent.values():
            task.cancel()
        if unsent:
            await asyncio.wait(unsent.values())

    def _count_in_flight(self) -> int:
        """Count the requests that an engine has, or may have."""
        self._old_clients = [client for client in self._old_clients if client.in_flight]
        return sum(client.in_flight for client in (*self._old_clients, self._client))

    async def resume(self) -> None:
        async with self._control:
            if self._asleep:
                return
            if self._paused:
                await self._stack.fleet.resume()
                self._paused = False
            self._gate.open()

    async def sleep(self) -> None:
        """Release the engines' memory to the trainer, once the requests in flight are answered."""
        if not self._frees_memory:
            return
        self._gate.shut()
        async with self._control:
            if self._asleep:
                return
            self._gate.shut()  # a resume that held `control` may have opened it
            if self._tasks:
                await asyncio.wait(self._tasks.values())
            await self._stack.sleep(self._options.sleep_level)
            self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Wake the engines and resume, once verl wants the cache back. Until then the memory of the
        cache is free for the new weights."""
        if tags is not None and "kv_cache" not in tags:
            return
        async with self._control:
            if self._asleep:
                await self._stack.wake()
                self._asleep = False
        await self.resume()

    async def clear_cache(self) -> None:
        if not self._asleep:
            with contextlib.suppress(NoWorkers):  # all have died, with what they had cached
                await self._stack.fleet.flush_cache()
