"""Where new weights come from: an `Update` is what a refit applies to every worker.

`FromDisk` loads a checkpoint directory. `Offered` holds weights that a publisher of
`rollway.weights` has announced.
Every update is checked before any worker is touched. Workers with Rollway's extension even stage it
while they generate: they load and verify the weights beside the served model, so that the pause is
only a copy, or on CPU vLLM's load. A staged update that will not be applied is discarded, because
it takes as much of the worker's memory as the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import (
    AdminAPI,
    Asleep,
    NoSuchMethod,
    NoSuchOrder,
    StageReply,
    as_usage_error,
    start_and_wait,
)
from rollway.fleet.workers import Worker
from rollway.signed_calls import sign
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

# Methods of `rollway.engine.worker.WorkerExtension`.
CHECK_METHOD, LOAD_METHOD = "rollway_check", "rollway_load"
STAGE_METHOD, STAGED_METHOD = "rollway_stage", "rollway_staged"
SWAP_METHOD, UNSTAGE_METHOD = "rollway_swap", "rollway_unstage"
STAGE_SECONDS = 720.0
STAGE_CALL_SECONDS = 5.0
"""How long one order to stage may wait for its end. A worker that hangs is noticed after this."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a worker after the preflight of an update."""

    verifies_itself: bool
    """Whether the worker compares what it loads with the update."""
    reply: StageReply | None = None
    """The worker's answer to the order to stage it; None if it was checked by single calls."""
    may_equal: bool = False
    """Whether the weights may be those that all workers have, so that no answer changes."""

    @property
    def is_starting(self) -> bool:
        """Whether the worker has no label yet, and was left alone."""
        return self.reply is not None and not self.reply.ranks


class Update(Protocol):
    """One set of weights, and the way to load it into a worker."""

    repeatable: bool
    """Whether workers that join later can load it too."""

    @property
    def identity(self) -> str:
        """A name that is equal for equal weights, as far as can be known; set by `prepare`."""
        ...

    async def prepare(self) -> None:
        """Check the weights; raise `UsageError` before any worker is involved."""
        ...

    async def preflight(
        self, admin: AdminAPI, worker: Worker, *, needs_label: bool = False
    ) -> Preflight:
        """Raise if a worker cannot serve these weights, which it may stage. With `needs_label`, a
        worker that takes orders and has no label yet is left alone."""
        ...

    def is_staged_in(self, worker: Worker) -> bool:
        """Return whether the worker has staged these weights, so that one order can swap them."""
        ...

    async def check_unchanged(self) -> None:
        """Raise if the weights are no longer those that `prepare` checked."""
        ...

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        """Load the weights into a paused worker and set its label to `version`."""
        ...

    async def discard(self, admin: AdminAPI, worker: Worker) -> None:
        """Free what `preflight` staged in a worker; nothing by default."""


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
    staged: bool = True
    """Whether workers load it beside the served model before they are paused, where they can."""
    secret: str = ""
    checkpoint: Checkpoint | None = None
    _staging: set[int] = field(default_factory=set)
    """Workers that were asked to stage it and have the method for that."""
    _verifying: set[int] = field(default_factory=set)
    """Workers that load it in place by Rollway's method, which verifies the parameters."""
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
            self._skips_weights = skips = self.staged and has_word_sums(path)
            return check_checkpoint(
                path,
                roots=self.roots,
                whole=self.whole,
                weights=not skips,
                needs_config=self.needs_config,
            )

        self.checkpoint = await asyncio.to_thread(check)
        self.path = self.checkpoint.path

    async def preflight(
        self, admin: AdminAPI, worker: Worker, *, needs_label: bool = False
    ) -> Preflight:
        """Stage the checkpoint; ask a worker that cannot stage whether it could load it."""
        if self.staged:
            self._staging.add(worker.instance_id)  # first: the call may be cancelled
            offer = self._offer().sign(self.secret)
            try:
                return await stage(admin, worker, offer, self.allow_cast, needs_label=needs_label)
            except NoSuchMethod:
                self._staging.discard(worker.instance_id)
        return Preflight(await self._check_in(admin, worker))

    async def _check_in(self, admin: AdminAPI, worker: Worker) -> bool:
        assert self.checkpoint is not None
        if self._skips_weights:
            await asyncio.to_thread(
                check_checkpoint, self.path, whole=self.whole, needs_config=self.needs_config
            )
            self._skips_weights = False
        arguments = {"path": str(self.path), "allow_cast": self.allow_cast}
        order = sign(self.secret, CHECK_METHOD, "", arguments)
        try:
            await admin.call(worker, CHECK_METHOD, {"order": order})
        except NoSuchMethod:
            if self.served is not None:
                tensors = self.checkpoint.tensors
                mismatches = differences(tensors, self.served, allow_cast=self.allow_cast)
                refuse_differences(mismatches, self.path)
            return False
        except AdminError as error:
            raise as_usage_error(error) from error
        self._verifying.add(worker.instance_id)
        return True

    def is_staged_in(self, worker: Worker) -> bool:
        return worker.instance_id in self._staging

    async def check_unchanged(self) -> None:
        if await self._has_changed():
            raise AdminError(f"{self.path} changed while workers were loading it.")

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        if worker.instance_id in self._staging:
            await swap(admin, worker, self._offer(), version)
        elif worker.instance_id in self._verifying:
            arguments = {"path": str(self.path), "identity": self.identity, "version": version}
            order = sign(self.secret, LOAD_METHOD, "", arguments)
            await admin.update_distributed(worker, version, LOAD_METHOD, {"order": order})
        else:
            await admin.update_from_disk(worker, self.path, version)
        # The worker read the files that `prepare` checked only if nobody wrote in between.
        if await self._has_changed():
            raise AdminError(f"{self.path} changed while {worker} was loading it.")

    async def discard(self, admin: AdminAPI, worker: Worker) -> None:
        if worker.instance_id in self._staging:
            await unstage(admin, worker, self._offer())

    def _offer(self) -> Offer:
        assert self.checkpoint is not None
        where = {"path": str(self.path), "whole": self.whole}
        return Offer("files", 0, self.identity, self.checkpoint.nbytes, where)

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

    def __post_init__(self) -> None:
        self.repeatable = self.offer.repeatable

    @property
    def identity(self) -> str:
        return self.offer.identity

    async def prepare(self) -> None:
        """Do nothing: the publisher has checked the weights."""

    async def preflight(
        self, admin: AdminAPI, worker: Worker, *, needs_label: bool = False
    ) -> Preflight:
        offer = self.offer_to(worker).sign(self.secret)
        seconds, cast = self.stage_seconds, self.allow_cast
        try:
            return await stage(admin, worker, offer, cast, seconds, needs_label=needs_label)
        except NoSuchMethod as error:
            raise UsageError(
                f"{worker} cannot stage weights: {error.message}",
                "Start it with --worker-extension-cls rollway.engine.worker.WorkerExtension, or "
                "refit from a checkpoint directory.",
            ) from error

    def offer_to(self, worker: Worker) -> Offer:
        """Return what one worker is offered."""
        return self.offer

    def is_staged_in(self, worker: Worker) -> bool:
        return True  # otherwise the preflight raises

    async def check_unchanged(self) -> None:
        """Do nothing: the worker compares what it receives with the publisher's checksums."""

    async def apply(self, admin: AdminAPI, worker: Worker, version: int) -> None:
        await swap(admin, worker, self.offer, version)

    async def discard(self, admin: AdminAPI, worker: Worker) -> None:
        await unstage(admin, worker, self.offer)


