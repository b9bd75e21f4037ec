"""Where new weights come from: an `Update` is what a refit applies to every worker.

`FromDisk` loads a checkpoint directory, `Offered` is what a publisher of `rollway.weights` has
announced, `FromEngineMethod` has a named method of the engine fetch them. All are looked at before
any worker is touched; what is offered is even brought to every worker while it generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.admin import AdminAPI, NoSuchMethod
from rollway.fleet.discovery import Worker
from rollway.orders import sign
from rollway.weights.checkpoint import (
    Checkpoint,
    TensorHeader,
    check_checkpoint,
    differences,
    refuse_differences,
    stamps,
)
from rollway.weights.offer import STILL, Offer

CHECK_METHOD, LOAD_METHOD = "rollway_check", "rollway_load"
STAGE_METHOD, STAGED_METHOD, SWAP_METHOD = "rollway_stage", "rollway_staged", "rollway_swap"
"""Of `rollway.engine.worker.WorkerExtension`."""
STAGE_SECONDS = 720.0
ASK_SECONDS = 0.5
"""After which a worker that has not knocked is asked, and then ever less often."""


class Update(Protocol):
    """One set of weights, and the way to bring it to a worker."""

    repeatable: bool
    """Whether a worker that comes later can get it too."""

    @property
    def identity(self) -> str:
        """Equal for equal weights, as far as can be told; known once `prepare` is done."""
        ...

    async def prepare(self) -> None:
        """Look at it; raises `UsageError` before any worker knows of it."""
        ...

    async def preflight(self, admin: AdminAPI, worker: Worker) -> bool:
        """Ask a worker whether it could serve these weights; raises if not. Returns whether the
        worker itself will prove what it loaded."""
        ...

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None: ...


Weights = Update | Offer | Path | str
"""What a refit can be given."""


@dataclass(slots=True)
class FromDisk:
    """A checkpoint directory that every worker can read at the same path."""

    path: Path
    roots: Sequence[Path] = ()
    served: dict[str, TensorHeader] | None = None
    """What the workers serve, for those that cannot be asked."""
    allow_cast: bool = False
    whole: bool = True
    """Whether every byte is compared with the digests in STABLE."""
    repeatable: bool = True
    staged: bool = True
    """Whether workers that can load it beside the model that serves, before they are paused."""
    secret: str = ""
    checkpoint: Checkpoint | None = None
    _staged: set[int] = field(default_factory=set)
    _proving: set[int] = field(default_factory=set)
    _stamps: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        assert self.checkpoint is not None
        return self.checkpoint.identity

    async def prepare(self) -> None:
        def look() -> Checkpoint:
            path = Path(self.path).expanduser().resolve()
            self._stamps = stamps(path) if path.is_dir() else {}
            return check_checkpoint(path, roots=self.roots, whole=self.whole)

        self.checkpoint = await asyncio.to_thread(look)
        self.path = self.checkpoint.path

    async def preflight(self, admin: AdminAPI, worker: Worker) -> bool:
        """Have it staged; a worker that cannot do that is asked whether it could load it."""
        try:
            if self.staged:
                await stage(admin, worker, self._offer(), self.secret, self.allow_cast)
                self._staged.add(worker.instance_id)
                return True
        except NoSuchMethod:
            pass
        return await self._checked(admin, worker)

    async def _checked(self, admin: AdminAPI, worker: Worker) -> bool:
        assert self.checkpoint is not None
        arguments = {"path": str(self.path), "allow_cast": self.allow_cast}
        order = sign(self.secret, CHECK_METHOD, "", arguments)
        try:
            await admin.call(worker, CHECK_METHOD, {"order": order})
        except NoSuchMethod:
            if self.served is not None:
                words = differences(
                    self.checkpoint.tensors, self.served, allow_cast=self.allow_cast
                )
                refuse_differences(words, self.path)
            return False
        except AdminError as error:
            raise _refusal(error) from error
        self._proving.add(worker.instance_id)
        return True

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        if worker.instance_id in self._staged:
            await swap(admin, worker, self._offer(), version)
        elif worker.instance_id in self._proving:
            arguments = {"path": str(self.path), "identity": self.identity, "version": version}
            order = sign(self.secret, LOAD_METHOD, "", arguments)
            await admin.update_distributed(worker, version, LOAD_METHOD, {"order": order})
        else:
            await admin.update_from_disk(worker, self.path, version)
        # What a worker has read is what was looked at only if nobody wrote in between.
        if await self._touched():
            raise AdminError(f"{self.path} changed while {worker} was loading it.")

    def _offer(self) -> Offer:
        assert self.checkpoint is not None
        where = {"path": str(self.path), "whole": self.whole}
        return Offer("files", 0, self.identity, self.checkpoint.nbytes, where)

    async def _touched(self) -> bool:
        try:
            return await asyncio.to_thread(stamps, Path(self.path)) != self._stamps
        except UsageError:
            return True


@dataclass(slots=True)
class Offered:
    """Weights that a publisher has announced. Every worker takes and proves them before any is
    paused; the pause is only the swap."""

    offer: Offer
    secret: str = ""
    """What the workers' offers are signed with."""
    allow_cast: bool = False
    stage_seconds: float = STAGE_SECONDS
    repeatable: bool = True

    def __post_init__(self) -> None:
        self.repeatable = self.offer.repeatable

    @property
    def identity(self) -> str:
        return self.offer.identity

    async def prepare(self) -> None:
        """It was looked at when it was published."""

    async def preflight(self, admin: AdminAPI, worker: Worker) -> bool:
        try:
            await stage(admin, worker, self.offer, self.secret, self.allow_cast, self.stage_seconds)
        except NoSuchMethod as error:
            raise UsageError(
                f"{worker} cannot stage weights: {error.message}",
                "Start it with --worker-extension-cls rollway.engine.worker.WorkerExtension, or "
                "refit from a checkpoint directory.",
            ) from error
        return True

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        await swap(admin, worker, self.offer, version)


