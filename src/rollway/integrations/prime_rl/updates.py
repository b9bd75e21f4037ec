"""Pause, update, resume: one refit of the whole fleet between two calls of the orchestrator.

              /pause              /update_weights              all workers serve it
    serving ───────────► paused ─────────────────► updating ─────────────────────► updated
       ▲                  │  ▲                        │  │                            │
       │ ◄─── /resume ────┘  └── refused: nothing ────┘  │ some workers failed        │
       │                         was touched (4xx)       ▼                            │
       │                              /update_weights ◄─ failed: /resume is refused   │
       └──────────────────────────────── /resume ─────────────────────────────────────┘

From `/pause` to `/resume` a gate is closed: new requests wait at it, because prime-rl has already
counted its version up. Requests that run are not stopped. They go on while the workers receive and
verify the weights, and continue on the new ones after the swap (refit mode `in-flight`).

prime-rl repeats a call after a timeout or a 5xx, and never after a 4xx. So a refusal is a 4xx, a
repeated call joins the update that runs or gets its answer, and the update runs to its end also
when the orchestrator hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from rollway.errors import RollwayError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import RefitMode
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.directories import BroadcastRules, read_step
from rollway.integrations.prime_rl.memory import Memory, Phase

log = logging.getLogger(__name__)

GATE_SECONDS = 1800.0
"""How long a request waits at the gate. prime-rl gives an update 2 × 720 s."""
MODE: RefitMode = "in-flight"


@dataclass(slots=True)
class _Running:
    """An update under way, or the last one."""

    directory: str
    task: asyncio.Task[int]

    @property
    def is_done(self) -> bool:
        return self.task.done()

    @property
    def has_succeeded(self) -> bool:
        return self.is_done and not self.task.cancelled() and self.task.exception() is None


@dataclass(slots=True)
class WeightUpdates:
    """The state machine above."""

    fleet: Fleet
    rules: BroadcastRules
    memory: Memory
    gate_seconds: float = GATE_SECONDS
    waiting: int = 0
    """Requests that wait at the gate."""
    updates: int = 0
    failures: int = 0
    broadcaster_failure: str = ""
    """Why `/init_broadcaster` failed: prime-rl ignores its answer, so the next call has it."""
    _gate: asyncio.Event = field(default_factory=asyncio.Event)
    _running: _Running | None = None

    def __post_init__(self) -> None:
        if self.memory.record.phase == "serving":
            self._gate.set()

    @property
    def is_open(self) -> bool:
        return self._gate.is_set()

    async def wait_open(self) -> None:
        """Wait at the gate; raise if nobody opens it in time."""
        if self._gate.is_set():
            return
        self.waiting += 1
        try:
            async with asyncio.timeout(self.gate_seconds):
                await self._gate.wait()
        except TimeoutError:
            raise Refused(
                503,
                f"Generation has been paused for longer than {self.gate_seconds:g} s.",
                "Send /resume; if the last /update_weights failed, send it again first.",
                kind="paused",
            ) from None
        finally:
            self.waiting -= 1

    def pause(self) -> None:
        """Close the gate. A second pause changes nothing."""
        if self.broadcaster_failure:
            # Once: the run ends with this answer, and the next one may use another transport.
            cause, self.broadcaster_failure = self.broadcaster_failure, ""
            raise Refused(409, cause)
        if self.memory.record.phase != "serving":
            return
        self._remember("paused")
        self._gate.clear()
        self._running = None  # what this pause updates is new, also from the same directory

    async def update(self, name: str, step: int | None = None) -> int:
        """Move all workers to the weights of a directory; return the version that they serve.

        `step` is the trainer's, if its call names it besides the directory."""
        self._check_paused()
        directory = str(Path(name))
        running = self._running
        if running is not None and not running.is_done and running.directory != directory:
            raise Refused(
                409,
                f"The update from {running.directory} is still running.",
                "Wait for its answer.",
            )
        is_answered = running is not None and running.directory == directory
        if running is None or not is_answered or (running.is_done and not running.has_succeeded):
            running = _Running(directory, asyncio.create_task(self._update(directory, step)))
            # A failure is reported to whoever asks; nobody may be left to ask.
            running.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._running = running
        # Shielded: a client that hangs up must not cancel what workers are doing.
        return await asyncio.shield(running.task)

    async def resume(self) -> None:
        """Open the gate; wait for an update that runs. Refuse while workers may differ."""
        if self._running is not None and not self._running.is_done:
            with contextlib.suppress(RollwayError):
                await asyncio.shield(self._running.task)
        record = self.memory.record
        if record.phase == "failed":
            raise Refused(
                409,
                f"Generation stays paused: {record.cause}",
                "Send /update_weights again, or restart the workers that are named.",
            )
        if record.phase != "serving":
            self._remember("serving")
        self._gate.set()

    async def close(self) -> None:
        """End with the process: what runs is cancelled, and stays recorded as failed."""
        if self._running is not None and not self._running.is_done:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    def _check_paused(self) -> None:
        if self.memory.record.phase == "serving":
            raise Refused(
                409, "/update_weights came without /pause.", "Send /pause first, then this again."
            )

    async def _update(self, name: str, step: int | None) -> int:
        path = await self.rules.find(name)
        named = read_step(path)
        if step is not None and named not in (None, step):
            raise UsageError(f"{path} is of step {named}, and weight_version of step {step}.")
        step = named if step is None else step
        checkpoint = await self.rules.check_weights(path)
        version = await self.fleet.choose_version(checkpoint.identity)
        self._log_step(step, version)
        self.updates += 1
        # Before the first worker changes: if this process ends now, its successor must not resume.
        was, why = self.memory.record.phase, self.memory.record.cause
        self._remember("failed", f"the server ended during the update to step {step}.")
        try:
            # prime-rl sends bf16, whatever is served, and no config.json.
            await self.fleet.refit(version, path, mode=MODE, allow_cast=True, needs_config=False)
        except UsageError:  # refused by the workers' own checks: nothing was changed
            self._remember(was, why)
            raise
        except RollwayError as error:
            self.failures += 1
            self._remember("failed", f"the update to step {step} failed. {error}")
            raise Refused(503, str(error), kind="refit_error") from error
        self.memory.record.step, self.memory.record.version = step, version
        self._remember("paused")
        return version

    def _log_step(self, step: int | None, version: int) -> None:
        record = self.memory.record
        log.info("step %s is served as version %d", step, version)
        if step is None or record.step is None or version == record.version:
            return
        if step < record.step:
            log.warning("step %d comes after step %d: a run was resumed?", step, record.step)
        elif step == record.step:
            log.warning("step %d comes again with other weights, as version %d", step, version)

    def _remember(self, phase: Phase, cause: str = "") -> None:
        self.memory.record.phase = phase
        self.memory.record.cause = cause
        self.memory.save()
