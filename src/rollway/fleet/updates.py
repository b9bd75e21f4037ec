"""Where new weights come from: an `Update` is what a refit applies to every worker.

`FromDisk` loads a checkpoint directory, `FromEngineMethod` has a named method of the engine fetch
them. Both are looked at before any worker is touched.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import AdminAPI, NoSuchMethod
from rollway.fleet.discovery import Worker
from rollway.weights.checkpoint import (
    Checkpoint,
    TensorHeader,
    check_checkpoint,
    differences,
    refuse_differences,
    stamps,
)

CHECK_METHOD, LOAD_METHOD = "rollway_check", "rollway_load"
"""Of `rollway.engine.worker.WorkerExtension`."""


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
    checkpoint: Checkpoint | None = None
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
        assert self.checkpoint is not None
        arguments = {"path": str(self.path), "allow_cast": self.allow_cast}
        try:
            await admin.call(worker, CHECK_METHOD, arguments)
        except NoSuchMethod:
            if self.served is not None:
                words = differences(
                    self.checkpoint.tensors, self.served, allow_cast=self.allow_cast
                )
                refuse_differences(words, self.path)
            return False
        except AdminError as error:
            if error.__cause__ is not None:
                raise  # it was not asked, or could not answer
            raise UsageError(error.message, error.hint) from error
        self._proving.add(worker.instance_id)
        return True

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        method = LOAD_METHOD if worker.instance_id in self._proving else None
        await admin.update_from_disk(worker, self.path, version, method=method)
        # What a worker has read is what was looked at only if nobody wrote in between.
        if await self._touched():
            raise AdminError(f"{self.path} changed while {worker} was loading it.")

    async def _touched(self) -> bool:
        try:
            return await asyncio.to_thread(stamps, Path(self.path)) != self._stamps
        except UsageError:
            return True


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