async def stage(
    admin: AdminAPI,
    worker: Worker,
    offer: Offer,
    secret: str,
    allow_cast: bool = False,
    seconds: float = STAGE_SECONDS,
) -> None:
    """Have a worker take and prove weights while it generates; `NoSuchMethod` if it cannot."""
    begin = {"offer": offer.signed(secret).as_json(), "allow_cast": allow_cast}
    done = {"identity": offer.identity}
    await errand(admin, worker, (STAGE_METHOD, begin), (STAGED_METHOD, done), seconds)


Call = tuple[str, Mapping[str, Any]]
"""An engine method and its arguments."""


async def errand(
    admin: AdminAPI, worker: Worker, begin: Call, done: Call, seconds: float = STAGE_SECONDS
) -> None:
    """Have a worker begin something, and wait until it says that it is done, or why not."""
    deadline, pause = time.monotonic() + seconds, ASK_SECONDS
    try:
        async with _knocks(worker.world_size) as (name, knocked):
            await admin.call(worker, begin[0], {**begin[1], "tell": name})
            while True:
                # A worker elsewhere cannot knock; it is asked now and then.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(knocked.wait(), pause)
                try:
                    return await admin.call(worker, *done)
                except AdminError as error:
                    if STILL not in error.message:
                        raise
                if time.monotonic() > deadline:
                    raise AdminError(f"{worker} has not got the weights within {seconds:g} s.")
                knocked.clear()
                pause = min(2.0, 2 * pause)
    except NoSuchMethod:
        raise
    except AdminError as error:
        raise _refusal(error) from error


@asynccontextmanager
async def _knocks(expected: int) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A socket of this machine, and whether so many have knocked: one for each rank."""
    name, knocked, count = f"rollway/staged/{secrets.token_hex(8)}", asyncio.Event(), 0

    async def knock(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count >= expected:
            knocked.set()
        writer.close()

    server = await asyncio.start_unix_server(knock, f"\0{name}")
    try:
        yield name, knocked
    finally:
        server.close()


async def swap(admin: AdminAPI, worker: Worker, offer: Offer, version: int) -> None:
    """Have a paused worker serve what it staged."""
    await admin.update_distributed(worker, version, SWAP_METHOD, {"identity": offer.identity})


def _refusal(error: AdminError) -> RollwayError:
    """A worker's no, as a caller's mistake; unless it was not asked, or could not answer."""
    return error if error.__cause__ is not None else UsageError(error.message, error.hint)


@dataclass(slots=True)
class FromEngineMethod:
    """Weights that a method of the engine fetches: over a collective, from shared memory, …

    The engine code is the user's (`--worker-extension-cls`), and so is the other side."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Names the set of weights; two updates with one name are the same weights."""
    repeatable: bool = False

    @property
    def identity(self) -> str:
        return self.name or json.dumps([self.method, self.arguments], sort_keys=True, default=str)

    async def prepare(self) -> None:
        if not self.method.isidentifier():
            raise UsageError(f"`{self.method}` cannot be the name of an engine method.")

    async def preflight(self, admin: AdminAPI, worker: Worker) -> bool:
        return False

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        await admin.update_distributed(worker, version, self.method, self.arguments)
