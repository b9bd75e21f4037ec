"""Weights on one GPU: a reader in another process copies out of the trainer's device memory.

    trainer ── publish: copy into buckets, sum ──► device memory   (`in_place`: its parameters)
                 │ list of tensors: /dev/shm/rollway-ipc-…/<slot>.json      ▲ opened once
    offer ───────┴─ IPC handles of the allocations ────────────────────────┤
    worker  ◄── `tensors`: views of that memory; the engine copies, the reader compares checksums

An offer exists only after its copies are complete, because publishing waits for their checksums. A
reader opens handles once, since later versions use the same buckets. CPU tensors use shared memory
instead of handles, so that everything else works the same where there is no GPU.
"""

from rollway.weights.transports.cuda_ipc.publisher import CudaIpcPublisher
from rollway.weights.transports.cuda_ipc.reader import CudaIpcReader

__all__ = ["CudaIpcPublisher", "CudaIpcReader"]
