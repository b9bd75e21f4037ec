"""Measure what observing costs by itself: the code path while it is off, CPU and memory of the
process that samples."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rollway.aio import up
from rollway.bench import Say
from rollway.bench.observe_peers import ANSWER
from rollway.bench.observe_traffic import INTERVAL_SECONDS, PEERS, read_cpu_seconds, start_peer
from rollway.config import StackSpec
from rollway.errors import RequestFailed, Unreachable, UsageError
from rollway.http import Http
from rollway.observe.sample import Target
from rollway.rollout.client import Rollout, Rollouts
from rollway.rollout.sampling import Sampling
from rollway.rollout.sender import (
    SESSION_HEADER,
    Attempt,
    Trouble,
    check_prompt,
    describe_error,
    is_temporary,
)
from rollway.rollout.trajectory import Trajectory
from rollway.versions import FleetVersions, Ticket

FEW = 4
_OFF_ROUNDS = 401
_OFF_ROLLOUTS = 100
"""Of one round: short ones, so that what else runs on a machine falls on both arms."""
_HTTP_ROUNDS = 9
_HTTP_ROLLOUTS = 1500
_WATCH_SECONDS = 30.0
_WATCH_ROUNDS = 2

# --- off -----------------------------------------------------------------------------------------


async def measure_off(say: Say, figures: dict[str, Any]) -> None:
    """Compare the CPU time of rollouts that nobody observes with that of the same code without a
    line for observing.

    The difference is less than a microsecond: it is measured with answers that come at once, and
    compared with the time of a rollout over HTTP."""
    gc.freeze()  # else each round would begin with a look at all modules
    async with start_peer("answer") as peer, Http() as http:
        client = Rollouts(http, peer.told["url"], "tiny", FleetVersions())
        whole = median(
            [await _time_rollouts(client, _HTTP_ROLLOUTS, at_once=32) for _ in range(_HTTP_ROUNDS)]
        )
    arms: dict[str, Rollouts] = {
        "without": _BareRollouts(_Instant(), "http://frontend", "tiny", FleetVersions()),
        "with": Rollouts(_Instant(), "http://frontend", "tiny", FleetVersions()),
    }
    rows = []
    for number in range(_OFF_ROUNDS):
        row = {}
        for arm in list(arms)[:: 1 if number % 2 else -1]:
            row[arm] = await _time_rollouts(arms[arm], _OFF_ROLLOUTS)
        if number:  # the first round is the warm-up
            rows.append(row)
    differences = [row["with"] - row["without"] for row in rows]
    extra = max(0.0, median(differences))
    figures.update(
        microseconds_per_rollout={"without": 1e6 * (whole - extra), "with": 1e6 * whole},
        extra_microseconds=1e6 * extra,
        middle_half=[1e6 * edge for edge in quantiles(differences, n=4)[::2]],
        ratio=(whole - extra) / whole,
        rounds=len(rows),
    )
    say(f"off: {1e6 * extra:.2f} µs more of {1e6 * whole:.0f} µs per rollout")


async def _time_rollouts(rollouts: Rollouts, count: int, at_once: int = 1) -> float:
    """Return the CPU seconds of one rollout, of so many."""
    sampling = Sampling(max_tokens=16, logprobs=False)
    prompt = list(range(10, 138))
    gc.collect()
    began = time.process_time()

    async def send(count: int) -> None:
        for _ in range(count):
            await rollouts.generate(prompt, sampling)

    await asyncio.gather(*(send(count // at_once) for _ in range(at_once)))
    return (time.process_time() - began) / (count // at_once * at_once)


class _Instant(Http):
    """Stands in for the frontend."""

    async def post(self, *_: Any, **__: Any) -> Any:
        return ANSWER


class _BareRollouts(Rollouts):
    """Rollouts as they would be if nothing could be observed: the methods of the base class on
    the path of a rollout, less their lines for a tally, a tracer and spans."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        group: str | None = None,
        version: int | None = None,
        salt: str = "",
    ) -> list[Rollout]:
        prompt = check_prompt(prompt_ids)
        if n < 1:
            raise UsageError(f"n is {n}.", "Ask for at least one rollout.")
        return [await self._sample_bare(prompt, sampling or Sampling(), group, version, salt)]

    async def _sample_bare(
        self,
        prompt: list[int],
        sampling: Sampling,
        session: str | None,
        version: int | None,
        salt: str,
    ) -> Rollout:
        trajectory = Trajectory(prompt, sampling, self.adapter, salt)
        attempt = self._attempt(session)
        async with self._slots, self._deadline():
            while True:
                ticket = await self._ticket(attempt.trouble, version)
                body, assembly = self._request(trajectory, ticket, pin=attempt.pins.now)
                answer = await self._send_bare(body, ticket, attempt)
                if answer is None:
                    continue
                assembly.add(answer)
                leg, before = assembly.finish(), len(trajectory.token_ids)
                with self._count_in_flight():
                    rollout = await self._add_leg(trajectory, leg, ticket)
                if rollout is not None:
                    return rollout
                if len(trajectory.token_ids) > before:
                    attempt.trouble = Trouble(self._patience)
                else:
                    await attempt.retry_elsewhere(ticket, leg)

    def _make_bare_headers(self, session: str | None) -> dict[str, str]:
        headers = {}
        if session is not None and time.monotonic() >= self._full_until:
            headers[SESSION_HEADER] = session
        return headers

    async def _send_bare(self, body: dict[str, Any], ticket: Ticket, attempt: Attempt) -> Any:
        pins = attempt.pins
        headers = self._make_bare_headers(None if pins.now is not None else attempt.session)
        try:
            with self._count_in_flight():
                return await self._http.post(
                    self._url, body, timeout=self._timeout, headers=headers
                )
        except (Unreachable, RequestFailed) as error:
            if not (pins.now or is_temporary(error)):
                raise describe_error(error, self.model) from error
            pins.exclude_current(ticket)
            attempt.session = None
            await attempt.trouble.wait(describe_error(error, self.model))
            await self._refresh_workers()
            return None


