"""What a reader of deltas makes of one change."""

from __future__ import annotations

from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import digest
from rollway.weights.transports.delta.format import Encoded
from rollway.weights.transports.delta.reader import write_changes
from rollway.weights.transports.delta.unpacking import decompress_all


def apply(change: Encoded, tensor: Tensor) -> Tensor:
    """Return a tensor after a change; raise unless it is then what was published."""
    state = {change.header.name: tensor.detach().contiguous().clone()}
    write_changes(decompress_all([change]), state)
    changed = state[change.header.name]
    if digest(changed) != change.header.digest:
        raise WeightsError(f"{change.header.name} does not match its checksum.")
    return changed
