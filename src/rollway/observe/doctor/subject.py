"""The stack under examination: what was read of it once, and how to ask it something."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rollway.errors import Level, RequestFailed, RollwayError, Unreachable
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import ONCE, Http
from rollway.observe.metrics_reader import sum_series
from rollway.observe.sample import read_page
from rollway.rollout.completion import Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request
from rollway.signed_calls import DOOR
from rollway.stack.state import StackState
from rollway.stack_handle import Stack
from rollway.versions import taint_of

REQUEST_SECONDS = 60.0
_DOOR_SECONDS = 5.0
_PROMPT_TOKENS = 400
"""A few blocks of KV, of any size that engines use."""
_LOWEST, _HIGHEST = 5, 60
"""Token ids of prompts: every vocabulary has these."""


Findings = AsyncIterator[tuple[Level, str] | tuple[Level, str, str]]
"""What a check finds of its subject: how bad it is, the cause, and the fix if there is one."""
Door = Literal["guarded", "open", "silent"]
"""With Rollway's door, behind which every order must be signed; without it; or no answer at all."""


@dataclass(slots=True)
class ModelWorkers:
    """The workers of one model."""

    model: str
    fleet: Fleet
    workers: list[Worker] = field(default_factory=list)
    labels: dict[int, int | None] = field(default_factory=dict)
    context: int = _PROMPT_TOKENS
    trouble: RollwayError | None = None
    """Why the workers could not be listed."""
    refusing: set[int] = field(default_factory=set)
    """Workers that answered no request; later checks leave them out."""

    @property
    def newest(self) -> int | None:
        """The newest version that a worker declares to serve."""
        labels = self.labels.values()
        return max((label for label in labels if label is not None and label >= 0), default=None)

    def get_label(self, worker: Worker) -> int | None:
        return self.labels.get(worker.instance_id)

    @property
    def serving(self) -> list[Worker]:
        """The workers that later checks may ask: they answer, and serve the newest version."""
        return [
            worker
            for worker in self.workers
            if worker.error is None
            and worker.instance_id not in self.refusing
            and (self.newest is None or self.get_label(worker) == self.newest)
        ]

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode are apart."""
        return any(worker.role for worker in self.workers)


@dataclass(slots=True)
class Subject:
    """A stack, its pools, and what was asked of it."""

    stack: Stack
    http: Http
    state: StackState | None
    pools: list[ModelWorkers]
    doors: dict[int, Door] = field(default_factory=dict)
    """How the admin port of each worker answers."""
    requests: int = 0
    tokens: int = 0
    _random: random.Random = field(default_factory=random.Random)

    @classmethod
    async def read(cls, stack: Stack, http: Http) -> Subject:
        """List the workers of all models, with their labels."""
        pools = []
        for model in stack.models:
            pool = ModelWorkers(model, stack.fleet_of(model))
            try:
                pool.workers = await pool.fleet.workers()
                if pool.workers:
                    pool.labels = await pool.fleet.read_versions()
            except RollwayError as error:
                pool.trouble = error
            pool.context = await _read_context(stack, model)
            pools.append(pool)
        subject = cls(stack, http, stack.read_state(), pools)
        workers = [w for pool in pools for w in pool.workers if w.error is None]
        doors = await asyncio.gather(*map(subject._ask_door, workers))
        subject.doors = {w.instance_id: d for w, d in zip(workers, doors, strict=True)}
        for pool in pools:
            pool.refusing |= {i for i, door in subject.doors.items() if door == "silent"}
        return subject

    async def _ask_door(self, worker: Worker) -> Door:
        try:
            url = f"{worker.admin_url}/engine/{DOOR}"
            reply = await self.http.post(url, {}, timeout=_DOOR_SECONDS, retry=ONCE)
        except Unreachable:
            return "silent"
        except RequestFailed:
            return "open"
        has_door = isinstance(reply, dict) and isinstance(reply.get("process"), str)
        return "guarded" if has_door else "open"

    @property
    def local_state(self) -> StackState | None:
        """The state of a stack whose processes run on this machine."""
        return None if self.state is None or self.state.ray_namespace else self.state

    def make_prompt(self, pool: ModelWorkers) -> list[int]:
        """Return a prompt that nobody has sent."""
        length = max(2, min(_PROMPT_TOKENS, pool.context // 2))
        return [self._random.randrange(_LOWEST, _HIGHEST) for _ in range(length)]

    def make_salt(self, pool: ModelWorkers) -> str:
        """Return a salt that nobody has used, of the newest version."""
        version = "own" if pool.newest is None else f"v{pool.newest}"
        return f"{version}:doctor-{self._random.getrandbits(64):x}"

    async def ask(
        self,
        pool: ModelWorkers,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        omit: Sequence[str] = (),
        **routing: Any,
    ) -> Completion:
        """Send one request, as rollouts do, for the newest version; `omit` are fields to leave
        out."""
        if pool.newest is not None:
            routing = {"required_taint": taint_of(pool.newest), **routing}
        body = completion_request(pool.model, prompt, replace(sampling, ignore_eos=True), **routing)
        body = {name: value for name, value in body.items() if name not in omit}
        assembly = DynamoAssembly(sampling, len(prompt))
        url = f"{self.stack.frontend_url}/v1/completions"
        self.requests += 1
        assembly.add(await self.http.post(url, body, timeout=REQUEST_SECONDS, retry=ONCE))
        completion = assembly.finish()
        self.tokens += len(completion.token_ids)
        return completion

    def read_frontend_command(self) -> list[str]:
        """Return the command line of the frontend; empty if it does not run here."""
        processes = [] if self.local_state is None else self.local_state.processes
        frontend = next((p for p in processes if p.role == "frontend"), None)
        try:
            content = Path(f"/proc/{frontend.pid if frontend else None}/cmdline").read_text()
        except (OSError, ValueError):
            return []
        return content.split("\0")

    async def count_requests(self) -> float:
        """Return how many requests of others are under way at the frontend."""
        name = "dynamo_frontend_inflight_requests"
        return (await self.read_metrics(self.stack.frontend_url, name))[name]

    async def read_metrics(self, url: str, *names: str) -> dict[str, float]:
        """Return the sums of some series of a worker or of the frontend; 0 for one it lacks."""
        page = await read_page(self.http, f"{url}/metrics", 5.0) or ""
        return dict.fromkeys(names, 0.0) | sum_series(page, names, ())

    async def is_answered(self, pool: ModelWorkers, **routing: Any) -> bool:
        """Return whether a request of one token is answered."""
        try:
            await self.ask(pool, self.make_prompt(pool), ONE_TOKEN, **routing)
        except RollwayError:
            return False
        return True


ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


async def _read_context(stack: Stack, model: str) -> int:
    try:
        return await stack.context_length(model)
    except RequestFailed:
        return _PROMPT_TOKENS
