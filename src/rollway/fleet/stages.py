"""The order in which prefill and decode workers change weights.

    wait:   prefill pool ─────► decode pool         prefill workers drain: decode workers, which
                                                    still serve, fetch all KV that they hold
    abort:  decode pool ──────► prefill pool        decode workers drop what they have and wait
                                 release            for; nobody reads the prefill pool's blocks
                                                    any more, so they are released at once

A decode worker samples a request with the KV that a prefill worker computed, so both must have the
version that the request names. Four rules hold that together:

1. The router sends a request only to workers with the taint of its version, in both pools.
2. Each engine admits a request only if its cache salt names the version that the engine has; a
   decode engine that refuses one tells the prefill worker to release its blocks.
3. A prefill engine swaps only when it holds no blocks for others: what is fetched from it was
   computed by the weights that it has.
4. A version counts as served when both pools have a worker on it (`FleetVersions.is_served`).

`keep` is refused: a decode worker would compute a frozen request's prompt again by itself, while
transfers of other requests are in flight, and vLLM does not clear its cache then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

W = TypeVar("W")
GetRole = Callable[[W], str]

_DRAINING = ("", "prefill", "decode")
_DROPPING = ("", "decode", "prefill")


def split_in_stages(workers: Sequence[W], mode: str, get_role: GetRole[W]) -> list[list[W]]:
    """Return the workers by role, in the order in which the roles change weights."""
    order = _DROPPING if mode == "abort" else _DRAINING
    stages = ([w for w in workers if get_role(w) == role] for role in order)
    return [stage for stage in stages if stage]


def split_in_shares(workers: Sequence[W], share: float, get_role: GetRole[W]) -> list[list[W]]:
    """Return groups with a share of the workers of each role."""
    chunks = []
    for stage in split_in_stages(workers, "wait", get_role):
        size = max(1, min(len(stage) - 1, round(len(stage) * share)))
        chunks.append([stage[start : start + size] for start in range(0, len(stage), size)])
    return [[worker for part in parts for worker in part or ()] for parts in zip_longest(*chunks)]
