"""prime-rl's `nccl` weight broadcast: one group of its trainer and all ranks of the fleet.

    orchestrator                   this server                          every worker
    POST /init_broadcaster ──────► count ranks, give out seats ───────► join the trainer's group
    POST /pause                    close the gate
    POST /update_weights ────────► `Fleet.refit` with a GroupUpdate ──► receive, verify, swap
                                   compare the digests of all ranks ◄── what arrived

Rank 0 is the trainer. A worker's ranks follow those of the workers before it, in the order of
their ids: `1 + first + dp·(tp·pp·pcp) + rank mod (tp·pp·pcp)`. Which rank a worker has makes no
difference to what it receives, so the `rank_offset` of a request need not be kept.

The trainer sends each step once. So an update that failed cannot be repeated, and a worker that
joins later gets nothing before the next group forms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollway.errors import AdminError, RollwayError, Unreachable, UsageError, WeightsError
from rollway.fleet.admin import (
    NoSuchMethod,
    RefitRefused,
    StageReply,
    call_all,
    start_and_wait,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.fleet import Fleet
from rollway.fleet.updates import Offered
from rollway.fleet.workers import Worker
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.directories import OFFER_FILE
from rollway.integrations.prime_rl.memory import JoinedGroup, Memory
from rollway.weights.offer import Offer, parse_offer
from rollway.weights.untrusted import read_plain

log = logging.getLogger(__name__)

BroadcastType = Literal["auto", "filesystem", "nccl", "nixl"]
TRANSPORT: Literal["prime_rl_broadcast"] = "prime_rl_broadcast"
JOIN_METHOD, JOINED_METHOD, LEAVE_METHOD = "rollway_join", "rollway_joined", "rollway_leave"
MESSAGE_SECONDS = 300.0
"""How long a trainer may take for one message. prime-rl gives an update 720 s."""
_POLL_SECONDS = 15.0
"""How often a worker on another machine is asked whether it has joined; each time it has not is an
error in its log."""
_GRACE_SECONDS = 5.0
_MAX_OFFER_BYTES = 1 << 20


class InitRequest(msgspec.Struct, frozen=True):
    """The body of `/init_broadcaster`."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:%-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    inference_world_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 16) - 1)]
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    rank_offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    quantize_in_weight_transfer: bool = False
    session_id: str | None = None
    """Set for `nixl`."""


def read_arguments(arguments: Sequence[Any]) -> InitRequest:
    """Return the request in the arguments of the engine method: host, port, rank offset, world
    size, timeout, and, by generation, whether to quantise, and a session id that NCCL ignores."""
    names = ("host", "port", "rank_offset", "inference_world_size", "timeout")
    quantise = any(argument is True for argument in arguments[len(names) :])
    body = dict(zip(names, arguments, strict=False))
    return read_request({**body, "quantize_in_weight_transfer": quantise})


def read_request(body: Mapping[str, Any]) -> InitRequest:
    """Return the request in a body; raise `UsageError` if it is none."""
    try:
        return msgspec.convert(dict(body), InitRequest)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"This is no request to form a group: {error}.",
            "Send host, port, inference_world_size and timeout, as prime-rl does.",
        ) from error


