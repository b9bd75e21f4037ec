"""`rollway bench gateway`: a day's load in miniature; the gateway's resources must not grow.

Many agents hold short conversations, streamed or not, and some agents disconnect mid-answer. A
trainer fetches each session and deletes it. The benchmark samples memory, open descriptors, and the
sizes of the store and the logs, and compares the last tenth of the run with the first.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.cheap_frontend import MODEL
from benchmarks.children import start_child
from benchmarks.inputs import build_demo_model, read_spec
from chaos.agents import Answer
from chaos.clients import Manner, Reply, Vanished, call
from chaos.gateway_process import GatewayProcess, size_of, size_of_store
from rollway.api import up
from rollway.cli.output import print_progress
from rollway.errors import RollwayError, UsageError
from rollway.rollout.sequence import TokenSequence
from rollway.spec import StackSpec
from rollway.stack.state import StackDir

_TURNS = 4
_TOKENS = 12
_VANISH_EVERY = 25  # sessions
_SAMPLES = 200
_BOUND = 120.0
MEMORY_RATIO = 1.15
MORE_DESCRIPTORS = 16
MORE_JOURNAL_MIB = 4  # the write-ahead log of the store is emptied at 4 MiB
LOG_BYTES_PER_REQUEST = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """The gateway's resources after a number of requests."""

    requests: int
    seconds: float
    memory: int
    descriptors: int
    journal: int
    log: int


@dataclass(slots=True)
class Tenth:
    """Medians over a tenth of the run; `log_per_request` is in bytes."""

    memory_mib: float = 0.0
    descriptors: float = 0.0
    journal_mib: float = 0.0
    log_per_request: float = 0.0
    requests_per_second: float = 0.0


@dataclass(slots=True)
class GatewayLoad:
    """The report."""

    requests: int = 0
    sessions: int = 0
    agents: int = 0
    seconds: float = 0.0
    failed_requests: int = 0
    wrong_trajectories: int = 0
    """Fetched trajectories that lack an acknowledged turn."""
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
        """Whether no resource grew with the number of requests, and no request failed."""
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


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    if options.requests < 1000 or options.agents < 1:
        raise UsageError(
            "That is too little to measure growth.", "Give at least 1000 requests and one agent."
        )
    load = asyncio.run(_bench_gateway(read_spec(options), options.requests, options.agents))
    return (0 if load.flat else 1), load.as_json()


async def _bench_gateway(spec: StackSpec | None, requests: int, agents: int) -> GatewayLoad:
    """Send requests through a gateway, to a stack or, without `spec`, to a stand-in."""
    with tempfile.TemporaryDirectory(prefix="rollway-bench-gateway-") as scratch:
        directory = Path(scratch)
        async with _start_upstream(spec) as (arguments, logs):
            journal = directory / "gateway.sqlite"
            gateway = GatewayProcess(
                [*arguments, "--journal", str(journal)], directory / "gateway.log", bound=_BOUND
            )
            await gateway.start()
            try:
                load = GatewayLoad(agents=agents)
                await _Run(gateway, journal, [gateway.log, *logs], requests, load).run()
                return load
            finally:
                await gateway.stop()


@asynccontextmanager
async def _start_upstream(spec: StackSpec | None) -> AsyncIterator[tuple[list[str], list[Path]]]:
    """Start the gateway's upstream; yield the gateway's arguments and the paths of logs."""
    if spec is not None:
        async with up(spec) as stack:
            state = StackDir(stack.name).read()
            assert state is not None
            yield [stack.name], [Path(state.log_dir)]
        return
    async with start_child("benchmarks.cheap_frontend") as (_, ready):
        url, tokenizer = ready["url"], str(build_demo_model())
        yield [url, "--rl-url", url, "--model", MODEL, "--tokenizer", tokenizer], []


