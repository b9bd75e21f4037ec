"""`rollway bench gateway`: a day's load in miniature; what the gateway uses must not grow with it.

Many agents hold short conversations, streamed or not, and some of them vanish. A trainer fetches
each session and deletes it. Memory, open descriptors, and the sizes of the journal and of the logs
are read all the while: the last tenth of the run is compared with the first.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from rollway import processes
from rollway.api import up
from rollway.bench.cheap_frontend import MODEL
from rollway.chaos.clients import Manner, Vanished, call
from rollway.chaos.gateway_process import GatewayProcess, size_of
from rollway.config import StackSpec
from rollway.errors import RollwayError, StartError
from rollway.rollout.sequence import TokenSequence
from rollway.stack.state import StackDir

_TURNS = 4
_TOKENS = 12
_VANISH_EVERY = 25  # sessions
_SAMPLES = 200
_BOUND = 120.0
MEMORY_RATIO = 1.15
MORE_DESCRIPTORS = 16
MORE_JOURNAL_MIB = 4  # what was forgotten waits in the file until it is worth a compaction
LOG_BYTES_PER_REQUEST = 256
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the gateway used after so many requests."""

    requests: int
    seconds: float
    memory: int
    descriptors: int
    journal: int
    log: int


@dataclass(slots=True)
class Tenth:
    """Medians over a tenth of the run; `log_per_request` in bytes."""

    memory_mib: float = 0.0
    descriptors: float = 0.0
    journal_mib: float = 0.0
    log_per_request: float = 0.0
    requests_per_second: float = 0.0


@dataclass(slots=True)
class GatewayLoad:
    """The one JSON object."""

    requests: int = 0
    sessions: int = 0
    agents: int = 0
    seconds: float = 0.0
    failed_requests: int = 0
    wrong_trajectories: int = 0
    """Fetched, and without all of the turns that were acknowledged."""
    vanished_clients: int = 0
    first: Tenth = field(default_factory=Tenth)
    last: Tenth = field(default_factory=Tenth)
    memory_ratio: float = 0.0
    journal_peak_mib: float = 0.0
    log_mib: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def flat(self) -> bool:
        """Whether nothing grew with the number of requests, and nothing failed."""
        return (
            self.memory_ratio <= MEMORY_RATIO
            and self.last.descriptors <= self.first.descriptors + MORE_DESCRIPTORS
            and self.last.journal_mib <= 2 * self.first.journal_mib + MORE_JOURNAL_MIB
            and self.last.log_per_request <= LOG_BYTES_PER_REQUEST
            and not self.failed_requests
            and not self.wrong_trajectories
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "flat": self.flat}


async def bench_gateway_load(
    spec: StackSpec | None, *, requests: int, agents: int, tokenizer: str, say: Say
) -> GatewayLoad:
    """Send so many requests through a gateway, to a stack or to a stand-in for one."""
    with tempfile.TemporaryDirectory(prefix="rollway-bench-gateway-") as scratch:
        directory = Path(scratch)
        async with _upstream(spec, tokenizer) as (arguments, logs):
            journal = directory / "journal.jsonl"
            gateway = GatewayProcess(
                [*arguments, "--journal", str(journal)], directory / "gateway.log", bound=_BOUND
            )
            await gateway.start()
            try:
                load = _Load(gateway, journal, [gateway.log, *logs], requests, agents, say)
                return await load.run()
            finally:
                await gateway.stop()


@asynccontextmanager
async def _upstream(
    spec: StackSpec | None, tokenizer: str
) -> AsyncIterator[tuple[list[str], list[Path]]]:
    """Start what the gateway sends to; yields its arguments, and where there are logs."""
    if spec is not None:
        async with up(spec) as stack:
            state = StackDir(stack.name).read()
            assert state is not None
            yield [stack.name], [Path(state.log_dir)]
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollway.bench.cheap_frontend",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        preexec_fn=processes.die_with_parent,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise StartError("The stand-in for a frontend did not start.")
        yield [url, "--rl-url", url, "--model", MODEL, "--tokenizer", tokenizer], []
    finally:
        process.stdin.close()
        await process.wait()


