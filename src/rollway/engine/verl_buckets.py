"""Receive weights from verl's own sender in a worker: buckets of shared memory, one at a time.

    a rank of verl's trainer                         a rank of an engine
    bind a Unix socket, make a bucket ── name ─────► map it
    fill it with tensors ── list of tensors ───────► load them ── done ──► fill it again …

verl pickles its messages; `rollway.weights.untrusted` reads them without running code. The socket
and the bucket must belong to the user that this process runs as.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader, differences, read_headers, refuse_differences
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.offer import Count, Offer
from rollway.weights.transports.base import Reader, never
from rollway.weights.transports.entries import SHM, map_for_reading, open_shared_file
from rollway.weights.untrusted import read_pickle

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


class VerlBucketsReceiver(Reader):
    """Receives from one rank of the trainer; `rank` returns this process's rank in its engine."""

    def __init__(self, rank: Callable[[], int], directory: Path = SHM) -> None:
        self._rank, self._directory = rank, directory

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Return the checkpoint's headers; `tensors` compares the messages with them."""
        return read_headers(Path(_read_source(offer).checkpoint))

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor in the bucket, valid until the next is requested."""
        source = _read_source(offer)
        received: dict[str, TensorHeader] = {}
        with _connect(Path(source.sockets[self._rank()]), source.seconds) as socket:
            memory = self._map(_parse_bucket(socket.recv()))
            is_last: Any = False
            while not is_last:
                socket.send(b"")  # permits verl to overwrite the bucket
                message = parse_message(socket.recv())
                entries, is_last = message.get("bucket_meta"), message.get("is_last")
                if not isinstance(entries, dict) or not isinstance(is_last, bool):
                    raise WeightsError("A message of verl's has no list of tensors.")
                for name, meta in entries.items():
                    tensor = _view(memory, str(name), meta)
                    if name in received:
                        raise WeightsError(f"verl sent {name} twice.")
                    received[str(name)] = TensorHeader(dtype_name(tensor), tuple(tensor.shape), "")
                    yield name, tensor
            mismatches = differences(
                received, read_headers(Path(source.checkpoint)), allow_cast=True
            )
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


def _read_source(offer: Offer) -> BucketSource:
    try:
        return msgspec.convert(offer.where, BucketSource)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This offer names no socket of verl's: {error}.") from error


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


def parse_message(raw: bytes) -> dict[str, Any]:
    message = read_pickle(raw, "verl")
    if not isinstance(message, dict):
        raise WeightsError("A message of verl's is not a mapping.")
    return message


def _parse_bucket(raw: bytes) -> Bucket:
    try:
        return msgspec.convert(parse_message(raw), Bucket)
    except msgspec.ValidationError as error:
        raise WeightsError(f"verl names no bucket of shared memory: {error}.") from error


def _view(memory: Tensor, name: str, meta: Any) -> Tensor:
    """Return a tensor as a view of the bucket, after checking that it is inside."""
    try:
        shape, dtype, offset = torch.Size(meta["shape"]), meta["dtype"], meta["offset"]
        if meta["handle"] is not None or not isinstance(dtype, torch.dtype):
            raise WeightsError(f"verl did not send {name} through the bucket.")
        nbytes = math.prod(shape) * dtype.itemsize
        is_valid = type(offset) is int and min(0, offset, *shape) >= 0
        if not is_valid or offset % dtype.itemsize or offset + nbytes > memory.numel():
            raise WeightsError(f"verl places {name} outside of its bucket.")
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"verl does not describe {name} fully: {error}.") from error
    return memory[offset : offset + nbytes].view(dtype).view(shape)