@dataclass(slots=True)
class _Run:
    """One run of the load, which fills in `figures`."""

    gateway: GatewayProcess
    journal: Path
    logs: list[Path]
    total: int
    figures: GatewayLoad
    http: aiohttp.ClientSession = field(init=False)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    model: str = ""
    began: float = 0.0

    async def run(self) -> None:
        base = f"http://{self.gateway.address.host}:{self.gateway.address.port}"
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_BOUND)
        async with aiohttp.ClientSession(base, connector=connector, timeout=timeout) as self.http:
            models = json.loads(await self._request("GET", "/v1/models"))
            self.model = models["data"][0]["id"]
            self.figures.requests = 0
            self.began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.figures.agents):
                    tasks.create_task(self._run_agent())
        self._summarize()

    async def _run_agent(self) -> None:
        while self.figures.requests < self.total:
            number = next(self.numbers)
            try:
                await self._run_episode(f"episode-{number}", vanishes=number % _VANISH_EVERY == 0)
            except (RollwayError, OSError, EOFError, aiohttp.ClientError, ValueError) as error:
                self.figures.failed_requests += 1
                if len(self.figures.examples) < 10:
                    self.figures.examples.append(repr(error)[:300])
                # A gateway that is down must not be sent requests in a tight loop.
                await asyncio.sleep(0.5)

    async def _run_episode(self, session: str, *, vanishes: bool) -> None:
        """Hold a conversation; then fetch and delete it, as a trainer does."""
        messages: list[dict[str, str]] = []
        for turn in range(_TURNS):
            messages.append({"role": "user", "content": f"{session}, turn {turn}"})
            body = {"model": self.model, "messages": messages, "max_tokens": _TOKENS}
            body |= {"ignore_eos": True, "stream": turn % 2 == 1}
            messages.append({"role": "assistant", "content": await self._chat(session, body)})
        if vanishes:
            await self._vanish(session, {**body, "stream": True})
        path = f"/v1/rollway/trajectories/{session}"
        fetched = json.loads(await self._request("GET", path))
        sequences = [TokenSequence.from_json(raw) for raw in fetched["trajectories"]]
        sampled = sum(sum(sequence.loss_mask) for sequence in sequences)
        # A turn whose client disconnected may or may not be recorded.
        if sampled != _TURNS * _TOKENS and not (vanishes and sampled > _TURNS * _TOKENS):
            self.figures.wrong_trajectories += 1
        await self._request("DELETE", path)
        self.figures.sessions += 1

    async def _chat(self, session: str, body: dict[str, Any]) -> str:
        headers = {"x-rollway-session": session}
        raw = await self._request("POST", "/v1/chat/completions", body, headers)
        answer = Answer.read(Reply(200, raw))
        if answer.status != 200 or answer.trouble:
            raise RollwayError(f"An answer is {answer.status}: {answer.trouble}")
        return answer.text

    async def _vanish(self, session: str, body: dict[str, Any]) -> None:
        """Send a request and disconnect when the answer begins."""
        headers = {"x-rollway-session": session}
        raw, manner = json.dumps(body).encode(), Manner(vanish="answer")
        try:
            await call(self.gateway.address, "POST", "/v1/chat/completions", raw, headers, manner)
        except Vanished:
            self.figures.vanished_clients += 1
        self._count()

    async def _request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> bytes:
        async with self.http.request(method, path, json=body, headers=headers) as response:
            raw = await response.read()
            if response.status != 200:
                raise RollwayError(f"{method} {path}: {response.status}, {raw[:200]!r}")
        self._count()
        return raw

    def _count(self) -> None:
        """Count a request; sample and print the gateway's resources at regular intervals."""
        figures = self.figures
        figures.requests += 1
        if figures.requests % max(1, self.total // _SAMPLES) == 0:
            sample = Sample(
                requests=figures.requests,
                seconds=round(time.monotonic() - self.began, 2),
                memory=self.gateway.memory()[0],
                descriptors=self.gateway.descriptors(),
                journal=size_of_store(self.journal),
                log=sum(map(size_of, self.logs)),
            )
            figures.samples.append(sample)
        if figures.requests % max(1, self.total // 20) == 0 and figures.samples:
            print_progress(json.dumps(asdict(figures.samples[-1])))

    def _summarize(self) -> None:
        figures, samples = self.figures, self.figures.samples
        figures.seconds = round(time.monotonic() - self.began, 1)
        part = max(2, len(samples) // 10)
        figures.first, figures.last = _summarize(samples[:part]), _summarize(samples[-part:])
        figures.memory_ratio = round(figures.last.memory_mib / figures.first.memory_mib, 3)
        figures.journal_peak_mib = _mebibytes(max(sample.journal for sample in samples))
        figures.log_mib = _mebibytes(samples[-1].log)
        figures.samples = samples[:: max(1, len(samples) // 20)]  # 20 rows are enough to print


def _summarize(samples: list[Sample]) -> Tenth:
    count = max(1, samples[-1].requests - samples[0].requests)
    seconds = max(1e-9, samples[-1].seconds - samples[0].seconds)
    return Tenth(
        memory_mib=_mebibytes(median(sample.memory for sample in samples)),
        descriptors=median(sample.descriptors for sample in samples),
        journal_mib=_mebibytes(median(sample.journal for sample in samples)),
        log_per_request=round((samples[-1].log - samples[0].log) / count, 1),
        requests_per_second=round(count / seconds, 1),
    )


def _mebibytes(count: float) -> float:
    return round(count / 2**20, 2)
