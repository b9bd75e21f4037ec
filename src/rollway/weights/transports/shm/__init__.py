"""Weights through shared memory: one copy out of the trainer's memory, on one machine.

    trainer ── publish: copy, sum ──► /dev/shm/rollway-weights-…   (slots, used in turn)
                                          │ mapped once, read in place
    worker  ◄── one copy, straight into its own parameters; sums compared after the copy

`adopt` moves a model's own parameters into a slot, so that publishing copies nothing at all. The
publisher removes a slot's list of tensors before it overwrites the bytes, and a reader checks the
list again after it has read: it never receives a mixture of two versions.
"""

from rollway.weights.transports.shm.publisher import ShmPublisher
from rollway.weights.transports.shm.reader import ShmReader
from rollway.weights.transports.shm.shards import join_offers

__all__ = ["ShmPublisher", "ShmReader", "join_offers"]
