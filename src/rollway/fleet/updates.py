"""Where new weights come from: an `Update` is what a refit applies to every worker.

`FromDisk` has a checkpoint directory. `Offered` has weights that a publisher of `rollway.weights`
has announced.
Every update is checked before any worker is touched. Managed workers stage it while they generate:
they receive and verify the weights beside the served model, so that the pause is only a copy, or on
CPU vLLM's load. A staged update that will not be applied is discarded, because it takes as much of
the worker's memory as the model. Foreign workers stage nothing. They can be given only a directory,
which they load in the pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import NoSuchMethod, StageReply, as_usage_error
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import Worker
from rollway.versions import VersionRecord
from rollway.weights.checkpoint import (
    Checkpoint,
    TensorHeader,
    check_checkpoint,
    differences,
    has_word_sums,
    read_headers,
    refuse_differences,
    stamps,
)
from rollway.weights.offer import Offer

STAGE_SECONDS = 720.0
STAGE_CALL_SECONDS = 5.0
"""How long one order to stage may wait for its end. A worker that hangs is noticed after this."""


class Update(Protocol):
    """One set of weights, and the way to load it into a worker."""

    repeatable: bool
    """Whether workers that join later can load it too."""
    may_equal: bool
    """Whether the weights may be those that all workers have, so that no answer changes."""

    @property
    def identity(self) -> str:
        """A name that is equal for equal weights, as far as can be known; set by `prepare`."""
        ...

    async def prepare(self) -> None:
        """Check the weights; raise `UsageError` before any worker is involved."""
        ...

    async def stage(self, admin: DynamoAdmin, worker: Worker, *, needs_label: bool) -> StageReply:
        """Have a worker stage the weights; raise `NoSuchMethod` if it is a foreign one. With
        `needs_label`, a worker that has no label yet is left alone."""
        ...

    async def check_unchanged(self) -> None:
        """Raise if the weights are no longer those that `prepare` checked."""
        ...

    async def check_foreign(self, worker: Worker, why: NoSuchMethod) -> None:
        """Raise if a foreign worker cannot load these weights; `why` says why it is one."""
        ...

    async def load(self, admin: DynamoAdmin, worker: Worker, label: int) -> None:
        """Load the weights into a paused foreign worker, and set its label."""
        ...


Weights = Update | Offer | Path | str
"""The types that a refit accepts."""


@dataclass(slots=True)
class FromDisk:
    """A checkpoint directory that every worker can read at the same path."""

    path: Path
    roots: Sequence[Path] = ()
    served: dict[str, TensorHeader] | None = None
    """The tensors of the served model, for workers that cannot compare them."""
    allow_cast: bool = False
    whole: bool = True
    """Whether every byte is compared with the digests in STABLE."""
    needs_config: bool = True
    """Whether a directory without config.json is refused."""
    repeatable: bool = True
    may_equal: bool = False
    secret: str = ""
    checkpoint: Checkpoint | None = None
    _stamps: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    _skips_weights: bool = False
    """Whether the weight files were not compared with STABLE yet."""

    @property
    def identity(self) -> str:
        assert self.checkpoint is not None
        return self.checkpoint.identity

    async def prepare(self) -> None:
        def check() -> Checkpoint:
            path = Path(self.path).expanduser().resolve()
            # Before the files are read, so that a write during the check is noticed as well.
            self._stamps = stamps(path) if path.is_dir() else {}
            # Workers that stage compare every tensor with its checksum, so hashing the weights here
            # would only delay them.
            self._skips_weights = skips = has_word_sums(path)
            return check_checkpoint(
                path,
                roots=self.roots,
                whole=self.whole,
                weights=not skips,
                needs_config=self.needs_config,
            )

        self.checkpoint = await asyncio.to_thread(check)
        self.path = self.checkpoint.path

    async def stage(self, admin: DynamoAdmin, worker: Worker, *, needs_label: bool) -> StageReply:
        assert self.checkpoint is not None
        where = {"path": str(self.path), "whole": self.whole}
        offer = Offer("files", 0, self.identity, self.checkpoint.nbytes, where).sign(self.secret)
        return await stage(admin, worker, offer, self.allow_cast, needs_label=needs_label)

    async def check_unchanged(self) -> None:
        if await self._has_changed():
            raise AdminError(f"{self.path} changed while workers were loading it.")

    async def check_foreign(self, worker: Worker, why: NoSuchMethod) -> None:
        assert self.checkpoint is not None
        if self._skips_weights:
            await asyncio.to_thread(
                check_checkpoint, self.path, whole=self.whole, needs_config=self.needs_config
            )
            self._skips_weights = False
        if self.served is not None:
            tensors = self.checkpoint.tensors
            mismatches = differences(tensors, self.served, allow_cast=self.allow_cast)
            refuse_differences(mismatches, self.path)

    async def load(self, admin: DynamoAdmin, worker: Worker, label: int) -> None:
        await admin.update_from_disk(worker, self.path, label)
        # The worker read the files that `prepare` checked only if nobody wrote in between.
        await self.check_unchanged()

    async def _has_changed(self) -> bool:
        try:
            return await asyncio.to_thread(stamps, Path(self.path)) != self._stamps
        except UsageError:
            return True


@dataclass(slots=True)
class Offered:
    """Weights that a publisher has announced."""

    offer: Offer
    secret: str = ""
    """Signs the offer to the workers."""
    allow_cast: bool = False
    stage_seconds: float = STAGE_SECONDS
    repeatable: bool = True
    may_equal: bool = False

    def __post_init__(self) -> None:
        self.repeatable = self.offer.repeatable

    @property
    def identity(self) -> str:
        return self.offer.identity

    async def prepare(self) -> None:
        """Do nothing: the publisher has checked the weights."""

    async def stage(self, admin: DynamoAdmin, worker: Worker, *, needs_label: bool) -> StageReply:
        offer = self.offer_to(worker).sign(self.secret)
        seconds, cast = self.stage_seconds, self.allow_cast
        return await stage(admin, worker, offer, cast, seconds, needs_label=needs_label)

    def offer_to(self, worker: Worker) -> Offer:
        """Return what one worker is offered."""
        return self.offer

    async def check_unchanged(self) -> None:
        """Do nothing: the worker compares what it receives with the publisher's checksums."""

    async def check_foreign(self, worker: Worker, why: NoSuchMethod) -> None:
        raise UsageError(
            f"{worker} cannot stage weights: {why.message}",
            "Start the worker by Rollway, or with what docs/fleet.md names for a managed worker; "
            "or refit from a checkpoint directory.",
        ) from why

    async def load(self, admin: DynamoAdmin, worker: Worker, label: int) -> None:
        raise NotImplementedError  # no foreign worker passes `check_foreign`


