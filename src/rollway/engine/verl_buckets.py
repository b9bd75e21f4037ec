"""verl's own hand-over of weights, received in a worker: buckets of shared memory, one at a time.

    a rank of verl's trainer                         a rank of an engine
    binds a Unix socket, makes a bucket ── name ───► maps it
    fills it with tensors ── what lies where ──────► loads them ── done ──► fills it again …

verl pickles its messages. Whatever could call code is refused here before it is read: a message may
name torch's dtypes and `torch.Size`, and is otherwise made of plain values. The socket and the
bucket must belong to the user that this process runs as.
"""

from __future__ import annotations

import io
import math
import os
import pickle
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
from rollway.weights.checkpoint import (
    TensorHeader,
    differences,
    read_headers,
    refuse_differences,
)
from rollway.weights.digest.bits import DTYPES, dtype_name
from rollway.weights.offer import Count, Offer
from rollway.weights.transports.base import Reader
from rollway.weights.transports.shm import SHM, mapped, plain_file

_PREFIX = "verl_weights_"
_MOST_MESSAGE_BYTES = 64 << 20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an offer: a socket for each rank of the engine, and a checkpoint with the same tensors."""

    sockets: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1 << 10)]
    like: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """Within which each message must come."""


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """verl's first message: the memory that all tensors come through."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    size: Count


class VerlBucketsReceiver(Reader):
    """Takes what one rank of the trainer sends; `rank` is that of this process in its engine."""

    def __init__(self, rank: Callable[[], int], directory: Path = SHM) -> None:
        self._rank, self._directory = rank, directory

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """As in the checkpoint: what comes is known when it is there, and compared then."""
        return read_headers(Path(_where(offer).like))

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = lambda _: False
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in the bucket, valid until the next is asked for."""
        where = _where(offer)
        came: dict[str, TensorHeader] = {}
        with _connected(Path(where.sockets[self._rank()]), where.seconds) as socket:
            memory = self._mapped(_bucket(socket.recv()))
            last: Any = False
            while not last:
                socket.send(b"")  # what was read so far may be written over
                message = _read(socket.recv())
                listed, last = message.get("bucket_meta"), message.get("is_last")
                if not isinstance(listed, dict) or not isinstance(last, bool):
                    raise WeightsError("A message of verl's has no list of tensors.")
                for name, meta in listed.items():
                    tensor = _view(memory, str(name), meta)
                    if name in came:
                        raise WeightsError(f"{name} came twice.")
                    came[str(name)] = TensorHeader(dtype_name(tensor), tuple(tensor.shape), "")
                    yield name, tensor
            words = differences(came, read_headers(Path(where.like)), allow_cast=True)
            refuse_differences(words, f"version {offer.version}")
            socket.send(b"")

    def _mapped(self, bucket: Bucket) -> Tensor:
        if Path(bucket.name).name != bucket.name or not bucket.name.startswith(_PREFIX):
            raise WeightsError(f"`{bucket.name}` is no bucket of verl's.")
        path = self._directory / bucket.name
        with plain_file(path) as (handle, found):
            if found.st_uid != os.getuid():
                raise WeightsError(f"{path} is not this user's.")
            if not 0 < bucket.size <= found.st_size:
                raise WeightsError(f"{path} does not hold {bucket.size} bytes.")
            return mapped(handle, found.st_size, whole=False)[: bucket.size]


def _where(offer: Offer) -> Where:
    try:
        return msgspec.convert(offer.where, Where)
    except msgspec.ValidationError as error:
        raise WeightsError(f"This offer names no socket of verl's: {error}.") from error


@contextmanager
def _connected(path: Path, seconds: float) -> Iterator[Any]:
    """A socket of a sender that is there, or comes within some time."""
    import zmq

    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightsError(f"Nobody sends weights at {path}.")
        time.sleep(0.01)
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise WeightsError(f"{path} is no socket of this user's.")
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * seconds))
        socket.setsockopt(zmq.LINGER, int(1000 * min(seconds, 5.0)))  # the last answer still goes
        socket.connect(f"ipc://{path}")
        try:
            yield socket
        except zmq.Again as error:
            raise WeightsError(f"No weights came at {path} within {seconds:g} s.") from error


class _Plain(pickle._Unpickler):
    """Reads what verl sends and nothing that could do anything. The one that is written in Python:
    a few bytes have the other one fill gigabytes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise WeightsError(f"A message of verl's names {module}.{name}, which it never does.")


def _read(raw: bytes) -> dict[str, Any]:
    try:
        message = _Plain(io.BytesIO(raw)).load()
    except WeightsError:
        raise
    except Exception as error:  # a pickle that is none fails in many ways
        raise WeightsError(f"A message of verl's cannot be read: {error}.") from error
    if not isinstance(message, dict):
        raise WeightsError("A message of verl's is no mapping.")
    return message


def _bucket(raw: bytes) -> Bucket:
    try:
        return msgspec.convert(_read(raw), Bucket)
    except msgspec.ValidationError as error:
        raise WeightsError(f"verl names no bucket of shared memory: {error}.") from error


def _view(memory: Tensor, name: str, meta: Any) -> Tensor:
    """A tensor, where verl says that it lies."""
    try:
        shape, dtype, offset = torch.Size(meta["shape"]), meta["dtype"], meta["offset"]
        if meta["handle"] is not None or not isinstance(dtype, torch.dtype):
            raise WeightsError(f"{name} does not come through the bucket.")
        nbytes = math.prod(shape) * dtype.itemsize
        fits = type(offset) is int and min(0, offset, *shape) >= 0
        if not fits or offset % dtype.itemsize or offset + nbytes > memory.numel():
            raise WeightsError(f"{name} is said to lie outside of its bucket.")
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"verl does not say what {name} is: {error}.") from error
    return memory[offset : offset + nbytes].view(dtype).view(shape)
