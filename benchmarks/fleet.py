"""`rollway bench fleet`: the cost of listing and refitting many workers, compared with one worker.

All ratios are computed within one run: the listing against one probe, the refit of all workers
against the refit of one, and a later refit without its pause against one probe. The last one shows
how many times a refit waits for workers that answer late.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from benchmarks import round_floats
from benchmarks.inputs import read_spec
from rollway.api import up
from rollway.errors import NoWorkers, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Membership, RlListing, Source, Worker
from rollway.http import Http
from rollway.signed_calls import DOOR, ORDER, sign
from rollway.spec import StackSpec

_REPEATS = 5
_ORDERS = 400


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    spec = read_spec(options)
    if spec is None:
        raise UsageError("No stack is named.", "Give a stack file: rollway bench fleet -f FILE.")
    return 0, round_floats(asyncio.run(_bench_fleet(spec)), ".6f")


async def _bench_fleet(spec: StackSpec) -> dict[str, Any]:
    path = Path(spec.models[0].path)
    async with up(spec) as stack, Http() as http:
        await stack.unwatch()  # the watcher's listings would disturb the measurement
        # The stack's own fleet may know too few workers: of a process that holds many, its
        # supervisor knows one.
        secret = stack.weights_secret
        fleet = Fleet(http, RlListing(stack.rl_url, stack.frontend_url), secret=secret)
        workers = await fleet.workers()
        if not workers:
            raise NoWorkers("No RL worker is listed.", "The engine must have admin routes.")
        sample = workers[:_REPEATS]
        probe = max([await measure(fleet.admin.read(worker)) for worker in sample])
        order = await _measure_signature(http, workers[0], secret)
        listing = statistics.median([await measure(fleet.workers()) for _ in range(_REPEATS)])
        singles = [make_single(http, fleet, worker, secret) for worker in sample]
        alone = max([await measure(single.refit(1, path)) for single in singles])
        began = time.monotonic()
        report = await fleet.refit(2, path)
        seconds = time.monotonic() - began
        later = [await fleet.refit(3 + turn, path) for turn in range(_REPEATS)]
    outside = statistics.median([refit.seconds - refit.paused_seconds for refit in later])
    return {
        "workers": len(workers),
        # The slowest of several requests for a worker's version.
        "probe_seconds": probe,
        # What a signature adds to an admin call: the difference of the medians.
        "order_seconds": order,
        "listing_seconds": listing,
        "listing_ratio": listing / probe,
        # The slowest of several refits of a single worker.
        "alone_seconds": alone,
        "refit_seconds": seconds,
        "refit_ratio": seconds / alone,
        "paused_seconds": report.paused_seconds,
        # The most admin calls that a later refit made to one worker.
        "calls": max(worker.calls for refit in later for worker in refit.workers),
        # The median of later refits without their pause.
        "outside_seconds": outside,
        "outside_ratio": outside / probe,
    }


async def measure(call: Awaitable[object]) -> float:
    """Return the seconds of a call."""
    began = time.monotonic()
    await call
    return time.monotonic() - began


async def _measure_signature(http: Http, worker: Worker, secret: str) -> float:
    """Time the same call with and without a signature, alternately."""
    url = f"{worker.admin_url}/engine"
    process = (await http.post(f"{url}/{DOOR}", {}, timeout=10.0)).get("process", "")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(_ORDERS):
        with_order = turn % 2 == 1
        began = time.perf_counter()
        body = {ORDER: sign(secret, "get_weight_version", process, {})} if with_order else {}
        await http.post(f"{url}/get_weight_version", body, timeout=10.0)
        seconds[with_order].append(time.perf_counter() - began)
    return statistics.median(seconds[True]) - statistics.median(seconds[False])


def make_single(http: Http, fleet: Fleet, worker: Worker, secret: str) -> Fleet:
    """Make a fleet of this worker alone; it refits by the same procedure."""
    single = Fleet(http, fleet.membership.source, admin=fleet.admin, secret=secret)
    single.membership = _SingleMembership(http, fleet.membership.source, worker)
    return single


class _SingleMembership(Membership):
    """Lists all workers, at the usual cost, and returns one of them."""

    def __init__(self, http: Http, source: Source, worker: Worker) -> None:
        super().__init__(http, source)
        self._worker = worker

    async def workers(self, *, fresh: bool = False) -> list[Worker]:
        workers = await super().workers(fresh=fresh)
        return [worker for worker in workers if worker.instance_id == self._worker.instance_id]