@dataclass(slots=True)
class Broadcaster:
    """Forms the group, and makes an update of each broadcast that comes by it. For `nixl` there is
    no group: the trainer publishes by Rollway's transport, and writes its offer into the directory.
    """

    fleet: Fleet
    memory: Memory
    secret: str
    count_bytes: Callable[[], int] = lambda: 0
    """Returns the size of the served model."""
    type: BroadcastType = "auto"
    """What the trainer broadcasts by; `auto` follows `/init_broadcaster`, for as long as the
    trainer that sent it lives."""

    @property
    def group(self) -> JoinedGroup | None:
        return self.memory.record.group

    @property
    def active_type(self) -> BroadcastType:
        """What the next broadcast comes by."""
        if self.type != "auto":
            return self.type
        if self.memory.record.session is not None:
            return "nixl"
        return "filesystem" if self.group is None else "nccl"

    def check_type(self, request: InitRequest) -> None:
        """Raise if this request asks for what the server was not started for, or cannot do."""
        if request.quantize_in_weight_transfer:
            raise UsageError(
                "quantize_in_weight_transfer sends weights in a kernel's layout. The engine makes "
                "its own scales, so they would be quantised twice.",
                "Set quantize_in_weight_transfer = false, or broadcast a checkpoint directory.",
            )
        kind = "nccl" if request.session_id is None else "nixl"
        if self.type not in ("auto", kind):
            raise Refused(
                409,
                f"The server was started with --weight-broadcast {self.type}, and prime-rl has "
                f'weight_broadcast.type = "{kind}".',
                "Use the same type for both.",
            )
        if kind == "nccl" and self.memory.record.adapters:
            raise Refused(
                409, "An nccl broadcast carries whole models, and adapters are loaded.",
                'Set weight_broadcast.type = "filesystem" to train with LoRA.',
            )  # fmt: skip

    async def form(self, request: InitRequest) -> None:
        """Have all ranks of all workers join the trainer's group, within the request's timeout."""
        self.check_type(request)
        if request.session_id is not None:
            self.memory.record.session = request.session_id
            self._record(None)
            return
        self.memory.record.session = None
        workers = await self._list_workers()
        if await self._is_joined(request, workers):
            return
        self._record(None)
        ranks = sum(worker.world_size for worker in workers)
        if request.inference_world_size != ranks:
            raise Refused(
                409,
                f"inference_world_size is {request.inference_world_size}, and the fleet has "
                f"{len(workers)} workers with {ranks} ranks.",
                f"Set weight_broadcast.inference_world_size = {ranks} for trainer and "
                "orchestrator, which prime-rl's `client.dynamo` cannot (it has one rank): use "
                "admin_base_url.",
            )
        group = JoinedGroup(
            secrets.token_hex(16), request.host, request.port, {w.instance_id: 0 for w in workers}
        )
        first = 0
        for worker in workers:
            group.seats[worker.instance_id] = first
            first += worker.world_size
        await self._join_all(request, group, workers)
        self._record(group)
        log.info("%d ranks have joined the trainer at %s:%d", ranks, request.host, request.port)

    async def make_update(self, name: str) -> GroupUpdate:
        """Return the update by the next broadcast; the same again for a directory that was asked
        for before, since it is sent once."""
        group = self.group
        if group is None:
            raise Refused(
                409, "No group has formed for the broadcast.", "Send /init_broadcaster first."
            )
        listed = {worker.instance_id for worker in await self.fleet.workers()}
        if missing := group.seats.keys() - listed:
            raise Refused(
                409,
                f"{len(missing)} of {len(group.seats)} workers have left since the trainer's group "
                f"formed, for example {min(missing)}. A group cannot replace a rank.",
                "Start trainer and orchestrator again, or broadcast by files.",
            )
        late = len(listed - group.seats.keys())
        if late:
            log.warning("%d workers joined after the trainer's group, and get no weights", late)
        if group.directory != name:
            group.directory, group.offered = name, secrets.token_hex(16)
            self.memory.save()
        nbytes = await asyncio.to_thread(self.count_bytes)
        where = {"group": group.identity}
        offer = Offer(TRANSPORT, 0, group.offered, nbytes, where, repeatable=False)
        return GroupUpdate(offer, self.secret, allow_cast=True, seats=frozenset(group.seats))

    async def forget_ended(self, directory: str = "") -> bool:
        """Forget a group whose trainer is gone, with `auto`; return whether there was one. The
        next run may broadcast files, which no call announces. What the group sent last stays its
        own: workers may have received it just before the trainer ended."""
        group = self.group
        if self.type != "auto" or group is None or (directory and directory == group.directory):
            return False
        if not await self._has_ended(group):
            return False
        log.warning(
            "the trainer at %s:%d is gone: broadcasts are files again", group.host, group.port
        )
        self._record(None)
        return True

    async def _has_ended(self, group: JoinedGroup) -> bool:
        """Return whether no worker is in the group any more. One that does not answer may be."""
        listed = await self.fleet.workers()
        members = [worker for worker in listed if worker.instance_id in group.seats]
        answers = await call_all(members, partial(self._check_joined, group))
        return bool(listed) and all(
            isinstance(answer, AdminError) and not isinstance(answer.__cause__, Unreachable)
            for answer in answers
        )

    async def find_offer(self, path: Path) -> Offer:
        """Return what the trainer published by NIXL, from the directory of the broadcast."""
        try:
            raw = await asyncio.to_thread(read_plain, path / OFFER_FILE, _MAX_OFFER_BYTES)
        except OSError as error:
            raise Refused(
                409,
                f"{path} has no readable {OFFER_FILE}. prime-rl's own NIXL trainer lists its "
                "tensors in ModelExpress in a form that only prime-rl's own workers read.",
                "Publish by Rollway's nixl transport (BroadcastSender.send_offer), or set "
                'weight_broadcast.type = "filesystem".',
            ) from error
        try:
            offer = parse_offer(msgspec.json.decode(raw, type=dict[str, Any]))
        except (msgspec.MsgspecError, WeightsError) as error:
            raise UsageError(f"{path / OFFER_FILE} has no offer: {error}") from error
        if offer.transport != "nixl":
            raise UsageError(f"{path / OFFER_FILE} has an offer by {offer.transport}, not by nixl.")
        return offer

    async def _list_workers(self) -> list[Worker]:
        workers = await self.fleet.workers()
        if not workers or any(worker.error for worker in workers):
            raise Refused(
                503,
                "Not every worker answers, so no group can form.",
                "Wait until all workers are up, and send /init_broadcaster again.",
                kind="starting",
            )
        return workers

    async def _is_joined(self, request: InitRequest, workers: list[Worker]) -> bool:
        """Return whether the group of this request has formed and its trainer lives: a request may
        come once for each worker, or again."""
        group = self.group
        if group is None or (group.host, group.port) != (request.host, request.port):
            return False
        if group.seats.keys() != {worker.instance_id for worker in workers}:
            return False
        answers = await call_all(workers, partial(self._check_joined, group))
        return not any(isinstance(answer, BaseException) for answer in answers)

    async def _check_joined(self, group: JoinedGroup, worker: Worker) -> None:
        """Raise unless the worker is in the group, and its trainer lives."""
        await self.fleet.admin.call(worker, JOINED_METHOD, {"identity": group.identity})

    async def _join_all(
        self, request: InitRequest, group: JoinedGroup, workers: list[Worker]
    ) -> None:
        joins = [asyncio.create_task(self._join(request, group, worker)) for worker in workers]
        try:
            # The first failure ends the others: they would wait for a rank that never comes.
            done, pending = await asyncio.wait(joins, return_when=asyncio.FIRST_EXCEPTION)
            for join in done:
                join.result()
            assert not pending
        except BaseException:
            for join in joins:
                join.cancel()
            await asyncio.gather(*joins, return_exceptions=True)
            await call_all(workers, lambda worker: self._leave(group, worker))
            raise

    async def _join(self, request: InitRequest, group: JoinedGroup, worker: Worker) -> None:
        place = {
            "host": request.host,
            "port": request.port,
            "receivers": request.inference_world_size,
            "init_seconds": request.timeout,
            "step_seconds": min(request.timeout, MESSAGE_SECONDS),
        }
        where = {"place": place, "first_rank": group.seats[worker.instance_id]}
        offer = Offer(TRANSPORT, 0, group.identity, 0, where, repeatable=False).sign(self.secret)
        admin, check = self.fleet.admin, partial(self._check_joined, group, worker)
        start = JOIN_METHOD, {"offer": offer.as_json()}
        # Connecting and forming have this limit each; a hung worker has the sum.
        seconds = 2 * request.timeout + _GRACE_SECONDS
        try:
            await start_and_wait(admin, worker, start, check, seconds, _POLL_SECONDS)
        except NoSuchMethod as error:
            raise UsageError(
                f"{worker} cannot join a group: {error.message}",
                "Start it with --worker-extension-cls rollway.engine.worker.WorkerExtension.",
            ) from error

    async def _leave(self, group: JoinedGroup, worker: Worker) -> None:
        with contextlib.suppress(AdminError):
            await self.fleet.admin.call(worker, LEAVE_METHOD, {"identity": group.identity})

    def _record(self, group: JoinedGroup | None) -> None:
        self.memory.record.group = group
        self.memory.save()


