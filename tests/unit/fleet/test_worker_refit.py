"""How many calls a refit makes, and what it does when a worker does not play along.

On the simulated fleet of sim_fleet.py; test_refit_machine.py has the promises of every refit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollway.fleet import worker_refit
from rollway.fleet.report import RefitMode
from rollway.fleet.workers import Membership, Worker
from rollway.versions import taint_of
from tests.unit.fleet import sim_fleet
from tests.unit.fleet.coordinator import Coordinator
from tests.unit.fleet.refit_machine import RefitMachine, machine
from tests.unit.fleet.sim_fleet import SimUpdate


def refit(m: RefitMachine, version: int, mode: RefitMode = "pause-all") -> None:
    assert m.loop.run_until_complete(m.processes[0].refit(version, "", mode)) == "done"
    m.tried = version


def start_until_ordered(m: RefitMachine, version: int) -> asyncio.Task[str]:
    """Start a refit, and return when the first worker has its order."""
    task, before = m.loop.create_task(m.processes[0].refit(version)), len(m.world.log)
    while not any(call.route == "refit" for call in m.world.log[before:]):
        m.time_passes(0.001)
    return task


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("mode", ["pause-all", "rolling", "in-flight", "keep"])
def test_a_later_refit_makes_two_calls_to_each_worker_and_lists_none(
    mode: RefitMode, is_busy: bool
) -> None:
    with machine() as m:
        for worker in m.world.workers.values():
            worker.sticky = False
            worker.load_seconds = 3.0  # less than one order to stage may wait
        refit(m, 1)
        process = m.processes[0]
        if is_busy:
            process.start(process.traffic(50, length=20), process.sampling)
            m.time_passes(0.3)
        before, listings = len(m.world.log), m.world.listings
        refit(m, 2, mode)
        calls = m.world.log[before:]
        for instance in m.world.workers:
            routes = [call.route for call in calls if call.worker == instance]
            assert routes == ["check", "refit"]
        assert m.world.listings == listings
        m.settles()


def test_the_report_has_the_number_of_calls() -> None:
    with machine() as m:
        refit(m, 1)
        update = SimUpdate(Path("/weights/w2"))
        report = m.loop.run_until_complete(m.processes[0].fleet.refit(2, update))
        assert [worker.calls for worker in report.workers] == [2, 2]
        assert report.as_json()["workers"][0]["calls"] == 2


def test_a_worker_that_joins_while_orders_run_is_moved() -> None:
    with machine() as m:
        refit(m, 1)
        task = start_until_ordered(m, 2)
        joiner = m.world.join()
        m.time_passes(0.006)  # its supervisor labels it
        assert m.loop.run_until_complete(task) == "done"
        assert joiner.label == 2
        m.tried = 2
        m.settles()


def test_a_worker_that_dies_in_the_preflight_and_is_listed_no_more_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sim_fleet, "LISTED_DEAD_SECONDS", 0.0)
    with machine() as m:
        refit(m, 1)
        victim = next(iter(m.world.workers.values()))

        async def die(step: str, worker: Worker) -> None:
            if worker.instance_id == victim.instance_id:
                victim.die()

        fleet = m.processes[0].fleet
        fleet.observer = die
        report = m.loop.run_until_complete(fleet.refit(2, SimUpdate(Path("/weights/w2"))))
        states = {worker.instance_id: worker.state for worker in report.workers}
        assert states[victim.instance_id] == "gone"
        assert sorted(states.values()) == ["gone", *["serving"] * (len(states) - 1)]


def test_a_refit_waits_if_all_workers_are_still_starting() -> None:
    with machine() as m:
        refit(m, 1)
        for worker in m.world.workers.values():  # all of them restarted
            worker.label = worker.engine_label = None
        task = m.loop.create_task(m.processes[0].refit(2))
        m.time_passes(2.0)
        assert not task.done()
        for worker in m.world.workers.values():
            worker.set_label(0)
        assert m.loop.run_until_complete(task) == "done"
        assert {worker.label for worker in m.world.workers.values()} == {2}


def test_a_worker_that_gets_its_label_while_orders_run_is_moved() -> None:
    """It was there from the beginning, so nobody joins."""
    with machine() as m:
        refit(m, 1)
        starting = m.world.join(ready_after=1000.0)
        task = start_until_ordered(m, 2)
        starting.set_taints([taint_of(0)])
        starting.set_label(0)
        assert m.loop.run_until_complete(task) == "done"
        assert starting.label == 2
        m.tried = 2


def test_a_view_that_hides_joiners_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine() as m:

        async def confirm(membership: Membership) -> list[Worker]:
            await m.world.instances()
            return membership.known

        monkeypatch.setattr(Membership, "confirm", confirm)
        refit(m, 1)
        m.world.join()
        m.time_passes(1.0)
        assert m.loop.run_until_complete(m.processes[0].refit(2)) == "done"
        assert "worker 3 is" in m.world.violations[0]
        m.world.violations.clear()


def test_a_worker_that_hangs_with_its_order_is_noticed_soon() -> None:
    """The order itself may take as long as running requests take: 17 minutes."""
    with machine(count=1) as m:
        refit(m, 1)
        worker = m.world.workers[1]
        task = start_until_ordered(m, 2)
        worker.hang(900.0)
        began = m.world.now
        assert m.loop.run_until_complete(task) == "failed"
        assert "in doubt" in m.processes[0].trouble
        # A look, its answer, and the wait for the label of a worker whose answer was lost.
        assert m.world.now - began < worker_refit.WATCH_SECONDS + 60.0
        m.tried = 2
        m.settles()


def test_an_order_never_reaches_a_successor_at_the_address() -> None:
    with machine() as m:
        refit(m, 1)
        process, first = m.processes[0], m.world.workers[1]

        async def die_before_the_order(step: str, worker: object) -> None:
            await asyncio.sleep(0)  # an observer is a coroutine
            if step == "update" and first.alive:
                first.die()
                successor = m.world.join()
                assert successor.port == first.port

        process.fleet.observer = die_before_the_order
        assert m.loop.run_until_complete(process.refit(2)) in ("done", "failed")
        successor = m.world.workers[3]
        orders = [c for c in m.world.log if c.worker == 3 and c.route == "refit"]
        # Only an order of its own, after it has staged the weights itself.
        staged = [c for c in m.world.log if c.worker == 3 and c.route == "check"]
        assert len(orders) <= len(staged)
        assert successor.label in (0, 2)
        m.tried = 2
        m.settles()


def test_a_hung_worker_is_found_although_no_listing_was_made() -> None:
    """Nobody is left out: the refit waits for it, as if a listing had shown that it hangs."""
    with machine() as m:
        refit(m, 1)
        m.world.workers[1].hang(20.0)
        outcome = m.loop.run_until_complete(m.processes[0].refit(2))
        assert outcome == "done" and m.world.workers[1].label == 2
        m.tried = 2
        m.settles()


def test_processes_share_nothing_but_the_workers() -> None:
    """A second process has never listed the workers, so it lists them."""
    with machine() as m:
        refit(m, 1)
        other, listings = Coordinator(m.world), m.world.listings
        assert m.loop.run_until_complete(other.refit(2)) == "done"
        assert m.world.listings > listings
