"""`rollway bench fleet`: what it costs to list and to refit many workers, against one of them.

Ratios of one run: the listing against one probe, the refit of all against that of one worker alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollway.api import up
from rollway.config import StackSpec
from rollway.errors import NoWorkers
from rollway.fleet.discovery import Source, Worker
from rollway.fleet.fleet import Fleet
from rollway.fleet.membership import Membership
from rollway.http import Http
from rollway.orders import DOOR, ORDER, sign

_REPEATS = 5
_ORDERS = 400


@dataclass(slots=True)
class FleetFigures:
    """Seconds, and the two ratios that matter."""

    workers: int
    probe_seconds: float
    """One worker asked for its version, the slowest of some."""
    order_seconds: float
    """What a signature adds to an admin call: medians of the same call with and without."""
    listing_seconds: float
    listing_ratio: float
    alone_seconds: float
    """A refit of one worker alone, the slowest of some."""
    refit_seconds: float
    refit_ratio: float
    paused_seconds: float

    def as_json(self) -> dict[str, Any]:
        return {key: _rounded(value) for key, value in asdict(self).items()}


async def bench_fleet(spec: StackSpec) -> FleetFigures:
    path = Path(spec.models[0].path)
    async with up(spec) as stack, Http() as http:
        await stack.unwatch()  # nobody else lists meanwhile
        # Not the stack's own fleet: a process may hold many workers, of which its supervisor
        # knows one.
        secret = stack.weights_secret
        fleet = Fleet(http, stack.rl_url, secret=secret)
        workers = await fleet.workers()
        if not workers:
            raise NoWorkers("No RL worker is listed.", "The engine must have admin routes.")
        probe = max([await _probe(fleet, worker) for worker in workers[:_REPEATS]])
        order = await _order_cost(http, workers[0], secret)
        listing = statistics.median([await _listing(fleet) for _ in range(_REPEATS)])
        alone = max(
            [await _alone(http, fleet, worker, path, secret) for worker in workers[:_REPEATS]]
        )
        began = time.monotonic()
        report = await fleet.refit(2, path)
        seconds = time.monotonic() - began
    return FleetFigures(
        workers=len(workers),
        probe_seconds=probe,
        order_seconds=order,
        listing_seconds=listing,
        listing_ratio=listing / probe,
        alone_seconds=alone,
        refit_seconds=seconds,
        refit_ratio=seconds / alone,
        paused_seconds=report.paused_seconds,
    )


async def _probe(fleet: Fleet, worker: Worker) -> float:
    began = time.monotonic()
    await fleet.admin.weight_version(worker)
    return time.monotonic() - began


async def _order_cost(http: Http, worker: Worker, secret: str) -> float:
    """Time a call that a worker answers with and without a signature, in turns."""
    url = f"{worker.admin_url}/engine"
    process = (await http.post(f"{url}/{DOOR}", {}, timeout=10.0)).get("process", "")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(_ORDERS):
        signed = turn % 2 == 1
        began = time.perf_counter()
        body = {ORDER: sign(secret, "get_weight_version", process, {})} if signed else {}
        await http.post(f"{url}/get_weight_version", body, timeout=10.0)
        seconds[signed].append(time.perf_counter() - began)
    return statistics.median(seconds[True]) - statistics.median(seconds[False])


async def _listing(fleet: Fleet) -> float:
    began = time.monotonic()
    await fleet.workers()
    return time.monotonic() - began


async def _alone(http: Http, fleet: Fleet, worker: Worker, path: Path, secret: str) -> float:
    """The same procedure, by a fleet that consists of one worker."""
    small = Fleet(http, fleet.membership.source, admin=fleet.admin, secret=secret)
    small.membership = _Only(http, fleet.membership.source, worker)
    began = time.monotonic()
    await small.refit(1, path)
    return time.monotonic() - began


class _Only(Membership):
    """Asks as always, and sees one worker."""

    def __init__(self, http: Http, source: Source, worker: Worker) -> None:
        super().__init__(http, source)
        self._worker = worker

    async def workers(self, *, fresh: bool = False) -> list[Worker]:
        found = await super().workers(fresh=fresh)
        return [worker for worker in found if worker.instance_id == self._worker.instance_id]


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 6)
