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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.transports import group
from rollway.weights.transports.entries import join_chunks

CHUNK_BYTES = 1 << 30
BUFFERS = 2
"""vLLM's own sizes."""
SECONDS = 600.0
"""How long the engines may take to join, and then to receive a chunk."""


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


class VllmGroupSender:
    """Sends every version of the weights from rank 0 of the group."""

    def __init__(self, chunk_bytes: int | None = None) -> None:
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._group: group.Group | None = None

    def make_id(self) -> dict[str, Any]:
        """Return what every receiver must be told to join, besides its rank: the fields of vLLM's
        NCCLWeightTransferInitInfo."""
        return {
            "nccl_unique_id_b64": base64.b64encode(group.Nccl.make_id()).decode(),
            "packed": True,
            "packed_buffer_size_bytes": self._chunk_bytes,
            "packed_num_buffers": BUFFERS,
        }

    def join(self, nccl_unique_id_b64: str, world: int) -> None:
        """Join the group; this returns when all ranks have."""
        self.leave()
        unique_id = base64.b64decode(nccl_unique_id_b64, validate=True)
        backend = group.Nccl(unique_id, 0, world, seconds=SECONDS)
        self._group = group.Group(backend, SECONDS)

    def leave(self) -> None:
        """Leave the group, also while it sends."""
        left, self._group = self._group, None
        if left is not None:
            left.close()

    def send(self, tensors: Iterable[tuple[str, Tensor]], promised: Sequence[TensorInfo]) -> int:
        """Send the tensors that the receivers were promised; return how many bytes they have."""
        if self._group is None:
            raise UsageError("No group has formed.", "Form one before weights are sent.")
        chunks = join_chunks(check_promise(tensors, promised), self._chunk_bytes)
        return group.send(self._group, chunks)


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
