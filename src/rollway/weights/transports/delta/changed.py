"""Read what changed since a version that somebody else holds, without its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from rollway.errors import WeightsError
from rollway.weights.transports.changes import Changes
from rollway.weights.transports.delta import batches
from rollway.weights.transports.delta.format import Encoded
from rollway.weights.transports.delta.manifest import Manifest, Step
from rollway.weights.transports.delta.unpacking import Streams, decompress

if TYPE_CHECKING:
    from rollway.weights.transports.delta.reader import DeltaVersions

Result = TypeVar("Result")


def read_changes(
    versions: DeltaVersions, base: Manifest, steps: Sequence[Step], at_most: int
) -> Changes:
    """Read the changes of all steps, which must begin at exactly the tensors of `base`."""
    if not steps:
        return Changes(refusal="another version with the number of the served one is offered")
    if any(step.kind == "snapshot" for step in steps):
        return Changes(refusal="a snapshot is shorter than the deltas since the served version")
    digests = {name: entry.digest for name, entry in base.tensors.items()}
    counts: list[int] = []

    def read(encoded: Encoded) -> Streams:
        header = encoded.header
        # The base's manifest may be gone, and another one may have its number meanwhile.
        if header.before is not None and header.before != digests[header.name]:
            raise WeightsError(f"{header.name} changed since another version {header.base}.")
        digests[header.name] = header.digest
        counts.append(header.count)
        if sum(counts) > at_most:
            raise WeightsError(f"More than {at_most} elements changed.")
        return decompress(encoded)

    changes = [batches.Step(each) for each in versions.map_changes(digests, steps, read)]
    if digests != {name: entry.digest for name, entry in steps[-1].manifest.tensors.items()}:
        raise WeightsError("The deltas do not lead to the offered version.")
    return Changes(changes)


def map_in_order(
    work: Callable[[str], Result], names: Sequence[str], *, threads: int
) -> list[Result]:
    """Call `work` with each name, in threads if there are several; raise its first error."""
    threads = min(threads, len(os.sched_getaffinity(0)))
    if threads == 1:
        return list(map(work, names))
    with ThreadPoolExecutor(threads) as pool:
        try:
            return list(pool.map(work, names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