# --- observer ------------------------------------------------------------------------------------


async def measure_observer(
    spec: StackSpec, scratch: Path, say: Say, figures: dict[str, Any]
) -> None:
    """Compare the CPU of a sampling process with all workers of a stack, and with a few."""
    say("observer: starting the stack")
    spec = spec.model_copy(update={"observe": spec.observe.model_copy(update={"record": False})})
    async with up(spec) as stack:
        await stack.unwatch()
        workers = sorted(await stack.fleet.workers(), key=lambda worker: worker.instance_id)
        targets = [
            Target(f"worker-{number}", f"{worker.admin_url}/metrics")
            for number, worker in enumerate(workers)
        ]
        counts = {"few": FEW, "all": len(targets)}
        shares: dict[str, list[float]] = {name: [] for name in counts}
        async with Http() as http:
            page = await http.get_bounded(targets[0].url, timeout=10.0, limit=1 << 24)
        for number in range(_WATCH_ROUNDS):
            for name in list(counts)[:: 1 if number % 2 else -1]:
                directory = scratch / f"{name}-{number}"
                directory.mkdir(mode=0o700)
                share = await _watch_sampler(directory, targets[: counts[name]])
                shares[name].append(share)
                say(f"observer: {counts[name]} workers, {100 * share:.2f}% of a core")
    core = {name: median(values) for name, values in shares.items()}
    figures.update(workers=counts, core=core, ratio=core["all"] / core["few"], page_bytes=len(page))


async def _watch_sampler(directory: Path, targets: Sequence[Target]) -> float:
    """Return the share of a core that sampling these targets takes."""
    file = directory / "targets.json"
    file.write_text(json.dumps([asdict(target) for target in targets]))
    async with start_peer("sample", str(file), str(INTERVAL_SECONDS)) as peer:
        await asyncio.sleep(2 * INTERVAL_SECONDS)  # the first rounds connect to all
        began, used = time.monotonic(), read_cpu_seconds(peer.pid)
        await asyncio.sleep(_WATCH_SECONDS)
        return (read_cpu_seconds(peer.pid) - used) / (time.monotonic() - began)


# --- memory --------------------------------------------------------------------------------------


async def measure_memory(scratch: Path, say: Say, figures: dict[str, Any]) -> None:
    """Compare the memory of a process that samples, records and shows a run, at the end of a day
    and at its middle: until then the last refits, events and points of plots fill up."""
    from rollway.bench.observe_day import TENTHS

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", PEERS, "day", str(scratch)), stdout=asyncio.subprocess.PIPE
    )
    lines = (await process.communicate())[0].splitlines()
    sizes = [float(json.loads(line)["mib"]) for line in lines]
    if len(sizes) < TENTHS:
        raise UsageError("The simulated day ended early.", "Its error is above.")
    middle = sizes[TENTHS // 2 - 1]
    figures.update(mib=sizes, ratio=sizes[-1] / middle)
    say(f"memory: {middle:.0f} MiB in the middle of a day, {sizes[-1]:.0f} at its end")
