"""RL-shaped traffic: groups of rollouts of one prompt, several turns each, all started together.

Sizes are in KV blocks, so that light workers (blocks of 16 tokens) and the replay (64) see the same
pattern. The requests depend only on the seed: every routing gets the same.

The same traffic also runs in Dynamo's offline replay: Dynamo's router over simulated engines. Time
is virtual there, so neither the machine nor its load affects the figures. The replay has no session
affinity. For Rollway's preset, groups are dealt to the workers in turn and each worker replays its
groups alone: affinity does the same as long as no worker is full. The replay does not count
generated tokens as cached either, so later turns hit less than live.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from rollway.errors import RolloutError, UsageError
from rollway.http import IDEMPOTENT, Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import SESSION_HEADER, all_or_none
from rollway.rollout.wire import DynamoAssembly, completion_request

GROUPS_PER_WORKER = 2
_OBSERVATION_BLOCKS = 2
"""The environment's tokens between two turns."""
_TOOL_SECONDS = 0.2
_VOCABULARY = 250  # of the demo's byte tokenizer, less its special tokens
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a rollout."""

    wait_seconds: float
    """The time that the environment needs before the request."""
    output: int
    seed: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of `groups` prompts, with `rollouts` of each, of `turns` turns."""

    system_blocks: ClassVar[int] = 4
    """The prefix that the prompts of all groups share."""
    prompt_blocks: ClassVar[int] = 20
    """The whole prompt, with that prefix."""
    groups: int
    rollouts: int = 8
    turns: int = 3
    block: int = 16
    seed: int = 0

    @property
    def requests(self) -> int:
        return self.groups * self.rollouts * self.turns

    def list_members(self) -> Iterator[tuple[int, int]]:
        """Yield every rollout as (group, place in the group), in the order in which they start."""
        yield from product(range(self.groups), range(self.rollouts))

    def plan_turns(self, group: int, member: int) -> list[Turn]:
        rng = Random(f"{self.seed}/{group}/{member}")
        return [
            Turn(
                wait_seconds=rng.uniform(0, 2 * _TOOL_SECONDS) if turn else 0.0,
                output=rng.randrange(self.block // 2, self.block * 2),
                seed=rng.randrange(2**31),
            )
            for turn in range(self.turns)
        ]

    def make_prompt(self, group: int) -> list[int]:
        system = self._draw("system", self.system_blocks)
        return system + self._draw(f"prompt {group}", self.prompt_blocks - self.system_blocks)

    def make_observation(self, turn: Turn) -> list[int]:
        return self._draw(f"observation {turn.seed}", _OBSERVATION_BLOCKS)

    def count_added_blocks(self, turn: Turn) -> int:
        """Return how many blocks the answer and the observation after it add, rounded up."""
        return _OBSERVATION_BLOCKS + -(-turn.output // self.block)

    def _draw(self, name: str, blocks: int) -> list[int]:
        rng = Random(f"{self.seed}/{name}")
        return [rng.randrange(_VOCABULARY) for _ in range(blocks * self.block)]


@dataclass(slots=True)
class Tally:
    """Sums over the requests of one run."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_seconds: float = 0.0
    makespan_seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add a run that was concurrent: the makespan is the longer one."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.ttft_seconds += other.ttft_seconds
        self.makespan_seconds = max(self.makespan_seconds, other.makespan_seconds)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ttft_mean_seconds(self) -> float:
        return self.ttft_seconds / self.requests if self.requests else 0.0


class Sender:
    """Sends traffic to a frontend, with the group as session, whether or not the router uses it."""

    def __init__(self, http: Http, frontend_url: str, model: str) -> None:
        self._http = http
        self._url = f"{frontend_url.rstrip('/')}/v1/completions"
        self._model = model

    async def warm_up(self, requests: int) -> None:
        """Send short requests, all at once: connections are then open before the clock starts."""
        sampling = Sampling(max_tokens=1, ignore_eos=True, logprobs=False)
        await all_or_none(
            self._post([index % _VOCABULARY], sampling, f"warm-up {index}")
            for index in range(requests)
        )

    async def send(self, traffic: Traffic) -> Tally:
        tally = Tally()
        prompts = [traffic.make_prompt(group) for group in range(traffic.groups)]
        began = time.monotonic()
        await all_or_none(
            self._run_rollout(traffic, group, member, prompts[group], tally)
            for group, member in traffic.list_members()
        )
        tally.makespan_seconds = time.monotonic() - began
        return tally

    async def _run_rollout(
        self, traffic: Traffic, group: int, member: int, prompt: list[int], tally: Tally
    ) -> None:
        tokens = list(prompt)  # the members of a group share the prompt
        for turn in traffic.plan_turns(group, member):
            await asyncio.sleep(turn.wait_seconds)
            sampling = Sampling(
                max_tokens=turn.output, ignore_eos=True, seed=turn.seed, logprobs=False
            )
            answer = await self._post(tokens, sampling, f"group {traffic.seed} {group}")
            assembly = DynamoAssembly(sampling, len(tokens))
            assembly.add(answer)
            completion = assembly.finish()
            tally.requests += 1
            tally.prompt_tokens += len(tokens)
            tally.cached_tokens += completion.cached_tokens
            tally.ttft_seconds += read_ttft(answer)
            tokens += completion.token_ids + traffic.make_observation(turn)

    async def _post(self, tokens: list[int], sampling: Sampling, session: str) -> Any:
        body = completion_request(self._model, tokens, sampling)
        nvext = body["nvext"]
        nvext["extra_fields"] = [*nvext["extra_fields"], "timing"]
        return await self._http.post(
            self._url,
            body,
            timeout=_TIMEOUT_SECONDS,
            retry=IDEMPOTENT,
            headers={SESSION_HEADER: session},
        )


def read_ttft(answer: Any) -> float:
    """Return the seconds between the request's arrival at the frontend and its first token.

    They include the wait in the router. A busy client's own clock would add the client's delays."""
    try:
        return float(answer["nvext"]["timing"]["ttft_ms"]) / 1000
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError("The frontend's answer has no time to the first token.") from error


# --- the replay --------------------------------------------------------------------------------

BLOCK = 64
DRAWS = 5
"""Each figure is the mean over this many random traffics: a makespan depends on the few longest
rollouts, and the KV router breaks ties at random."""
_EVENT_LAG_MS = 5.0
_ENGINE = {"backend": "vllm", "block_size": BLOCK, "num_gpu_blocks": 1024, "max_num_seqs": 64}

Row = dict[str, Any]


def replay(groups: int, workers: int, routing: str) -> Tally:
    """Sum over the draws; the makespan is their mean."""
    total = Tally()
    for seed in range(DRAWS):
        tally = _replay(Traffic(groups, block=BLOCK, seed=seed), workers, routing)
        makespan = total.makespan_seconds + tally.makespan_seconds / DRAWS
        total.add(tally)
        total.makespan_seconds = makespan
    return total


def _replay(traffic: Traffic, workers: int, routing: str) -> Tally:
    if routing != "rollway":
        return _run(make_trace(traffic), workers, kv=routing == "kv")
    total = Tally()
    for worker in range(min(workers, traffic.groups)):
        groups = range(worker, traffic.groups, workers)
        total.add(_run(make_trace(traffic, groups), 1, kv=False))
    return total


def make_trace(traffic: Traffic, groups: Iterable[int] | None = None) -> Iterator[Row]:
    """Yield the trace of these groups, or of all, in Mooncake's format.

    The number of a block identifies its tokens and all tokens before them, so rollouts share a
    prefix if they share numbers."""
    chosen = set(range(traffic.groups) if groups is None else groups)
    # Groups that are left out still use up numbers: parts of a trace add up to the whole.
    unused = itertools.count(list_prompt_blocks(traffic, traffic.groups)[-1] + 1)
    for group, member in traffic.list_members():
        blocks = list_prompt_blocks(traffic, group)
        for number, turn in enumerate(traffic.plan_turns(group, member)):
            start = {"delay": 1000 * turn.wait_seconds} if number else {"timestamp": 0}
            if group in chosen:
                yield {
                    "session_id": f"{group}/{member}",
                    "input_length": len(blocks) * traffic.block,
                    "output_length": turn.output,
                    "hash_ids": list(blocks),
                    **start,
                }
            blocks += itertools.islice(unused, traffic.count_added_blocks(turn))


def list_prompt_blocks(traffic: Traffic, group: int) -> list[int]:
    own = traffic.prompt_blocks - traffic.system_blocks
    first = traffic.system_blocks + group * own
    return [*range(traffic.system_blocks), *range(first, first + own)]


def _run(trace: Iterable[Row], workers: int, *, kv: bool) -> Tally:
    os.environ.setdefault("DYN_LOG", "error")  # otherwise Dynamo logs every request
    try:
        from dynamo.llm import KvRouterConfig
        from dynamo.replay import run_trace_replay
    except ImportError as error:
        raise UsageError(
            f"Dynamo's replay is not installed ({error}).", "Run: pip install 'rollway[cpu]'."
        ) from error
    options: dict[str, Any] = {"router_mode": "round_robin"}
    if kv:
        options = {
            "router_mode": "kv_router",
            "router_config": KvRouterConfig(),
            "kv_event_lag_ms": _EVENT_LAG_MS,
        }
    with tempfile.TemporaryDirectory(prefix="rollway-replay-") as scratch:
        path = Path(scratch, "trace.jsonl")
        path.write_text("".join(f"{json.dumps(row)}\n" for row in trace))
        report = run_trace_replay(
            str(path),
            num_workers=workers,
            trace_block_size=BLOCK,
            extra_engine_args={"engine": _ENGINE},
            **options,
        )
    return read_summary(report.summary)


def read_summary(summary: Any) -> Tally:
    """Convert the replay's summary to the figures of a live run."""
    prompt, requests = int(summary["total_input_tokens"]), int(summary["num_requests"])
    return Tally(
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=prompt - int(summary["committed_prefill_tokens"]),
        ttft_seconds=requests * float(summary["mean_ttft_ms"]) / 1000,
        makespan_seconds=float(summary["duration_ms"]) / 1000,
    )
