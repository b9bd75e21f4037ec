"""Which workers are there: the frontend's RL listing, typed.

`GET /v1/rl/workers` re-probes every worker on each call, and answers 200 also when some could not
be probed: such a worker carries an `error` and is reported, never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollway.errors import RequestFailed, Unreachable
from rollway.http import IDEMPOTENT, Http, Retry

# The frontend gives a hung worker 5 s before it lists it with an error.
LISTING_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Worker:
    """One live worker: who it is, what it serves, and where its admin routes are."""

    instance_id: int
    """Dynamo's id, an unsigned 64-bit number: exact in Python, not in a double."""
    model: str
    admin_url: str
    routes: frozenset[str]
    world_size: int = 1
    error: str | None = None

    def __str__(self) -> str:
        return f"worker {self.instance_id} ({self.admin_url or 'no admin address'})"


async def discover(http: Http, rl_url: str, *, retry: Retry = IDEMPOTENT) -> list[Worker]:
    """The workers listed at `rl_url`, ordered by instance id."""
    url = f"{rl_url}/v1/rl/workers"
    try:
        listing = await http.get(url, timeout=LISTING_SECONDS, retry=retry)
    except Unreachable as error:
        raise Unreachable(
            f"No RL worker listing: {error.message}",
            "The frontend serves it on a port of its own (DYN_ENABLE_RL=true, DYN_RL_PORT); "
            "pass that address as `rl_url`.",
        ) from error
    entries = listing.get("workers") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        raise RequestFailed(f"{url} answered without a list of workers.", status=200)
    return sorted((_worker(entry) for entry in entries), key=lambda worker: worker.instance_id)


def _worker(entry: Any) -> Worker:
    instance = entry.get("instance_id") if isinstance(entry, dict) else None
    if not isinstance(instance, int) or isinstance(instance, bool):
        raise RequestFailed(
            f"The worker listing has an entry whose instance_id is {instance!r}.", status=200
        )
    error = entry.get("error")
    return Worker(
        instance_id=instance,
        model=entry.get("model") or "",
        admin_url=(entry.get("system_url") or "").rstrip("/"),
        routes=frozenset(entry.get("routes") or ()),
        world_size=entry.get("world_size") or 1,
        error=str(error) if error else None,
    )
