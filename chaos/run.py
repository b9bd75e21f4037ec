"""`rollway chaos`: refit under traffic and injected faults, and check every token.

A round arms one fault, refits, waits until the fleet has recovered, and sends requests whose
prefixes are cached. Callers generate during all of this. Each token is compared with a forward pass
of the version it is stamped with. Chaos starts, breaks and stops its own stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from chaos import Progress, deal, prime_rl
from chaos.control import NaiveBook, NaiveRollouts, naive_refit
from chaos.faults import WHERE, Injector, Joiner, ResettingHttp, Strike
from chaos.limit import Limit
from chaos.target import Target
from chaos.traffic import BUSY_SECONDS, CALM_SECONDS, Policies, Traffic
from rollway.aio import Stack, up
from rollway.errors import RefitError, RollwayError, UsageError
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import RefitMode
from rollway.integrations.prime_rl import updates
from rollway.rollout.client import Rollouts
from rollway.spec import AdminTimeouts, StackSpec

MODES: tuple[RefitMode, ...] = ("pause-all", "in-flight", "rolling")
TIMEOUTS = AdminTimeouts(probe=5.0, pause=10.0, update=20.0)
PATIENCE_SECONDS = 20.0


@dataclass(slots=True)
class ChaosOptions:
    """The options of a run."""

    rounds: int = 20
    seed: int = 0
    faults: tuple[str, ...] = tuple(WHERE)
    callers: int = 6
    unprotected: bool = False
    """Whether to refit without Rollway's protections and without faults, as a control."""
    through_prime_rl: bool = False
    """Whether prime-rl's calls refit the fleet, and its route samples."""
    hang_seconds: float = 120.0
    """A refit or a rollout that takes longer counts as a hang."""
    heal_seconds: float = 400.0
    """The run ends if the fleet has not recovered after this time."""
    seconds: float | None = None
    """The run begins no round after this time, and waits for no recovery."""


@dataclass(slots=True)
class Round:
    """A round and its outcome."""

    number: int
    fault: str
    step: str
    mode: str
    version: int
    struck: bool = False
    """Whether the fault was injected: a refit may end before the fault's step."""
    outcome: str = ""
    """`served`, `partly` (not by all workers), `refused`, `failed`, `cancelled` or `hung`."""
    seconds: float = 0.0
    heal_seconds: float = 0.0
    healed: bool = False
    """Whether the fleet has recovered; a run over its limit does not wait for it."""
    error: str = ""


