"""Pause, update, resume: one refit of the whole fleet between two calls of the orchestrator.

              /pause              /update_weights              all workers serve it
    serving ───────────► paused ─────────────────► updating ─────────────────────► updated
       ▲                  │  ▲                        │  │                            │
       │ ◄─── /resume ────┘  └── refused: nothing ────┘  │ some workers failed        │
       │                         was touched (4xx)       ▼                            │
       │                              /update_weights ◄─ failed: /resume is refused   │
       └──────────────────────────────── /resume ─────────────────────────────────────┘

From `/pause` to `/resume` a gate is closed: new requests wait at it, because prime-rl has already
counted its version up. Requests that run are not stopped. They continue while the workers receive
and verify the weights, and on the new weights after the swap (refit mode `in-flight`).

prime-rl repeats a call after a timeout or a 5xx, and never after a 4xx. So a refusal is a 4xx, a
repeated call joins the update that runs or gets its answer, and the update runs to its end also
when the orchestrator hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollway.errors import RollwayError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import RefitMode
from rollway.fleet.updates import Weights
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.directories import BroadcastRules, FileStamp, read_step
from rollway.integrations.prime_rl.groups import Broadcaster, GroupUpdate, InitRequest
from rollway.integrations.prime_rl.memory import Memory, Phase
from rollway.observe import end_step

log = logging.getLogger(__name__)

GATE_SECONDS = 1800.0
"""How long a request waits at the gate. prime-rl gives an update 2 × 720 s."""
MODE: RefitMode = "in-flight"
_ENDED_HINT = (
    "The trainer's group has ended, so files were expected. A trainer that was started again needs "
    "/init_broadcaster first."
)
_GROUP_HINT = (
    "A trainer that was started again needs /init_broadcaster first; for one that broadcasts "
    "files, restart the server with --weight-broadcast filesystem."
)


@dataclass(slots=True)
class _Running:
    """An update under way, or the last one."""

    directory: str
    stamp: FileStamp
    task: asyncio.Task[int]

    @property
    def is_done(self) -> bool:
        return self.task.done()

    @property
    def has_succeeded(self) -> bool:
        return self.is_done and not self.task.cancelled() and self.task.exception() is None

    def has_served(self, directory: str, stamp: FileStamp) -> bool:
        """Return whether it has served these files. The same directory may have others by now, of
        a run that was resumed."""
        return self.has_succeeded and (self.directory, self.stamp) == (directory, stamp)


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
    broadcaster: Broadcaster | None = None
    """Receives broadcasts over a group; without it, all come as files."""
    _forming: tuple[InitRequest, asyncio.Task[None]] | None = None
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
        # What this pause updates is new, also from the same directory.
        self._running = None
        if self.memory.record.group is not None:
            self.memory.record.group.directory = ""
        self._remember("paused")
        self._gate.clear()

    async def init_broadcaster(self, read: Callable[[], InitRequest]) -> None:
        """Form the group for broadcasts, within the timeout of the request that `read` returns.

        A failure is also the answer of the next pause. The same request again joins the first."""
        request = read()  # what is no request blocks no trainer
        key = msgspec.structs.replace(request, rank_offset=0)
        if self._forming is not None and not self._forming[1].done() and self._forming[0] != key:
            self._forming[1].cancel()  # its trainer is gone: prime-rl forms one group at a time
        if self._forming is None or self._forming[1].done() or self._forming[0] != key:
            self._forming = key, asyncio.create_task(self._form(request))
            self._forming[1].add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: prime-rl may hang up, and workers would be half joined.
        await asyncio.shield(self._forming[1])

    async def _form(self, request: InitRequest) -> None:
        self.broadcaster_failure = ""
        try:
            if self.broadcaster is None:
                raise Refused(409, "This server reads broadcasts from files.")
            await self.broadcaster.form(request)
        except RollwayError as error:
            self._note_broadcaster(error)
            raise

    def _note_broadcaster(self, error: RollwayError) -> None:
        self.broadcaster_failure = f"/init_broadcaster failed. {error}"

    async def refuse_adapters(self) -> None:
        """Raise if whole models come over a group: prime-rl itself refuses NCCL with LoRA."""
        if self.broadcaster is not None:
            await self.broadcaster.forget_ended()
        if self.broadcaster is not None and self.broadcaster.active_type == "nccl":
            raise Refused(
                409,
                "Broadcasts come over a group, which carries whole models and no adapters.",
                'Set weight_broadcast.type = "filesystem" to train with LoRA.',
            )

    async def update(self, name: str) -> int:
        """Move all workers to the weights of a directory; return the version that they serve."""
        self._check_paused()
        directory = str(Path(name))
        running = self._running
        if running is not None and not running.is_done and running.directory != directory:
            raise Refused(
                409,
                f"The update from {running.directory} is still running.",
                "Wait for its answer.",
            )
        stamp = self.rules.read_stamp(directory)
        if running is None or (running.is_done and not running.has_served(directory, stamp)):
            running = _Running(directory, stamp, asyncio.create_task(self._update(directory)))
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
        if self._forming is not None and not self._forming[1].done():
            self._forming[1].cancel()
            await asyncio.gather(self._forming[1], return_exceptions=True)
        if self._running is not None and not self._running.is_done:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)

    def _check_paused(self) -> None:
        if self.memory.record.phase == "serving":
            raise Refused(
                409, "/update_weights came without /pause.", "Send /pause first, then this again."
            )

    async def _update(self, name: str) -> int:
        try:
            return await self._refit(name)
        except RollwayError:
            self.failures += 1
            raise

    async def _refit(self, name: str) -> int:
        step = read_step(Path(name))
        weights, identity = await self._find_weights(name)
        version = await self.fleet.choose_version(identity)
        if isinstance(weights, GroupUpdate) and version == self.memory.record.version:
            return version  # asked for again, after this server was restarted
        self._log_step(step, version)
        self.updates += 1
        # Before the first worker changes: if this process ends now, its successor must not resume.
        was, why, began = self.memory.record.phase, self.memory.record.cause, time.monotonic()
        self._remember("failed", f"the server ended during the update to step {step}.")
        try:
            # prime-rl sends bf16, whatever is served, and no config.json.
            await self.fleet.refit(version, weights, mode=MODE, allow_cast=True, needs_config=False)
        except UsageError as error:  # refused by the workers' own checks: nothing was changed
            self._remember(was, why)
            if isinstance(weights, GroupUpdate):
                raise Refused(400, str(error), _GROUP_HINT) from error
            raise
        except RollwayError as error:
            self._remember("failed", f"the update to step {step} failed. {error}")
            # A broadcast over a group is sent once, so prime-rl must not repeat the call.
            status = 409 if isinstance(weights, GroupUpdate) else 503
            raise Refused(status, str(error), kind="refit_error") from error
        end_step(version if step is None else step, publish=time.monotonic() - began)
        self.memory.record.step, self.memory.record.version = step, version
        self._remember("paused")
        return version

    async def _find_weights(self, name: str) -> tuple[Weights, str]:
        """Return the weights of a directory, and their identity: a checkpoint, what its trainer
        published, or, if it has only markers, the next broadcast over the group."""
        has_ended = self.broadcaster is not None and await self.broadcaster.forget_ended(name)
        kind = "filesystem" if self.broadcaster is None else self.broadcaster.active_type
        if self.broadcaster is not None and kind == "nccl":
            update = await self.broadcaster.make_update(name)
            return update, update.identity
        try:
            path = await self.rules.find(name)
            if self.broadcaster is not None and kind == "nixl":
                offer = await self.broadcaster.find_offer(path)
                return offer, offer.identity
            return path, (await self.rules.check_weights(path)).identity
        except UsageError as error:
            if has_ended:
                raise Refused(400, error.message, _ENDED_HINT) from error
            raise

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