@dataclass(slots=True)
class GroupUpdate(Offered):
    """The next broadcast of a trainer, for the workers that are in its group."""

    seats: frozenset[int] = frozenset()
    """The instance ids of the workers in the group."""
    settle_seconds: float = 2.0
    """How long a worker may still receive after another has failed."""
    _failed: asyncio.Event = field(default_factory=asyncio.Event)
    _cause: str = ""
    _digests: dict[int, list[str]] = field(default_factory=dict)
    """What arrived, by worker: one digest for each of its ranks."""

    async def stage(self, admin: DynamoAdmin, worker: Worker, *, needs_label: bool) -> StageReply:
        """Have a worker receive the broadcast. If one fails, the others stop: they would wait for
        it until the time limit of a message."""
        if worker.instance_id not in self.seats:
            return StageReply(None, [])  # left alone, like one that starts
        staging = asyncio.create_task(Offered.stage(self, admin, worker, needs_label=False))
        others = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({staging, others}, return_when=asyncio.FIRST_COMPLETED)
            # Tensors that do not fit are refused at the end by all: whoever stopped a moment before
            # would be out of step, and the group lost.
            await asyncio.wait({staging}, timeout=self.settle_seconds)
            if not staging.done():
                with contextlib.suppress(AdminError):
                    await admin.discard(worker, self.identity)
            reply = await staging
        except RollwayError as error:
            if self._failed.is_set():
                raise UsageError(f"{worker} stopped receiving. {self._cause}") from error
            self._cause = str(error)
            self._failed.set()
            raise
        finally:
            others.cancel()
            staging.cancel()
        self._digests[worker.instance_id] = [str(rank.get("digest", "")) for rank in reply.ranks]
        return reply

    async def check_unchanged(self) -> None:
        """Raise unless all ranks have received the same bytes."""
        digests = {digest for ranks in self._digests.values() for digest in ranks}
        if "" in digests:
            raise RefitRefused(
                "A worker has no memory to stage the broadcast, which cannot wait for the pause."
            )
        if self._digests.keys() != self.seats or len(digests) != 1:
            raise RefitRefused("The ranks of the trainer's group received different bytes.")
