"""`rollway chaos --gateway`: break the gateway under many agents, and check every turn.

In a round, agents talk while one fault is injected. Then the gateway is killed and restarted on the
same journal, and everything that agents received is compared with what a trainer can fetch. Chaos
starts its own stack and gateway; the journal is on a small disk.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos import Progress, deal
from chaos.agents import BEHAVIOURS, CALM, Agents, SessionLedger
from chaos.gateway_process import GatewayProcess, SmallDisk, size_of, size_of_store
from chaos.judge import Decode, Verdict, judge
from chaos.limit import Limit
from rollway import processes
from rollway.api import up
from rollway.errors import RollwayError, StartError
from rollway.rollout.sequence import TokenSequence
from rollway.spec import StackSpec
from rollway.stack.state import StackDir

KILL, FULL_DISK = "kill", "full_disk"
FAULTS = (KILL, FULL_DISK, *BEHAVIOURS)

_OLD_JOURNAL = "chaos.control"
_DISK_MEBIBYTES = 32
_FILLS = 3
"""How often the disk fills up in one round; each time a write is cut short."""
_MEMORY_GROWTH = 256 * 2**20
"""How much a gateway's memory may grow after its start; it keeps a few MiB of turns."""
_PERIOD = 0.05


@dataclass(slots=True)
class GatewayChaosOptions:
    """The options of a run."""

    rounds: int = 20
    agents: int = 64
    seed: int = 0
    faults: tuple[str, ...] = FAULTS
    old_journal: bool = False
    bound: float = 60.0
    """Seconds within which every request must end."""
    seconds: float | None = None
    """After this time only the calm round follows."""


@dataclass(slots=True)
class GatewayRound:
    """A round and its outcome."""

    number: int
    fault: str
    struck: bool = False
    turns: int = 0
    """Turns that were acknowledged in this round."""
    sessions: int = 0
    seconds: float = 0.0
    lost_turns: int = 0
    mixed_trajectories: int = 0
    returned_sessions: int = 0
    error: str = ""


@dataclass(slots=True)
class GatewayReport:
    """The figures of a run, printed as JSON."""

    rounds: int = 0
    agents: int = 0
    seed: int = 0
    old_journal: bool = False
    disk: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    acknowledged_turns: int = 0
    streamed_turns: int = 0
    turns_checked: int = 0
    """A turn is checked after every round until its session is deleted."""
    trajectories_checked: int = 0
    lost_turns: int = 0
    doubled_turns: int = 0
    mixed_trajectories: int = 0
    returned_sessions: int = 0
    hangs: int = 0
    unexpected_answers: int = 0
    failed_starts: int = 0
    leftovers: list[str] = field(default_factory=list)
    gateway_kills: int = 0
    answers_on_full_disk: int = 0
    not_recorded: int = 0
    deleted_sessions: int = 0
    slow_clients: int = 0
    vanished_clients: int = 0
    cut_requests: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    memory_at_start_mib: float = 0.0
    memory_peak_mib: float = 0.0
    memory_bounded: bool = True
    journal_peak_bytes: int = 0
    log_bytes: int = 0
    seconds: float = 0.0
    ended_early: str = ""
    """Why the run ended before its last round; "" if it did not."""
    detail: list[GatewayRound] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        """The names of promises that did not hold."""
        names = (
            "lost_turns", "doubled_turns", "mixed_trajectories", "returned_sessions", "hangs",
            "unexpected_answers", "failed_starts", "leftovers",
        )  # fmt: skip
        broken = [name for name in names if getattr(self, name)]
        return broken if self.memory_bounded else [*broken, "memory_bounded"]

    @property
    def is_clean(self) -> bool:
        """Whether every promise held and every fault was injected."""
        return not self.broken and self.turns_checked > 0 and all(r.struck for r in self.detail)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "broken": self.broken, "clean": self.is_clean}


