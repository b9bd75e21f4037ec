"""Receive prime-rl's `nccl` weight broadcast in a worker.

    rollway_join    background: connect to the trainer ─► a rank of its group, for the whole run
    rollway_joined  joined, still waiting, or why not
    rollway_stage   background: receive one broadcast ─► staged like any version, while it generates

A broadcast is received once. If this rank stops in the middle of one, or the trainer dies, it is
out of step with the others: it leaves the group, says why, and serves what it served before, until
it joins another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.engine.background import BackgroundTask
from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.offer import Count, Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.group import BrokenOff, Group, Place
from rollway.weights.transports.state_dicts import Receiver, Unfit, join_group

BROADCAST = "prime_rl_broadcast"
_AGAIN = (
    "Send /init_broadcaster: trainer and workers must form a group again. If broadcasts now come "
    "as files, start the server with --weight-broadcast filesystem."
)
_MARGIN = 1 << 30
"""Bytes of a broadcast beyond four times those of the model: lists, and tied heads."""


class GroupRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names a group, and this worker's first rank in it."""

    place: Place
    first_rank: Count
    """The number of ranks of the workers before this one."""


class Membership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that names the group by which its weights come."""

    group: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]


def find_rank(parallel: Any, worker_rank: int) -> int:
    """Return the number of a process among those of its engine, over DP, PP, PCP and TP.

    vLLM counts `worker_rank` over one or over all data-parallel ranks, by executor; and it says of
    dense models that there is one such rank, except in `data_parallel_index`."""
    ranks = (
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.prefill_context_parallel_size
    )
    return int(parallel.data_parallel_index * ranks + worker_rank % ranks)


class PrimeRlBroadcastReader(Reader):
    """One rank's place in a trainer's group, and the broadcasts that come by it."""

    def __init__(
        self, served: Mapping[str, TensorHeader] | None = None, *, is_tied: bool = False
    ) -> None:
        """Start in no group. `served` are the tensors of the served model; `is_tied` says that its
        head is not among its parameters."""
        self._served, self._is_tied = dict(served or {}), is_tied
        self._identity = ""
        self._task: BackgroundTask | None = None
        self._group: Group | None = None
        self._cause = "this worker has joined no group"
        self._stopped = threading.Event()
        """Ends the waits of the group."""
        self._is_expecting = False
        """Whether a broadcast is under way, or about to be."""
        self._received: dict[str, str] = {}
        """By the identity of the offer, the digest of the bytes that arrived; "" until then."""

    # --- the group -------------------------------------------------------------------------------

    def join(self, offer: Offer, rank: int, device: torch.device, tell: str = "") -> None:
        """Start to join a group, and leave the one before; `check_joined` has the outcome."""
        group_rank = _read(offer, GroupRank)
        if self._identity == offer.identity and self._task is not None:
            self._task.notify_when_done(tell)
            return
        self._leave("this worker joins another group")
        self._identity, self._stopped = offer.identity, threading.Event()
        self._cause = "its group has not formed yet"
        stopped, number = self._stopped, 1 + group_rank.first_rank + rank
        work = partial(self._join, group_rank.place, number, device, stopped)
        self._task = BackgroundTask(f"the group at {group_rank.place.host}", work, device)
        self._task.notify_when_done(tell)

    def check_joined(self, identity: str) -> None:
        """Raise unless this rank has joined the group."""
        if identity != self._identity or self._task is None:
            raise WeightsError("This worker was not asked to join that group.")
        self._task.check()
        try:
            self._find_group(identity).watch()
        except BrokenOff as error:
            self._leave(f"its group has ended ({error.message.rstrip('.')})")
            raise

    def leave(self, identity: str) -> None:
        """Leave a group, also one that has not formed."""
        if identity in ("", self._identity):
            self._leave("this worker was ordered to leave it")

    def _join(
        self, place: Place, rank: int, device: torch.device, stopped: threading.Event
    ) -> None:
        def check() -> None:
            if stopped.is_set():
                raise BrokenOff(f"This rank has left the group: {self._cause}.")

        try:
            group = join_group(place, rank, device, check)
        except WeightsError as error:
            if not stopped.is_set():
                self._cause = f"its group did not form: {error.message}"
            raise
        if stopped.is_set():  # nobody closes it any more
            group.close()
            check()
        self._group = group

    def _leave(self, cause: str) -> None:
        self._cause, self._identity, self._task = cause, "", None
        self._is_expecting = False
        self._stopped.set()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _find_group(self, identity: str) -> Group:
        group = self._group
        if group is None or identity != self._identity:
            raise WeightsError(f"No broadcast can come: {self._cause}.", _AGAIN)
        return group

    # --- one version -----------------------------------------------------------------------------

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Return those of the served model; `tensors` compares what arrives with them."""
        self._find_group(_read(offer, Membership).group)
        self._is_expecting = True
        return dict(self._served)

    def get_digest(self, offer: Offer) -> str:
        return self._received.get(offer.identity, "")

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        if offer.identity in self._received:
            raise WeightsError("This broadcast was received before, and is sent once.", _AGAIN)
        self._received = {offer.identity: ""}
        group = self._find_group(_read(offer, Membership).group)
        most = 4 * offer.nbytes + _MARGIN
        receiver = Receiver(group, group.device, self._served, most, self._is_tied)
        cause, tensors = "a worker stopped in the middle of a broadcast", receiver.tensors()
        try:
            for pair in tensors:  # noqa: UP028 (`tensors` is closed after the group is left)
                yield pair
            cause = ""
            self._received = {offer.identity: receiver.digest}
        except Unfit:
            cause = ""  # all of it has arrived: the next broadcast can come
            raise
        except WeightsError as error:
            cause = f"the last broadcast broke off ({error.message.rstrip('.')})"
            raise
        finally:
            self._is_expecting = False
            if cause and self._group is group:
                self._leave(cause)
            tensors.close()

    def release(self) -> None:
        """End the broadcast that is expected or being received."""
        if self._is_expecting:
            self._leave("the last broadcast broke off (it was discarded)")

    def close(self) -> None:
        self._leave("this worker ends")


def _read(offer: Offer, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(offer.where, kind)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This offer names no group of a trainer's: {error}.") from error
