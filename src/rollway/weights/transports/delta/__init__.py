"""Publish only what changed since the version before, with a whole snapshot now and then.

    version     4          5          6          7          8          9
    delta       3->4  ───  4->5  ───  5->6  ───  6->7  ───  7->8  ───  8->9
    snapshot    4                                           8

A worker that holds version 6 reads 6->7 to 8->9. A worker that joins late reads snapshot 8 and then
8->9. A version exists once its manifest does, which is written last: a publisher that dies earlier
leaves objects that nobody reads, and the next publisher removes them. A reader verifies every
tensor of a version, and reads a snapshot if a chain does not lead there. Versions are stored in a
directory that all machines see, or in shared memory on one machine.
"""

from rollway.weights.transports.delta.publisher import DeltaPublisher
from rollway.weights.transports.delta.reader import DeltaReader
from rollway.weights.transports.delta.store import SharedMemory, Store
from rollway.weights.transports.delta.versions import DeltaVersions, Entry, Manifest, Object, Step

__all__ = [
    "DeltaPublisher",
    "DeltaReader",
    "DeltaVersions",
    "Entry",
    "Manifest",
    "Object",
    "SharedMemory",
    "Step",
    "Store",
]
