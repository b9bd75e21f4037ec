"""Receive weights from the own senders of verl and of prime-rl in a worker.

verl has a bucket of shared memory, through which the tensors pass one after another:

    a rank of verl's trainer                         a rank of an engine
    bind a Unix socket, make a bucket ── name ─────► map it
    fill it with tensors ── list of tensors ───────► load them ── done ──► fill it again …

verl pickles its messages; `rollway.weights.untrusted` reads them without running code. The socket
and the bucket must belong to the user that this process runs as.

prime-rl's `nccl` broadcast goes to a group that lives as long as the trainer:

    rollway_join    background: connect to the trainer ─► a rank of its group, for the whole run
    rollway_joined  joined, still waiting, or why not
    rollway_stage   background: receive one broadcast ─► staged like any version, while it generates

A broadcast is received once. If this rank stops in the middle of one, or the trainer dies, it is
out of step with the others: it leaves the group, says why, and serves what it served before, until
it joins another.
"""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from rollway.engine.incoming import BackgroundTask
from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader, differences, read_headers, refuse_differences
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.offer import Count, Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.entries import SHM, map_for_reading, open_shared_file
from rollway.weights.transports.group import BrokenOff, Group, Place
from rollway.weights.transports.state_dicts import Receiver, Unfit, join_group
from rollway.weights.untrusted import read_pickle

Part = TypeVar("Part", bound=msgspec.Struct)


def _read(raw: Any, kind: type[Part]) -> Part:
    """Return what an offer or a message describes."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This describes no {kind.__name__}: {error}.") from error


# --- verl's buckets ------------------------------------------------------------------------------

_PREFIX = "verl_weights_"
_MAX_MESSAGE_BYTES = 64 << 20


class BucketSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an offer that says where its tensors come from."""

    sockets: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1 << 10)]
    """A socket for each rank of the engine."""
    checkpoint: str
    """A checkpoint with the same names, shapes and dtypes."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """The time limit for each message to arrive."""


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """verl's first message: the memory that all tensors pass through."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    size: Count


class BucketContents(msgspec.Struct, frozen=True):
    """Each of verl's later messages: what is in the bucket now."""

    bucket_meta: dict[str, Any]
    is_last: bool


class TensorPlace(msgspec.Struct, frozen=True):
    """Where a tensor is in the bucket."""

    shape: tuple[Count, ...]
    dtype: torch.dtype
    offset: Count
    handle: None
    """Set if the tensor is elsewhere in device memory."""


class VerlBucketsReceiver(Reader):
    """Receives from the rank of the trainer that is this worker's."""

    def __init__(self, directory: Path = SHM) -> None:
        self._directory = directory

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Return the checkpoint's headers; `tensors` compares the messages with them."""
        return read_headers(Path(_read(offer.where, BucketSource).checkpoint))

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor in the bucket, valid until the next is requested."""
        source = _read(offer.where, BucketSource)
        received: dict[str, TensorHeader] = {}
        with _connect(Path(source.sockets[self.rank]), source.seconds) as socket:
            memory = self._map(read_message(socket.recv(), Bucket))
            is_last = False
            while not is_last:
                socket.send(b"")  # permits verl to overwrite the bucket
                contents = read_message(socket.recv(), BucketContents)
                is_last = contents.is_last
                for name, meta in contents.bucket_meta.items():
                    tensor = _view(memory, name, _read(meta, TensorPlace))
                    received[name] = TensorHeader(dtype_name(tensor), tuple(tensor.shape), "")
                    yield name, tensor
            mismatches = differences(received, self.headers(offer), allow_cast=True)
            refuse_differences(mismatches, f"version {offer.version}")
            # Acknowledge only now, so that verl's sender fails if its tensors were wrong.
            socket.send(b"")

    def _map(self, bucket: Bucket) -> Tensor:
        if Path(bucket.name).name != bucket.name or not bucket.name.startswith(_PREFIX):
            raise WeightsError(f"`{bucket.name}` is not a bucket of verl's.")
        path = self._directory / bucket.name
        with open_shared_file(path) as (handle, status):
            if status.st_uid != os.getuid():
                raise WeightsError(f"{path} belongs to another user.")
            if not 0 < bucket.size <= status.st_size:
                raise WeightsError(f"{path} does not hold {bucket.size} bytes.")
            return map_for_reading(handle, status.st_size, whole=False)[: bucket.size]


@contextmanager
def _connect(path: Path, seconds: float) -> Iterator[Any]:
    """Connect to a sender's socket, which may appear only after some time."""
    import zmq

    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightsError(f"No rank sends weights at {path}.")
        time.sleep(0.01)
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise WeightsError(f"{path} is not a socket of this user.")
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * seconds))
        # Closing must still deliver the last acknowledgement.
        socket.setsockopt(zmq.LINGER, int(1000 * min(seconds, 5.0)))
        socket.connect(f"ipc://{path}")
        try:
            yield socket
        except zmq.Again as error:
            raise WeightsError(f"No weights arrived at {path} within {seconds:g} s.") from error


def read_message(raw: bytes, kind: type[Part]) -> Part:
    """Return a message of verl's sender."""
    return _read(read_pickle(raw, "verl"), kind)


def _view(memory: Tensor, name: str, place: TensorPlace) -> Tensor:
    """Return a tensor as a view of the bucket, after checking that it is inside."""
    end = place.offset + math.prod(place.shape) * place.dtype.itemsize
    if place.offset % place.dtype.itemsize or end > memory.numel():
        raise WeightsError(f"verl places {name} outside of its bucket.")
    return memory[place.offset : end].view(place.dtype).view(place.shape)


# --- prime-rl's broadcast ------------------------------------------------------------------------

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

    def __init__(self, served: Mapping[str, TensorHeader], *, is_tied: bool = False) -> None:
        """Start in no group. `served` are the tensors of the served model; `is_tied` says that its
        head is not among its parameters."""
        self._served, self._is_tied = dict(served), is_tied
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

    def join(self, offer: Offer, rank: int, device: torch.device, tell: str = "") -> None:
        """Start to join a group, and leave the one before; `check_joined` has the outcome."""
        place = _read(offer.where, GroupRank)
        if self._identity != offer.identity or self._task is None:
            self._leave("this worker joins another group")
            self._identity, self._stopped = offer.identity, threading.Event()
            self._cause = "its group has not formed yet"
            number = 1 + place.first_rank + rank
            work = partial(self._join, place.place, number, device, self._stopped)
            self._task = BackgroundTask(f"the group at {place.place.host}", work, device)
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
        if identity == self._identity:
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

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Return those of the served model; `tensors` compares what arrives with them."""
        self._find_group(_read(offer.where, Membership).group)
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
        group = self._find_group(_read(offer.where, Membership).group)
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
