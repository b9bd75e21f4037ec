"""Workers that join are refitted as they come: none waits for the refit of another."""

from __future__ import annotations

import asyncio

import pytest

from rollway.fleet import workers
from tests.unit.fleet.refit_machine import RefitMachine, machine
from tests.unit.fleet.sim_fleet import SimWorker

SLOW = 20.0
"""Seconds, simulated, in which a worker loads weights."""


def start_slow_admission(m: RefitMachine) -> SimWorker:
    """Let a worker join that takes long, and begin to admit it."""
    process, m.tried = m.processes[0], 2
    assert m.loop.run_until_complete(process.refit(1)) == "done"
    worker = m.world.join()
    worker.load_seconds = SLOW
    m.time_passes(0.1)
    process.start(process.admit(), process.under_way)
    m.time_passes(1.0)
    return worker


def start_watch(m: RefitMachine, seconds: float) -> asyncio.Task[None]:
    """Refit, then watch the fleet for so long before anybody joins."""
    process, m.tried = m.processes[0], 1
    assert m.loop.run_until_complete(process.refit(1)) == "done"
    watching = m.loop.create_task(process.fleet.watch())
    m.time_passes(seconds)
    return watching


def test_a_joiner_is_admitted_beside_one_that_takes_long() -> None:
    with machine() as m:
        slow = start_slow_admission(m)
        joiners = [m.world.join(), m.world.join()]
        for joiner in joiners:
            joiner.load_seconds = 0.4
        m.time_passes(4.0)
        assert [worker.label for worker in joiners] == [1, 1]
        assert slow.label != 1
        m.time_passes(2 * SLOW)
        assert slow.label == 1
        m.settles()


def test_who_joins_during_an_admission_is_found_in_a_moment() -> None:
    with machine() as m:
        start_slow_admission(m)
        steps = 0
        for _ in range(6):  # each as soon as the one before it serves
            joiner = m.world.join()
            joiner.load_seconds = 0.02
            while joiner.label != 1 and steps < 100:
                m.time_passes(0.1)
                steps += 1
        assert steps <= 45  # with a look every second it would be 56
        m.time_passes(2 * SLOW)
        m.settles()


def test_who_joins_after_an_admission_is_found_in_a_moment() -> None:
    with machine() as m:
        watching = start_watch(m, 20.0)
        steps = 0
        for _ in range(4):  # each some time after the one before it serves
            joiner = m.world.join()
            joiner.load_seconds = 0.02
            while joiner.label != 1 and steps < 100:
                m.time_passes(0.1)
                steps += 1
            m.time_passes(1.3)
        assert steps <= 35  # with a look every second it would be 45
        watching.cancel()
        m.settles()


def test_a_worker_that_no_listing_shows_is_listed_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listing makes the frontend ask all workers, so looks must not cause one each."""
    with machine() as m:
        start_slow_admission(m)

        async def look(*_: object) -> frozenset[int]:
            return frozenset({*(await m.world.instances() or ()), 99})

        with monkeypatch.context() as patch:
            patch.setattr(workers, "list_instances", look)
            before = m.world.listings
            m.time_passes(5.0)
            assert 4 <= m.world.listings - before <= 6
        m.time_passes(2 * SLOW)
        m.settles()


def test_a_joiner_that_fails_does_not_hold_up_the_others() -> None:
    with machine() as m:
        slow = start_slow_admission(m)
        hung, joiner = m.world.join(), m.world.join()
        m.world.faults["check", hung.instance_id] = "refuse"
        joiner.load_seconds = 0.4
        m.time_passes(4.0)
        assert joiner.label == 1
        m.time_passes(2 * SLOW)
        assert slow.label == 1
        m.settles()


def test_no_joiner_is_taken_along_while_a_refit_waits() -> None:
    with machine() as m:
        start_slow_admission(m)
        process = m.processes[0]
        process.start(process.refit(2), process.under_way)
        m.time_passes(0.1)
        joiner = m.world.join()
        m.time_passes(4.0)
        assert joiner.label == 0
        m.time_passes(6 * SLOW)
        assert {worker.label for worker in m.world.workers.values()} == {2}
        m.settles()


def test_a_watch_notices_a_joiner_within_a_second() -> None:
    with machine() as m:
        watching = start_watch(m, 6.0)
        listings = m.world.listings
        m.time_passes(1.5)
        assert m.world.listings == listings  # nobody joined, so nobody is probed
        joiner = m.world.join()
        joiner.load_seconds = 0.02
        m.time_passes(1.5)
        assert joiner.label == 1
        watching.cancel()
        m.settles()


@pytest.mark.parametrize(
    "kind",
    [
        ("managed", "stack"),
        ("managed", "attached"),
        ("managed", "pools"),
        ("foreign", "stack"),
        ("foreign", "attached"),
        ("foreign", "plain"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("seed", range(4))
def test_no_token_of_a_joiner_counts_for_a_version_that_it_had_not(
    kind: tuple[str, str], seed: int
) -> None:
    """The router sends to a worker whose taints it does not know yet; its answers come before it is
    admitted, while it is, and after."""
    with machine(kind=kind, seed=seed, unknown_seconds=3.0) as m:
        process = m.processes[0]
        assert m.loop.run_until_complete(process.refit(1)) == "done"
        m.tried = 1
        for load_seconds in (0.02, 0.1, 0.4):
            for sampler in m.processes:
                sampler.start(sampler.traffic(150, 8), sampler.sampling)
            m.advance(0.1)
            m.world.join().load_seconds = load_seconds
            m.advance(0.2)
            assert m.loop.run_until_complete(process.admit()) == "done"
            m.advance(3.0)
            m.holds()
        m.settles()