@dataclass(slots=True)
class Report:
    """The figures of a run, printed as JSON."""

    rounds: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    tokens_checked: int = 0
    stale_tokens: int = 0
    wrong_logprobs: int = 0
    largest_difference: float = 0.0
    """Of a right log-prob from torch's; the tolerance is 1e-3."""
    lost_rollouts: int = 0
    hangs: int = 0
    orphans: int = 0
    unprotected: bool = False
    rollouts: int = 0
    rollout_errors: dict[str, int] = field(default_factory=dict)
    spans_per_rollout: dict[str, int] = field(default_factory=dict)
    refits: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    seconds: float = 0.0
    ended_early: str = ""
    """Why the run ended before its last round; "" if it did not."""
    detail: list[Round] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every promise held and tokens were checked."""
        bad = (self.stale_tokens, self.wrong_logprobs, self.lost_rollouts, self.hangs, self.orphans)
        return not any(bad) and self.tokens_checked > 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Chaos:
    """A run of chaos."""

    def __init__(
        self, spec: StackSpec, options: ChaosOptions, scratch: Path, progress: Progress
    ) -> None:
        self.spec, self.options = spec, options
        self.scratch, self.progress = scratch, progress
        self.random = random.Random(options.seed)
        self.limit = Limit(options.seconds)
        base = Path(spec.models[0].path)
        if not (base / "model.safetensors").is_file():
            raise UsageError(
                f"{base} is not a checkpoint directory with a model.safetensors.",
                "Use a small model: chaos copies and changes its checkpoint.",
            )
        self.vocabulary = int(json.loads((base / "config.json").read_text())["vocab_size"])
        self.policies = Policies(base, scratch)
        self.version = 0
        self.report = Report(seed=options.seed, unprotected=options.unprotected)
        self.exits = AsyncExitStack()
        self.target = Target(spec)
        self.stack: Stack
        self.fleet: Fleet
        self.traffic: Traffic
        self.injector: Injector
        self.joiner: Joiner
        self.server: prime_rl.Server | None = None
        """Refits and samples, if the run goes through prime-rl's calls."""

    async def run(self) -> Report:
        began = time.monotonic()
        try:
            await self._open()
            self.traffic.start()
            with self.limit.obey_signals():
                await self._run_rounds()
                await self.traffic.stop()
                await self.traffic.check()
        finally:
            await self._close()
        self.report.seconds = round(time.monotonic() - began, 1)
        self._sum_up()
        return self.report

    # --- the stack -----------------------------------------------------------------------------

    async def _open(self) -> None:
        """Start the stack, at the beginning and again after its supervisor was killed."""
        self.progress("starting the stack")
        self.exits = AsyncExitStack()
        self.stack = await self.exits.enter_async_context(up(self.spec))
        http = await self.exits.enter_async_context(ResettingHttp())
        self.fleet = self.stack.fleet
        self.fleet.admin = DynamoAdmin(http, TIMEOUTS, self.stack.weights_secret)
        if self.options.unprotected:
            self.fleet.versions = NaiveBook()
            self.fleet.versions.current = 0
        await asyncio.to_thread(self.target.open)
        self.exits.callback(self.target.close)
        self.joiner = Joiner(self.target, http)
        self.injector = Injector(self.target, http, self._join)
        self.fleet.observer = self.injector.on_step
        rollouts: Rollouts | prime_rl.Server = self.stack.sender(
            NaiveRollouts if self.options.unprotected else Rollouts,
            timeout=self.options.hang_seconds - 10,
            patience=PATIENCE_SECONDS,
        )
        if self.options.through_prime_rl:
            opening = prime_rl.serve(
                self.stack, self.policies.paths[0], self.scratch, self.options.hang_seconds - 10
            )
            rollouts = self.server = await self.exits.enter_async_context(opening)
        if hasattr(self, "traffic"):
            self.traffic.resume(rollouts)
        else:
            self.traffic = Traffic(
                rollouts,
                self.policies,
                seed=self.options.seed,
                vocabulary=self.vocabulary,
                callers=self.options.callers,
                hang_seconds=self.options.hang_seconds,
            )
            if self.options.unprotected:  # no worker restarts, so callers may use all cores
                self.traffic.think_seconds = 0.0

    async def _close(self) -> None:
        self.progress("stopping the stack")
        if hasattr(self, "joiner"):
            await self.joiner.end_all()
        await self.exits.aclose()
        self.report.orphans = self.target.count_orphans()

    async def _join(self) -> None:
        """Start a worker that joins while weights change."""
        self.joiner.start()

    # --- rounds --------------------------------------------------------------------------------

    async def _run_rounds(self) -> None:
        try:
            for number, strike in enumerate(self._strikes(), start=1):
                await self._round(number, strike)
                is_last = number == self.options.rounds and self.report.detail[-1].healed
                if self.limit.is_over and not is_last:
                    self.report.ended_early = self.limit.reason
                    self.progress(f"ending early: {self.limit.reason}")
                    return
        except RollwayError as error:  # report what was checked until then
            self.report.detail[-1].error = error.message
            self.report.hangs += 1

    def _strikes(self) -> list[Strike]:
        """Return a strike per round: every fault at each of its steps, shuffled and repeated."""
        if self.options.unprotected:
            return [Strike("none", "before")] * self.options.rounds
        possible = [Strike(fault, step) for fault in self.options.faults for step in WHERE[fault]]
        return deal(possible, self.options.rounds, self.random)

    async def _round(self, number: int, strike: Strike) -> None:
        self._count_up()
        mode = self.random.choice(await self._list_modes())
        entry = Round(number, strike.fault, strike.step, mode, self.version)
        self.report.detail.append(entry)
        self.progress(f"round {number}: {strike.fault} at {strike.step}, {mode}")
        began = time.monotonic()
        if self.options.unprotected:
            await naive_refit(self.fleet, self.version, self.policies.path(self.version))
            entry.outcome, entry.mode = "done", "naive"
            self.traffic.served = self.version
        else:
            await self._refit_with_fault(entry, strike)
        entry.seconds = round(time.monotonic() - began, 3)
        began = time.monotonic()
        entry.healed = self.options.unprotected or await self._heal()
        if entry.healed:
            await self.traffic.probe()
        await self.traffic.check()
        entry.heal_seconds = round(time.monotonic() - began, 3)

    async def _list_modes(self) -> Sequence[RefitMode]:
        """Return the modes that all workers can do, as far as their last refit has shown."""
        if self.server is not None:
            return (updates.MODE,)
        workers = await self.fleet.workers(fresh=False)
        # With prefill and decode apart, `keep` is refused.
        able = bool(workers) and not any(worker.role for worker in workers)
        foreign = self.fleet.versions.foreign
        able = able and foreign.isdisjoint(worker.instance_id for worker in workers)
        return (*MODES, "keep") if able else MODES

    async def _refit_with_fault(self, entry: Round, strike: Strike) -> None:
        """Refit with a fault armed. It must end in a result or a typed error."""
        path = self._copy(entry.version)
        injector = self.injector
        injector.strike, injector.struck, injector.path = strike, False, path
        await injector.before()
        injector.refit = asyncio.create_task(self._refit(entry.version, path, entry.mode))
        try:
            async with asyncio.timeout(self.options.hang_seconds):
                await injector.refit
            entry.outcome = "served"
            self.traffic.served = entry.version
        except TimeoutError:
            entry.outcome = "hung"
            self.report.hangs += 1
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this run was cancelled, not the refit
            entry.outcome = "cancelled"
        except UsageError as error:
            entry.outcome, entry.error = "refused", error.message[:300]
        except RefitError as error:
            entry.outcome, entry.error = "partly", error.message[:300]
        except RollwayError as error:
            entry.outcome, entry.error = "failed", error.message[:300]
        entry.struck = injector.struck
        injector.strike = Strike("none", "never")
        await injector.after()

    async def _heal(self) -> bool:
        """Wait until every worker serves one version; refit again, as a trainer would. Return
        whether they do; a run over its time limit does not wait."""
        deadline = time.monotonic() + self.options.heal_seconds
        while time.monotonic() < deadline:
            if self.limit.is_over:
                return False
            state = self.target.read_state()
            if state is None or not state.is_supervised:
                await self._reopen()
                continue
            ready = all(process.state == "ready" for process in state.processes)
            # Starting workers need the cores, so reduce the traffic, but do not stop it.
            self.traffic.think_seconds = BUSY_SECONDS if ready else CALM_SECONDS
            if ready:
                try:
                    if not await self.joiner.are_listed(self.injector):
                        await asyncio.sleep(0.5)
                        continue
                    if await self._is_whole():
                        return True
                    with contextlib.suppress(RollwayError):
                        await self.fleet.admit()
                    if await self._is_whole():
                        return True
                    await self._next_version()
                except RollwayError as error:
                    self.progress(f"healing: {error.message[:120]}")
            await asyncio.sleep(0.5)
        raise RollwayError(f"The fleet did not recover within {self.options.heal_seconds:g} s.")

    async def _is_whole(self) -> bool:
        """Return whether at least as many workers as in the spec answer, and all that answer serve
        the current version. Dead workers stay listed for a while, with an error."""
        alive = [worker for worker in await self.fleet.workers() if worker.error is None]
        versions = await self.fleet.read_versions()
        current = [w for w in alive if versions.get(w.instance_id) == self.fleet.versions.current]
        wanted = sum(role.replicas for role in self.spec.models[0].roles.values())
        is_open = self.server is None or self.server.is_open
        return is_open and len(current) == len(alive) >= wanted

    async def _next_version(self) -> None:
        self._count_up()
        await self._refit(self.version, self._copy(self.version), "pause-all")
        self.traffic.served = self.version

    def _count_up(self) -> None:
        """Choose the next version: through prime-rl, the one that the fleet will choose."""
        through = self.server is not None
        self.version = self.fleet.versions.choose_version("") if through else self.version + 1

    def _copy(self, version: int) -> Path:
        """Copy a version's weights, for a refit that may damage them."""
        path = Path(tempfile.mkdtemp(prefix=f"v{version}-", dir=self.scratch))
        return prime_rl.copy_marked(self.policies.path(version), path)

    async def _refit(self, version: int, path: Path, mode: str) -> None:
        if self.server is None:
            await self.fleet.refit(version, path, mode=cast(RefitMode, mode))
        else:
            served = await self.server.broadcast(path)
            assert served == version, f"{served} is served, and {version} was expected"

    async def _reopen(self) -> None:
        """Start the stack again after its supervisor died."""
        await self.traffic.hold()
        await self.joiner.end_all()
        await self.exits.aclose()
        await self._open()
        await self._next_version()
        self.traffic.release()

    def _sum_up(self) -> None:
        report, ledger = self.report, self.traffic.ledger
        report.rounds = len(report.detail)
        report.faults = dict(Counter(entry.fault for entry in report.detail if entry.struck))
        report.refits = dict(Counter(entry.outcome for entry in report.detail))
        report.tokens_checked = ledger.tokens_checked
        report.stale_tokens = ledger.stale_tokens
        report.wrong_logprobs = ledger.wrong_logprobs
        report.largest_difference = ledger.largest_difference
        # Lost: calls without a result or an error, cut answers, and calls that never ended.
        report.lost_rollouts = ledger.lost_calls + ledger.cut + ledger.issued - ledger.outcomes
        report.hangs += ledger.hangs
        report.rollouts = ledger.issued
        report.rollout_errors = dict(ledger.errors)
        report.spans_per_rollout = {str(k): v for k, v in sorted(ledger.spans.items())}
        report.examples = ledger.examples
