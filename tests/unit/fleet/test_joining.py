"""Workers that join are refitted as they come: none waits for the refit of another."""

from __future__ import annotations

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


def test_a_joiner_is_admitted_beside_one_that_takes_long() -> None:
    with machine(verifying=True, staging=True) as m:
        slow = start_slow_admission(m)
        joiners = [m.world.join(), m.world.join()]
        m.time_passes(4.0)
        assert [worker.label for worker in joiners] == [1, 1]
        assert slow.label != 1
        m.time_passes(2 * SLOW)
        assert slow.label == 1
        m.settles()


def test_a_joiner_that_fails_does_not_hold_up_the_others() -> None:
    with machine(verifying=True, staging=True) as m:
        slow = start_slow_admission(m)
        hung, joiner = m.world.join(), m.world.join()
        m.world.faults["check", hung.instance_id] = "refuse"
        m.time_passes(4.0)
        assert joiner.label == 1
        m.time_passes(2 * SLOW)
        assert slow.label == 1
        m.settles()


def test_no_joiner_is_taken_along_while_a_refit_waits() -> None:
    with machine(verifying=True, staging=True) as m:
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
    with machine(verifying=True, staging=True) as m:
        process, m.tried = m.processes[0], 1
        assert m.loop.run_until_complete(process.refit(1)) == "done"
        watching = m.loop.create_task(process.fleet.watch())
        m.time_passes(6.0)
        listings = m.world.listings
        m.time_passes(1.5)
        assert m.world.listings == listings  # nobody joined, so nobody is probed
        joiner = m.world.join()
        joiner.load_seconds = 0.02
        m.time_passes(1.5)
        assert joiner.label == 1
        watching.cancel()
        m.settles()