async def stage(
    admin: DynamoAdmin,
    worker: Worker,
    offer: Offer,
    allow_cast: bool = False,
    seconds: float = STAGE_SECONDS,
    *,
    needs_label: bool = False,
) -> StageReply:
    """Have a worker receive and verify signed weights while it generates: order it to, and repeat
    the order until it has."""
    deadline = time.monotonic() + seconds
    order = {
        "offer": offer.as_json(),
        "identity": offer.identity,
        "allow_cast": allow_cast,
        "needs_label": needs_label,
        "seconds": min(seconds, STAGE_CALL_SECONDS),
    }
    while True:
        try:
            reply = await admin.stage(worker, order)
        except NoSuchMethod:
            raise
        except AdminError as error:
            raise as_usage_error(error) from error
        for state in reply.ranks:
            if state["state"] == "failed":
                reason = str(state["error"]).rstrip(".")
                raise UsageError(f"{worker} refused `rollway_stage`: {reason}.")
        if all(state["state"] == "ready" for state in reply.ranks):
            return reply
        if time.monotonic() > deadline:
            raise UsageError(f"{worker} has not got the weights within {seconds:g} s.")


@dataclass(slots=True)
class Recipes:
    """Makes the updates of one fleet, and keeps that of the current version for joiners."""

    roots: Sequence[Path]
    reference: Path | None
    """A checkpoint directory of the served model."""
    secret: str
    record: VersionRecord | None
    _last: tuple[int, Update] | None = None
    """The last version that this process refitted to, and its update."""

    async def make_update(
        self, weights: Weights, allow_cast: bool, needs_config: bool = True
    ) -> Update:
        if isinstance(weights, Offer) and weights.transport == "files":
            weights = Path(weights.where["path"])  # workers without the extension can load it too
        if isinstance(weights, Offer):
            return Offered(weights, self.secret, allow_cast)
        if isinstance(weights, str | Path):
            served = await self._read_served_headers()
            return FromDisk(
                Path(weights),
                self.roots,
                served,
                allow_cast,
                needs_config=needs_config,
                secret=self.secret,
            )
        if isinstance(weights, FromDisk) and not weights.secret:
            weights.secret = self.secret
        return weights

    def put(self, version: int, update: Update) -> None:
        """Keep the update of a new version, and record a checkpoint for other processes."""
        self._last = version, update
        if self.record is not None and isinstance(update, FromDisk):
            self.record.put(version, update.path)

    def find_newest(self, known: int | None) -> int | None:
        """Return the newest version that this process knows or another has recorded: a worker may
        have left it without a label that says so, and must not be taken back."""
        recorded = self.record.get() if self.record is not None else None
        return max((v for v in (known, recorded and recorded[0]) if v is not None), default=None)

    def find(self, version: int) -> Update | None:
        """Return the update of a version, from this process or from the record."""
        if self._last is not None and self._last[0] == version:
            return self._last[1]
        recorded = self.record.get() if self.record is not None else None
        if recorded is None or recorded[0] != version:
            return None
        # Whether it needs a config, and may be cast, was decided when it was first served.
        return FromDisk(
            recorded[1], self.roots, allow_cast=True, needs_config=False, secret=self.secret
        )

    async def _read_served_headers(self) -> dict[str, TensorHeader] | None:
        """Return the tensor headers of the served model; None if this process cannot know them."""
        if self.reference is not None and self.reference.is_dir():
            return await asyncio.to_thread(read_headers, self.reference)
        if self._last is not None and isinstance(self._last[1], FromDisk):
            checkpoint = self._last[1].checkpoint
            return None if checkpoint is None else checkpoint.tensors
        return None