async def stage(
    admin: AdminAPI,
    worker: Worker,
    offer: Offer,
    allow_cast: bool = False,
    seconds: float = STAGE_SECONDS,
    *,
    needs_label: bool = False,
) -> Preflight:
    """Have a worker receive and verify signed weights while it generates, if it has the methods."""
    arguments = {"offer": offer.as_json(), "allow_cast": allow_cast}
    order = {**arguments, "identity": offer.identity, "needs_label": needs_label}

    async def check() -> None:
        await admin.call(worker, STAGED_METHOD, {"identity": offer.identity})

    try:
        return Preflight(True, await _stage_by_order(admin, worker, order, seconds))
    except NoSuchOrder:  # a worker without a guard of this version
        await start_and_wait(admin, worker, (STAGE_METHOD, arguments), check, seconds)
        return Preflight(True)


async def _stage_by_order(
    admin: AdminAPI, worker: Worker, order: Mapping[str, Any], seconds: float
) -> StageReply:
    """Order a worker to stage weights, and repeat the order until it has."""
    deadline = time.monotonic() + seconds
    order = {**order, "seconds": min(seconds, STAGE_CALL_SECONDS)}
    while True:
        try:
            reply = await admin.stage(worker, order)
        except (NoSuchMethod, Asleep):
            raise
        except AdminError as error:
            raise as_usage_error(error) from error
        for state in reply.ranks:
            if state["state"] == "failed":
                reason = str(state["error"]).rstrip(".")
                raise UsageError(f"{worker} refused `{STAGE_METHOD}`: {reason}.")
        if all(state["state"] == "ready" for state in reply.ranks):
            return reply
        if time.monotonic() > deadline:
            raise UsageError(f"{worker} has not got the weights within {seconds:g} s.")


async def swap(admin: AdminAPI, worker: Worker, offer: Offer, version: int) -> None:
    """Have a paused worker serve the weights that it staged."""
    await admin.update_distributed(worker, version, SWAP_METHOD, {"identity": offer.identity})


async def unstage(admin: AdminAPI, worker: Worker, offer: Offer) -> None:
    """Have a worker free these staged weights; weights of another offer stay."""
    await admin.call(worker, UNSTAGE_METHOD, {"identity": offer.identity})


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
