"""Send weights by vLLM's own weight transfer (`--weight-transfer-config`, backend nccl), to workers
that have no extension of Rollway's.

    driver                                sender, rank 0             ranks of the engines, 1 and up
    make_id() ──────────────────────────► an id of NCCL's
    init_weight_transfer_engine(id, …) ─────────────────────────────► join, then one all-reduce
    join(id, world) ────────────────────► join, then one all-reduce
    start_weight_update() ──────────────────────────────────────────► (paused) prepare to load
    update_weights(names, dtypes, shapes) ──────────────────────────► receive, and load each chunk
    send(tensors) ──────────────────────► chunks: whole tensors as bytes, by broadcast
    finish_weight_update() ─────────────────────────────────────────► finish loading

The messages are those of vLLM 0.31. A chunk ends with the tensor by which it exceeds the agreed
size. Nothing on this wire is verified: no sum of what arrived comes back. Nothing is pickled: the
id is sent as bytes, and not by a store.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError

ID_BYTES = 128
"""The length of an id of NCCL's."""
CHUNK_BYTES = 1 << 30
BUFFERS = 2
"""vLLM's own sizes."""
_LIBRARY = "libnccl.so.2"


class TensorInfo(NamedTuple):
    """What the receivers are told of a tensor before it comes."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    """Not told: it follows."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, list(tensor.shape), tensor.nbytes)


class Communicator(Protocol):
    """Rank 0 of a group that has formed."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all other ranks; it may still be read when this returns."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing is read any more."""
        ...

    def abort(self) -> None:
        """Leave the group; a broadcast that waits for another rank ends."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Nccl:
    """A communicator by NCCL's own library, which torch has loaded: trainers have no vLLM, and
    torch's `torch.cuda.nccl.init_rank` raises on Python 3.10 and later."""

    _FLOAT32, _UINT8, _SUM = 7, 1, 0

    def __init__(self, unique_id: bytes, world: int) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm = ctypes.c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), world, given, 0)
        # vLLM's receivers do the same, to see that the group works.
        first = torch.zeros(1, device="cuda")
        address = ctypes.c_void_p(first.data_ptr())
        rest = (ctypes.c_size_t(1), self._FLOAT32, self._SUM, self._comm, self._stream())
        self._call("ncclAllReduce", address, address, *rest)
        self.synchronize()

    @staticmethod
    def make_id() -> bytes:
        unique_id = _UniqueId()
        status = ctypes.CDLL(_LIBRARY).ncclGetUniqueId(ctypes.byref(unique_id))
        if status:
            raise WeightsError(f"NCCL has no id for a group (status {status}).")
        return bytes(unique_id)

    def broadcast(self, tensor: Tensor) -> None:
        # Kept by the stream's order: torch gives its memory to nobody before this was sent.
        sent = tensor.to("cuda")
        address = ctypes.c_void_p(sent.data_ptr())
        count = ctypes.c_size_t(sent.nbytes)
        rest = (count, self._UINT8, 0, self._comm, self._stream())
        self._call("ncclBroadcast", address, address, *rest)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def abort(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            reason = self._library.ncclGetErrorString(status).decode()
            raise WeightsError(f"{name} failed: {reason}.", "NCCL_DEBUG=INFO says more.")

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Backend(NamedTuple):
    """How groups form."""

    make_id: Callable[[], bytes]
    join: Callable[[bytes, int], Communicator]


NCCL = Backend(Nccl.make_id, Nccl)


class VllmGroupSender:
    """Sends every version of the weights from rank 0 of the group."""

    def __init__(self, chunk_bytes: int | None = None, backend: Backend | None = None) -> None:
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._backend = backend or NCCL
        self._communicator: Communicator | None = None

    def make_id(self) -> dict[str, Any]:
        """Return what every receiver must be told to join, besides its rank: the fields of vLLM's
        NCCLWeightTransferInitInfo."""
        unique_id = self._backend.make_id()
        assert len(unique_id) == ID_BYTES
        return {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "packed": True,
            "packed_buffer_size_bytes": self._chunk_bytes,
            "packed_num_buffers": BUFFERS,
        }

    def join(self, nccl_unique_id_b64: str, world: int) -> None:
        """Join the group; this returns when all ranks have."""
        self.leave()
        unique_id = base64.b64decode(nccl_unique_id_b64, validate=True)
        self._communicator = self._backend.join(unique_id, world)

    def leave(self) -> None:
        """Leave the group, also while it sends."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def send(self, tensors: Iterable[tuple[str, Tensor]], promised: Sequence[TensorInfo]) -> int:
        """Send the tensors that the receivers were promised; return how many bytes they have."""
        communicator = self._communicator
        if communicator is None:
            raise UsageError("No group has formed.", "Form one before weights are sent.")
        total = 0
        for chunk in split_chunks(check_promise(tensors, promised), self._chunk_bytes):
            communicator.broadcast(chunk)
            total += chunk.numel()
        communicator.synchronize()
        return total


def check_promise(
    tensors: Iterable[tuple[str, Tensor]], promised: Sequence[TensorInfo]
) -> Iterator[Tensor]:
    """Yield the tensors; raise at the first that is not the one that was promised: the receivers
    would cut the bytes in other places."""
    count = 0
    for name, tensor in tensors:
        info = TensorInfo.of(name, tensor)
        if count == len(promised) or info != promised[count]:
            expected = promised[count] if count < len(promised) else "nothing"
            raise UsageError(
                f"The policy sends {info}, and the engines expect {expected}.",
                "Start the run again: the tensors of a policy must not change.",
            )
        count += 1
        yield tensor
    if count < len(promised):
        raise UsageError(f"The policy does not send {promised[count].name}.")


def split_chunks(tensors: Iterable[Tensor], chunk_bytes: int) -> Iterator[Tensor]:
    """Join tensors to chunks of bytes; each ends with the tensor by which it exceeds the size."""
    parts: list[Tensor] = []
    size = 0
    for tensor in tensors:
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > chunk_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)
