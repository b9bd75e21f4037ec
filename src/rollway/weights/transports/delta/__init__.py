"""Publish only what changed since the version before, with a whole snapshot now and then.

    version     4          5          6          7          8          9
    delta       3->4  ───  4->5  ───  5->6  ───  6->7  ───  7->8  ───  8->9
    snapshot    4                                           8

An engine that serves version 6 and can write changed elements into its parameters reads 6->7 to
8->9. Any other reads snapshot 8 and then 8->9. A reader verifies all bytes that it reads.
"""

from rollway.weights.transports.delta.publisher import DeltaPublisher
from rollway.weights.transports.delta.reader import DeltaReader

__all__ = ["DeltaPublisher", "DeltaReader"]