class GatewayChaos:
    """A run of chaos against the gateway."""

    def __init__(
        self, spec: StackSpec, options: GatewayChaosOptions, scratch: Path, progress: Progress
    ) -> None:
        self.spec, self.options = spec, options
        self.scratch, self.progress = scratch, progress
        self.random = random.Random(options.seed)
        self.limit = Limit(options.seconds)
        self.report = GatewayReport(
            agents=options.agents, seed=options.seed, old_journal=options.old_journal
        )
        self.decode = _decoder(Path(spec.models[0].path))
        self.disk: SmallDisk
        self.gateway: GatewayProcess
        self.agents: Agents
        self.run_id = ""

    @property
    def ledger(self) -> SessionLedger:
        return self.agents.ledger

    async def run(self) -> GatewayReport:
        began = time.monotonic()
        async with AsyncExitStack() as exits:
            await self._open(exits)
            with self.limit.obey_signals():
                await self._run_rounds()
            self.agents.raise_failures()
            self._sum_up()
        self._find_leftovers()
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    # --- the stack and the gateway ---------------------------------------------------------------

    async def _open(self, exits: AsyncExitStack) -> None:
        self.progress("starting the stack")
        stack = await exits.enter_async_context(up(self.spec))
        state = StackDir(stack.name).read()
        assert state is not None
        self.run_id = state.run_id
        self.disk = SmallDisk(self.scratch / "disk", mebibytes=_DISK_MEBIBYTES)
        exits.callback(self.disk.close)
        self.report.disk = self.disk.kind
        self.gateway = GatewayProcess(
            [stack.name, "--journal", str(self.disk.journal)],
            self.scratch / "gateway.log",
            bound=self.options.bound,
            **({"module": _OLD_JOURNAL} if self.options.old_journal else {}),
        )
        exits.push_async_callback(self.gateway.stop)
        await self.gateway.start()
        self.report.memory_at_start_mib = _mebibytes(self.gateway.memory()[0])
        self.agents = Agents(
            lambda: self.gateway.address,
            stack.models[0],
            count=self.options.agents,
            seed=self.options.seed,
            bound=self.options.bound,
        )
        self.agents.start()
        exits.push_async_callback(self.agents.stop)

    async def _restart(self) -> None:
        """Kill the gateway at work, and restart it on the same journal."""
        self._measure()
        await self.gateway.kill()
        self.report.gateway_kills += 1
        await self.gateway.start()

    def _measure(self) -> None:
        peak = self.gateway.memory()[1]
        report = self.report
        report.memory_peak_mib = max(report.memory_peak_mib, _mebibytes(peak))
        growth = report.memory_peak_mib - report.memory_at_start_mib
        report.memory_bounded = growth < _mebibytes(_MEMORY_GROWTH)
        report.journal_peak_bytes = max(report.journal_peak_bytes, size_of_store(self.disk.journal))
        report.log_bytes = size_of(self.gateway.log)

    # --- rounds ----------------------------------------------------------------------------------

    async def _run_rounds(self) -> None:
        try:
            for fault in deal(self.options.faults, self.options.rounds, self.random):
                await self._add_round(fault)
                if self.limit.is_over and len(self.report.detail) < self.options.rounds:
                    self.report.ended_early = self.limit.reason
                    break
            await self._add_round(CALM)
        except RollwayError as error:  # report what was checked until then
            self.report.detail[-1].error = error.message
            self.report.hangs += 1

    async def _add_round(self, fault: str) -> None:
        self.report.detail.append(GatewayRound(len(self.report.detail) + 1, fault))
        await self._round(self.report.detail[-1])

    async def _round(self, entry: GatewayRound) -> None:
        """Have the agents talk while a fault strikes, then kill and restart the gateway, and check
        what it kept. The calm round has no fault and no kill: it checks what is in memory."""
        self.progress(f"round {entry.number}: {entry.fault}")
        began, before = time.monotonic(), self.ledger.acknowledged_turns
        is_calm = entry.fault == CALM
        self.agents.emphasis = entry.fault if entry.fault in BEHAVIOURS else CALM
        count = self._behaviour_count(entry.fault)
        self.agents.release()
        await self._wait_for_turns(2 * self.options.agents)
        if entry.fault == FULL_DISK:
            await self._fill_disk(entry)
        elif entry.fault == KILL:
            await self._restart()
        elif not is_calm:
            await self._wait_until(lambda: self._behaviour_count(entry.fault) >= count + 3)
        entry.struck = entry.struck or entry.fault != FULL_DISK
        if not is_calm:
            await self._wait_for_turns(2 * self.options.agents)
        self.agents.hold()
        if not is_calm:
            await self._restart()
        await self.agents.wait_idle()
        self._measure()
        await self._judge(entry)
        entry.turns = self.ledger.acknowledged_turns - before
        entry.seconds = round(time.monotonic() - began, 1)

    def _behaviour_count(self, fault: str) -> int:
        ledger = self.ledger
        counts = (len(ledger.deleted), ledger.slow_clients, ledger.vanished_clients)
        return dict(zip(BEHAVIOURS, counts, strict=True)).get(fault, 0)

    async def _fill_disk(self, entry: GatewayRound) -> None:
        """Fill and free the disk several times; finally restart the gateway on a full disk."""
        refused = self.ledger.statuses[507]
        for _ in range(_FILLS):
            await self._fill_until_refused()
            self.disk.free(self.gateway.pid)
            await self._wait_for_turns(self.options.agents)
        await self._fill_until_refused()
        entry.struck = self.ledger.statuses[507] > refused
        try:
            if self.disk.mounted:
                await self._restart()
        except StartError:
            self.report.failed_starts += 1
            self.ledger.note("the gateway does not start while its disk is full")
            self.disk.free(self.gateway.pid)
            await self.gateway.start()
        finally:
            self.disk.free(self.gateway.pid)

    async def _fill_until_refused(self) -> None:
        """Fill the disk and wait until some turns were refused."""
        before = self._refusals()
        self.disk.fill(self.gateway.pid)
        if not await self._wait_until(lambda: self._refusals() > before + 3):
            self.ledger.note("no turn was refused while the disk was full")

    def _refusals(self) -> int:
        return self.ledger.statuses[507] + self.ledger.statuses[500]

    async def _wait_for_turns(self, count: int) -> None:
        """Wait for that many more acknowledged turns; raise if they do not arrive."""
        target = self.ledger.acknowledged_turns + count
        if not await self._wait_until(lambda: self.ledger.acknowledged_turns >= target):
            raise RollwayError(
                f"The agents got fewer than {count} turns within {self.options.bound:g} s."
            )

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self.options.bound
        while not condition():
            self.agents.raise_failures()
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_PERIOD)
        return True

    # --- judging ---------------------------------------------------------------------------------

    async def _judge(self, entry: GatewayRound) -> None:
        """Check what the gateway read from its journal; then delete finished sessions."""
        deleted = set(self.ledger.deleted)  # copy it: agents may delete more meanwhile
        listed = await self.gateway.sessions()
        current = [e for e in self.ledger.episodes.values() if e.fate == "kept"]
        fetched: dict[str, list[TokenSequence]] = {}
        for episode in current:
            fetched[episode.name] = await self.gateway.trajectories(episode.name)
        verdict = judge(current, deleted, listed, fetched, self.decode)
        self._add(entry, verdict)
        entry.sessions = len(listed)
        self.ledger.deleted -= verdict.spoiled
        for name in verdict.spoiled:
            self.ledger.episodes.pop(name, None)
        for episode in current:
            if episode.finished:
                await self.agents.delete(episode)

    def _add(self, entry: GatewayRound, verdict: Verdict) -> None:
        report = self.report
        report.turns_checked += verdict.turns_checked
        report.trajectories_checked += verdict.trajectories
        for name in ("lost_turns", "mixed_trajectories", "returned_sessions"):
            setattr(entry, name, getattr(verdict, name))
        for name in ("lost_turns", "doubled_turns", "mixed_trajectories", "returned_sessions"):
            setattr(report, name, getattr(report, name) + getattr(verdict, name))
        report.examples += [f"round {entry.number}: {text}" for text in verdict.examples]

    def _sum_up(self) -> None:
        report, ledger = self.report, self.ledger
        rounds = [entry for entry in report.detail if entry.fault != CALM]
        report.rounds = len(rounds)
        report.faults = dict(Counter(entry.fault for entry in rounds if entry.struck))
        for name in (
            "requests", "acknowledged_turns", "streamed_turns", "unexpected_answers",
            "not_recorded", "slow_clients", "vanished_clients", "cut_requests",
        ):  # fmt: skip
            setattr(report, name, getattr(ledger, name))
        report.hangs += ledger.hangs
        report.answers_on_full_disk = ledger.statuses[507]
        report.deleted_sessions = len(ledger.deleted)
        report.statuses = {str(status): n for status, n in sorted(ledger.statuses.items())}
        report.examples = [*ledger.examples, *report.examples][:20]

    def _find_leftovers(self) -> None:
        leftovers = [f"process {process.pid}" for process in processes.find_members(self.run_id)]
        if processes.ProcessId.of(self.gateway.pid) is not None:
            leftovers.append(f"process {self.gateway.pid} (gateway)")
        if self.disk.still_exists:
            leftovers.append(f"directory or mount {self.disk.path}")
        self.report.leftovers = leftovers


def _decoder(model: Path) -> Decode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return lambda ids: str(tokenizer.decode(list(ids)))


def _mebibytes(count: int) -> float:
    return round(count / 2**20, 1)