class _Load:
    """One run."""

    def __init__(
        self,
        gateway: GatewayProcess,
        journal: Path,
        logs: list[Path],
        requests: int,
        agents: int,
        say: Say,
    ) -> None:
        self.figures = GatewayLoad(agents=agents)
        self._gateway = gateway
        self._journal = journal
        self._logs = logs
        self._total = requests
        self._say = say
        self._numbers = itertools.count(1)
        self._base = f"http://{gateway.address.host}:{gateway.address.port}"
        self._http: aiohttp.ClientSession
        self._model = ""
        self._began = 0.0

    async def run(self) -> GatewayLoad:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_BOUND)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            self._model = (await self._ask("GET", "/v1/models"))["data"][0]["id"]
            self.figures.requests = 0
            self._began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.figures.agents):
                    tasks.create_task(self._agent())
        self._sum_up()
        return self.figures

    async def _agent(self) -> None:
        while self.figures.requests < self._total:
            number = next(self._numbers)
            try:
                await self._episode(f"episode-{number}", vanishes=number % _VANISH_EVERY == 0)
            except (RollwayError, OSError, EOFError, aiohttp.ClientError, ValueError) as error:
                self.figures.failed_requests += 1
                if len(self.figures.examples) < 10:
                    self.figures.examples.append(repr(error)[:300])
                await asyncio.sleep(0.5)

    async def _episode(self, session: str, *, vanishes: bool) -> None:
        """Hold a conversation; then fetch and delete it, as a trainer does."""
        messages: list[dict[str, str]] = []
        for turn in range(_TURNS):
            messages.append({"role": "user", "content": f"{session}, turn {turn}"})
            body = {"model": self._model, "messages": messages, "max_tokens": _TOKENS}
            body |= {"ignore_eos": True, "stream": turn % 2 == 1}
            text = await self._say_turn(session, body)
            messages.append({"role": "assistant", "content": text})
        if vanishes:
            await self._vanish(session, {**body, "stream": True})
        path = f"/v1/rollway/trajectories/{session}"
        fetched = await self._ask("GET", path)
        sequences = [TokenSequence.from_json(raw) for raw in fetched["trajectories"]]
        sampled = sum(sum(sequence.loss_mask) for sequence in sequences)
        # Of a turn whose client vanished nobody knows whether it was recorded.
        if sampled != _TURNS * _TOKENS and not (vanishes and sampled > _TURNS * _TOKENS):
            self.figures.wrong_trajectories += 1
        await self._ask("DELETE", path)
        self.figures.sessions += 1

    async def _say_turn(self, session: str, body: dict[str, Any]) -> str:
        headers = {"x-rollway-session": session}
        answer = await self._ask("POST", "/v1/chat/completions", body, headers)
        if not body["stream"]:
            return str(answer["choices"][0]["message"]["content"])
        choices = [choice for event in answer for choice in event["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    async def _vanish(self, session: str, body: dict[str, Any]) -> None:
        headers = {"x-rollway-session": session}
        raw, manner = json.dumps(body).encode(), Manner(vanish="answer")
        try:
            await call(self._gateway.address, "POST", "/v1/chat/completions", raw, headers, manner)
        except Vanished:
            self.figures.vanished_clients += 1
        self._count()

    async def _ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        """The decoded answer: an object, or the list of a stream's events."""
        url = f"{self._base}{path}"
        async with self._http.request(method, url, json=body, headers=headers) as response:
            raw = await response.read()
            if response.status != 200:
                raise RollwayError(f"{method} {path}: {response.status}, {raw[:200]!r}")
        self._count()
        if not raw.startswith(b"data:"):
            return json.loads(raw)
        lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")]
        if lines[-1] != b"[DONE]":
            raise RollwayError(f"{method} {path}: a stream without an end, {raw[-200:]!r}")
        return [json.loads(line) for line in lines[:-1]]

    # --- what it uses ----------------------------------------------------------------------------

    def _count(self) -> None:
        figures = self.figures
        figures.requests += 1
        step = max(1, self._total // _SAMPLES)
        if figures.requests % step == 0:
            figures.samples.append(self._sample())
        if figures.requests % max(1, self._total // 20) == 0 and figures.samples:
            self._say(_line(figures.samples[-1]))

    def _sample(self) -> Sample:
        return Sample(
            requests=self.figures.requests,
            seconds=round(time.monotonic() - self._began, 2),
            memory=self._gateway.memory()[0],
            descriptors=self._gateway.descriptors(),
            journal=size_of(self._journal),
            log=sum(map(size_of, self._logs)),
        )

    def _sum_up(self) -> None:
        figures = self.figures
        figures.seconds = round(time.monotonic() - self._began, 1)
        samples = figures.samples
        part = max(2, len(samples) // 10)
        figures.first, figures.last = _tenth(samples[:part]), _tenth(samples[-part:])
        figures.memory_ratio = round(figures.last.memory_mib / figures.first.memory_mib, 3)
        figures.journal_peak_mib = _mebibytes(max(sample.journal for sample in samples))
        figures.log_mib = _mebibytes(samples[-1].log)
        # Twenty rows tell the story.
        figures.samples = samples[:: max(1, len(samples) // 20)]


def _tenth(samples: list[Sample]) -> Tenth:
    count = max(1, samples[-1].requests - samples[0].requests)
    seconds = max(1e-9, samples[-1].seconds - samples[0].seconds)
    return Tenth(
        memory_mib=_mebibytes(median(sample.memory for sample in samples)),
        descriptors=median(sample.descriptors for sample in samples),
        journal_mib=_mebibytes(median(sample.journal for sample in samples)),
        log_per_request=round((samples[-1].log - samples[0].log) / count, 1),
        requests_per_second=round(count / seconds, 1),
    )


def _line(sample: Sample) -> str:
    return (
        f"{sample.requests} requests, {sample.seconds:.0f} s: "
        f"{_mebibytes(sample.memory)} MiB, {sample.descriptors} descriptors, "
        f"journal {_mebibytes(sample.journal)} MiB, logs {_mebibytes(sample.log)} MiB"
    )


def shown(figures: dict[str, Any]) -> str:
    """The figures for people: the first tenth of the run against the last."""
    lines = [f"{'':24}{'first tenth':>14}{'last tenth':>14}"]
    for name, value in figures["first"].items():
        lines.append(f"{name.replace('_', ' '):24}{value:>14}{figures['last'][name]:>14}")
    rest = ("requests", "sessions", "agents", "seconds", "failed_requests", "wrong_trajectories")
    for name in (*rest, "vanished_clients", "memory_ratio", "journal_peak_mib", "log_mib", "flat"):
        lines.append(f"{name.replace('_', ' ')}: {figures[name]}")
    return "\n".join([*lines, *figures["examples"]])


def _mebibytes(count: float) -> float:
    return round(count / 2**20, 2)
