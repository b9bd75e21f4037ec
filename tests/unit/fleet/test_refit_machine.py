"""The promises of a refit hold, whatever joins, leaves, hangs or fails while weights change.

Hypothesis drives the real fleet, refits and rollouts over simulated workers (sim_fleet.py) by the
machine of refit_machine.py. The sabotages at the end switch off one protection each; the same
checks must then fail."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings

from rollway.engine.core import read_version
from rollway.fleet import foreign, refit
from rollway.fleet.admin import RefitRefused
from rollway.fleet.fleet import Fleet
from rollway.fleet.worker_refit import WorkerRefit
from rollway.rollout.client import Rollouts
from rollway.rollout.sampling import Sampling
from rollway.versions import FleetVersions, Ticket, taint_of
from tests.soak import examples
from tests.unit.fleet import sim_fleet
from tests.unit.fleet.refit_machine import MODES, RefitMachine, machine
from tests.unit.fleet.sim_fleet import SimUpdate, SimWorker

TestRefitMachine = RefitMachine.TestCase
TestRefitMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=20, deadline=None, derandomize=True
)


# --- faults that the machine has found, as short as possible ---------------------------------


def joins_during_a_refit(m: RefitMachine) -> None:
    m.refits(0, seconds=0.0)
    m.joins(0.0)


def gets_its_label_during_a_refit(m: RefitMachine) -> None:
    m.joins(0.0)
    m.refits(0)


def misses_its_label(m: RefitMachine) -> None:
    m.refits(0, faults=[("declare", 0, "before")])


def is_resumed_by_a_user_during_a_refit(m: RefitMachine) -> None:
    for tick in range(5, 40):
        m.refits(0, seconds=tick / 1000)
        m.user_resumes(0)
        m.time_passes(6.0)


def is_resumed_by_a_user_after_an_unverified_load(m: RefitMachine) -> None:
    m.refits(0, faults=[("flush", 0, "before")])
    m.user_resumes(0)


def is_in_doubt_when_the_next_pause_fails(m: RefitMachine) -> None:
    m.refits(0, faults=[("flush", 0, "before")])
    m.refits(0, faults=[("pause", 1, "before")])


def is_in_doubt_when_a_users_pause_fails(m: RefitMachine) -> None:
    m.refits(0, faults=[("flush", 0, "before")])
    m.world.faults["pause", 2] = "refuse"
    m.user_pauses(0, "wait")


def has_the_weights_and_is_out_of_service(m: RefitMachine) -> None:
    m.refits(0, faults=[("resume", 0, "refuse")])
    m.refits_again(0, 0, "pause-all")


def joins_after_a_refused_refit(m: RefitMachine) -> None:
    m.refits(0)
    m.refits_wrongly(0, "other")
    m.joins(0.0)
    m.time_passes(6.0)
    m.admits(0)


def is_restored_while_the_refit_is_cancelled(m: RefitMachine) -> None:
    for call in range(12, 20):
        m.refits(0, faults=[("pause", 0, "before")], fuse=(call, "cancel"))


def resumes_and_its_answer_is_lost(m: RefitMachine) -> None:
    m.refits(0, faults=[("resume", 0, "lost")])


MANAGED, FOREIGN = ("managed", "stack"), ("foreign", "stack")


@pytest.mark.parametrize("kind", [MANAGED, FOREIGN, ("foreign", "attached")], ids=" ".join)
@pytest.mark.parametrize(
    "happens",
    [
        joins_during_a_refit,
        gets_its_label_during_a_refit,
        misses_its_label,
        is_resumed_by_a_user_during_a_refit,
        is_resumed_by_a_user_after_an_unverified_load,
        is_in_doubt_when_the_next_pause_fails,
        is_in_doubt_when_a_users_pause_fails,
        has_the_weights_and_is_out_of_service,
        joins_after_a_refused_refit,
        is_restored_while_the_refit_is_cancelled,
        resumes_and_its_answer_is_lost,
    ],
)
def test_the_promises_hold_for_a_worker_that(
    happens: Callable[[RefitMachine], None], kind: tuple[str, str]
) -> None:
    with machine(kind=kind) as m:
        happens(m)
        m.time_passes(6.0)
        m.settles()


def loses_the_answer_to_its_order(m: RefitMachine) -> None:
    m.refits(0, faults=[("refit", 0, "lost")], busy=True)


def never_gets_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "before")], busy=True)


def refuses_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "refuse")], busy=True)


def dies_of_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "die")], busy=True)


def hangs_with_its_order(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "hang")], busy=True)


def swaps_half_of_the_weights(m: RefitMachine) -> None:
    m.refits(0, "in-flight", faults=[("refit", 0, "lie")], half=True, busy=True)


def runs_an_order_while_the_refit_is_cancelled(m: RefitMachine) -> None:
    for call in range(1, 17):
        m.refits(0, "pause-all", fuse=(call, "cancel"), busy=True, seconds=0.5)


def keeps_its_requests(m: RefitMachine) -> None:
    for _ in range(3):
        m.refits(0, "keep", busy=True, seconds=0.2)


def loses_the_answer_while_it_keeps_its_requests(m: RefitMachine) -> None:
    m.refits(0, "keep", faults=[("refit", 0, "lost")], busy=True)


def dies_while_it_keeps_its_requests(m: RefitMachine) -> None:
    m.refits(0, "keep", busy=True, seconds=0.3)
    m.dies(0)


def runs_an_order_while_the_client_crashes(m: RefitMachine) -> None:
    for call in range(1, 17):
        m.refits(0, "rolling", fuse=(call, "crash"), busy=True, seconds=0.5)


@pytest.mark.parametrize("shape", ["stack", "attached"])
@pytest.mark.parametrize(
    "happens",
    [
        joins_during_a_refit,
        gets_its_label_during_a_refit,
        is_resumed_by_a_user_during_a_refit,
        has_the_weights_and_is_out_of_service,
        loses_the_answer_to_its_order,
        never_gets_its_order,
        refuses_its_order,
        dies_of_its_order,
        hangs_with_its_order,
        swaps_half_of_the_weights,
        keeps_its_requests,
        loses_the_answer_while_it_keeps_its_requests,
        dies_while_it_keeps_its_requests,
        runs_an_order_while_the_refit_is_cancelled,
        runs_an_order_while_the_client_crashes,
    ],
)
def test_the_promises_hold_for_a_worker_that_takes_orders_and(
    happens: Callable[[RefitMachine], None], shape: str
) -> None:
    with machine(kind=("managed", shape)) as m:
        happens(m)
        m.time_passes(6.0)
        assert any(call.route == "refit" for call in m.world.log)
        m.settles()


def test_a_lost_answer_to_an_order_costs_nothing() -> None:
    """The worker ends the order by itself, and its label tells that it serves the version."""
    with machine() as m:
        m.world.faults["refit", 1] = "lost"
        assert m.loop.run_until_complete(m.processes[0].refit(1)) == "done"


def test_a_cancelled_refit_ends_an_order_that_waits_for_requests() -> None:
    with machine(count=1) as m:
        process, (worker,) = m.processes[0], m.world.workers.values()
        process.start(process.sample(500), process.sampling)  # ten seconds
        m.time_passes(1.0)
        task = m.loop.create_task(process.refit(1))
        while not worker.paused:
            m.time_passes(0.01)
        task.cancel()
        began = m.world.now
        assert m.loop.run_until_complete(task) == "cancelled"
        assert m.world.now - began < 1.0
        assert (worker.paused, worker.label, worker.taints) == (False, 0, (taint_of(0),))
        m.settles()


def test_rollouts_that_an_order_cuts_keep_their_tokens_and_ask_nothing() -> None:
    """The engine answers from its version only, so no answer needs a question afterwards."""
    with machine(count=1) as m:
        process = m.processes[0]
        m.world.workers[1].load_seconds = 0.02
        m.loop.run_until_complete(process.refit(1))
        work = process.rollouts.generate([1, 2], Sampling(max_tokens=100), n=32)
        sampling = m.loop.create_task(work)
        m.time_passes(1.0)
        before = len(m.world.log)
        assert m.loop.run_until_complete(process.refit(2, "", "in-flight")) == "done"
        rollouts = m.loop.run_until_complete(sampling)
        assert all([span.version for span in r.spans] == [1, 2] for r in rollouts)
        assert [call.route for call in m.world.log[before:]] == ["check", "refit"]
        m.tried = 2
        m.settles()


def the_refit_is_cancelled(m: RefitMachine, i: int = 0) -> None:
    """The engine has aborted its requests, and takes one more step before it would swap."""
    task = m.loop.create_task(m.processes[i].refit(2, "", "in-flight"))
    while m.world.workers[1].running:
        m.time_passes(0.001)
    task.cancel()
    assert m.loop.run_until_complete(task) == "cancelled"
    assert m.world.workers[1].label == 1


def another_process_cancels_its_refit(m: RefitMachine) -> None:
    the_refit_is_cancelled(m, 1)


def a_second_worker_cannot_be_paused(m: RefitMachine) -> None:
    m.world.faults["pause", 2] = "refuse"
    assert m.loop.run_until_complete(m.processes[0].refit(2, "", "in-flight")) == "failed"


def a_user_pauses(m: RefitMachine, i: int = 0) -> None:
    m.loop.run_until_complete(m.processes[i].pause("abort"))
    m.loop.run_until_complete(m.processes[i].resume())


def another_process_pauses(m: RefitMachine) -> None:
    a_user_pauses(m, 1)


def the_workers_sleep(m: RefitMachine) -> None:
    m.loop.run_until_complete(m.processes[0].sleep(level=1, mode="abort"))
    m.loop.run_until_complete(m.processes[0].wake())


def the_engine_aborts_by_itself(m: RefitMachine) -> None:
    for worker in m.world.workers.values():
        worker.end_all("aborted")


@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (the_refit_is_cancelled, MANAGED),
        (another_process_cancels_its_refit, MANAGED),
        (a_second_worker_cannot_be_paused, FOREIGN),
        (a_user_pauses, MANAGED),
        (a_user_pauses, FOREIGN),
        (another_process_pauses, MANAGED),
        (another_process_pauses, FOREIGN),
        (the_workers_sleep, MANAGED),
        (the_engine_aborts_by_itself, MANAGED),
        (the_engine_aborts_by_itself, FOREIGN),
    ],
)
def test_a_rollout_is_continued_whatever_cuts_it(
    happens: Callable[[RefitMachine], None], kind: tuple[str, str]
) -> None:
    """When the answer arrives, nothing tells what cut it: its worker serves as before."""
    count = 1 if kind == MANAGED else 2
    with machine(kind=kind, count=count) as m:
        process = m.processes[0]
        for worker in m.world.workers.values():
            worker.load_seconds = 0.02
        assert m.loop.run_until_complete(process.refit(1)) == "done"
        work = process.rollouts.generate([1, 2], Sampling(max_tokens=100), n=8)
        sampling = m.loop.create_task(work)
        m.time_passes(0.5)
        m.world.answer_seconds = 2.0
        happens(m)
        rollouts = m.loop.run_until_complete(sampling)
        assert {(r.finish_reason, len(r.token_ids)) for r in rollouts} == {("length", 100)}
        assert {span.version for r in rollouts for span in r.spans} == {1}
        assert any(len(r.spans) > 1 for r in rollouts)
        m.tried = 2
        m.settles()


def test_requests_that_a_refit_keeps_have_both_versions() -> None:
    with machine(count=1) as m:
        process = m.processes[0]
        m.world.workers[1].load_seconds = 0.02
        work = process.rollouts.generate([1, 2], Sampling(max_tokens=100), n=8)
        sampling = m.loop.create_task(work)
        m.time_passes(0.5)
        assert m.loop.run_until_complete(process.refit(1, "", "keep")) == "done"
        rollouts = m.loop.run_until_complete(sampling)
        for rollout in rollouts:
            process._check_rollout(rollout)
            assert [span.version for span in rollout.spans] == [0, 1]
        m.tried = 1
        m.settles()


def test_workers_that_cannot_keep_requests_are_named() -> None:
    with machine(kind=FOREIGN) as m:
        assert m.loop.run_until_complete(m.processes[0].refit(1, "", "keep")) == "refused"
        assert "2 of 2 workers cannot keep running requests" in m.processes[0].trouble


def test_answers_sampled_beside_a_canary_are_discarded() -> None:
    """A stalled router delivers a request during a canary, the refit is cancelled, and another
    process asks the worker for its version."""
    m = RefitMachine()
    m.begin(seed=267, kind=FOREIGN, count=3)
    m.refits(
        0, "rolling", [("resume", 0, "before"), ("taint", 1, "before")], busy=True, seconds=0.5
    )
    m.refits(0, "rolling", busy=True, seconds=0.0)
    m.joins(0.0)
    m.refits(0, "rolling", busy=True)
    m.refits(0, "rolling", fuse=(31, "cancel"), busy=True, seconds=0.05)
    m.refits(1, busy=True)
    m.teardown()


# --- a refit that ends early frees staged updates --------------------------------------------


def another_worker_refuses_the_update(m: RefitMachine) -> str:
    m.world.faults["check", 2] = "refuse"
    return m.loop.run_until_complete(m.processes[0].refit(2))


def the_version_is_taken(m: RefitMachine) -> str:
    return m.loop.run_until_complete(m.processes[0].refit(1, "other"))


def the_version_is_served_already(m: RefitMachine) -> str:
    return m.loop.run_until_complete(m.processes[0].refit(1))


def an_order_is_refused(m: RefitMachine) -> str:
    m.world.faults["refit", 2] = "before"
    return m.loop.run_until_complete(m.processes[0].refit(2))


def the_orders_fail(m: RefitMachine) -> str:
    m.world.faults["refit", 1] = m.world.faults["refit", 2] = "refuse"
    return m.loop.run_until_complete(m.processes[0].refit(2))


def the_refit_is_cancelled_while_workers_stage(m: RefitMachine) -> str:
    task = m.loop.create_task(m.processes[0].refit(2))
    while not all(worker.staged for worker in m.world.workers.values()):
        m.time_passes(0.001)
    task.cancel()
    return m.loop.run_until_complete(task)


def the_refit_is_cancelled_before_the_swap(m: RefitMachine) -> str:
    task = m.loop.create_task(m.processes[0].refit(2))
    while not any(worker.paused for worker in m.world.workers.values()):
        m.time_passes(0.001)
    task.cancel()
    return m.loop.run_until_complete(task)


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [
        (another_worker_refuses_the_update, "refused"),
        (the_version_is_taken, "refused"),
        (the_version_is_served_already, "done"),
        (an_order_is_refused, "failed"),
        (the_orders_fail, "failed"),
        (the_refit_is_cancelled_while_workers_stage, "cancelled"),
        (the_refit_is_cancelled_before_the_swap, "cancelled"),
    ],
)
def test_no_worker_keeps_staged_weights_when(
    happens: Callable[[RefitMachine], str], outcome: str
) -> None:
    with machine() as m:
        for worker in m.world.workers.values():
            worker.load_seconds = 0.2
        assert m.loop.run_until_complete(m.processes[0].refit(1)) == "done"
        staged = sum(call.route == "check" for call in m.world.log)
        assert happens(m) == outcome
        assert sum(call.route == "check" for call in m.world.log) > staged
        assert [worker.staged for worker in m.world.workers.values()] == [None, None]
        m.holds()


# --- the same checks, with one protection switched off ---------------------------------------


Sabotage = Callable[[pytest.MonkeyPatch], None]


def test_a_worker_in_doubt_is_paused_although_a_call_to_keep_it_out_fails() -> None:
    """Its canary resumed it, and the answer was lost."""
    with machine(kind=FOREIGN, count=2) as m:
        m.world.faults["resume", 1] = "lost"
        observe = m.processes[0].fleet.observer

        async def fail_after_the_load(step: str, worker: Any) -> None:
            if step == "verify" and worker.instance_id == 1:
                m.world.faults["taint", 1] = "before"
            await observe(step, worker)

        m.processes[0].fleet.observer = fail_after_the_load
        m.tried = 1
        assert m.loop.run_until_complete(m.processes[0].refit(1)) == "failed"
        assert m.world.workers[1].paused
        m.holds()


def run_story(sabotage: Sabotage, kind: tuple[str, str] = MANAGED) -> int:
    """Run traffic through every mode, then an event for each protection. Return how many requests
    arrived late."""
    with machine(kind=kind, unknown_seconds=0.5) as m:
        run, process, world = m.loop.run_until_complete, m.processes[0], m.world
        sabotage(m.patch)
        for worker in world.workers.values():
            worker.lag, worker.load_seconds, worker.sticky = 0.05, 0.01, world.supervised
        world.workers[2].load_seconds = 0.5  # the others serve meanwhile

        def then(work: Coroutine[Any, Any, str], expected: str) -> None:
            outcome = run(work)
            m.holds()
            assert outcome == expected, process.trouble

        for version, mode in enumerate(MODES * 2, 1):
            for sampler in m.processes:
                sampler.start(sampler.traffic(80, 4), sampler.sampling)
            m.advance(0.2)
            then(process.refit(version, "", mode), "done")
            m.advance(2.0)
        then(process.refit(5), "refused")
        then(process.refit(6, "other"), "refused")
        for sampler in m.processes:
            sampler.start(sampler.traffic(100, 4), sampler.sampling)
        world.join(ready_after=0.1)  # the router sends requests to it before it knows its taints
        m.advance(3.0)
        then(process.admit(), "done")
        world.faults["refit" if world.managed else "pause", 1] = "refuse"
        then(process.refit(7), "failed")
        world.faults["refit" if world.managed else "update", 1] = (
            "half" if world.managed else "refuse"
        )
        then(process.refit(8, "", "rolling"), "failed")
        process.start(process.traffic(20), process.sampling)
        then(process.resume(), "failed")
        m.tried = 8
        m.settles()
        return sum(worker.late for worker in world.workers.values())


def nothing(patch: pytest.MonkeyPatch) -> None: ...


@pytest.mark.parametrize("kind", [MANAGED, FOREIGN, ("foreign", "plain")], ids=" ".join)
def test_late_requests_are_refused_or_aborted(kind: tuple[str, str]) -> None:
    late = run_story(nothing, kind)
    assert (late > 0) is (kind != MANAGED)  # the engine of a managed worker refuses them


def the_engine_admits_every_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimWorker, "admits", lambda *_: True)


def an_engine_without_a_label_stamps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimWorker, "names_versions", lambda _: True)


def every_answer_is_believed(patch: pytest.MonkeyPatch) -> None:
    async def yes(*_: object) -> bool:
        return True

    patch.setattr(Rollouts, "_is_attributed", yes)


def what_it_was_before_it_was_known_counts(patch: pytest.MonkeyPatch) -> None:
    """Of a foreign worker: whether it has had the version since before the request."""
    real = FleetVersions.has_served

    def has_served(self: FleetVersions, ticket: Ticket, worker: int | None) -> bool:
        return real(self, replace(ticket, learned=10**9), worker)

    patch.setattr(FleetVersions, "has_served", has_served)


def refits_by_others_are_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    async def has_served(self: Fleet, ticket: Ticket, instance: int | None) -> bool:
        return self.versions.has_served(ticket, instance)

    patch.setattr(Fleet, "still_serves", has_served)


def another_process_refits(sabotage: Sabotage) -> None:
    """A stalled router delivers requests of one process after the other has refitted."""
    with machine(kind=FOREIGN) as m:
        sabotage(m.patch)
        m.processes = [m._coordinator() for _ in m.processes]  # clients look the method up once
        m.advance(1.0)
        for worker in m.world.workers.values():
            worker.load_seconds = 0.02
        for version in range(1, 31):
            m.processes[0].start(m.processes[0].traffic(10, 4), m.processes[0].sampling)
            m.advance(0.05)
            assert m.loop.run_until_complete(m.processes[1].refit(version)) == "done"
            m.advance(3.0)
            m.holds()
        m.tried = 30
        m.settles()


def a_joiner_answers_late(sabotage: Sabotage) -> None:
    """It answers a request with the weights that it had before its admission, and its answer comes
    after it."""
    with machine(kind=FOREIGN, unknown_seconds=3.0) as m:
        sabotage(m.patch)
        process = m.processes[0]
        assert m.loop.run_until_complete(process.refit(1)) == "done"
        m.tried = 1
        m.world.answer_seconds = 2.0
        process.start(process.traffic(150, 4), process.sampling)
        m.world.join().load_seconds = 0.02
        m.advance(0.2)
        assert m.loop.run_until_complete(process.admit()) == "done"
        m.settles()


@pytest.mark.parametrize(
    ("story", "sabotage"),
    [
        (another_process_refits, refits_by_others_are_not_asked_for),
        (a_joiner_answers_late, what_it_was_before_it_was_known_counts),
    ],
)
def test_an_answer_of_a_foreign_worker_counts_only_if_it_has_had_the_version_all_the_time(
    story: Callable[[Sabotage], None], sabotage: Sabotage
) -> None:
    story(nothing)
    with pytest.raises(AssertionError, match="stamped"):
        story(sabotage)


def cached_blocks_have_no_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimWorker, "find_key", lambda *_: None)


def failed_workers_are_resumed(patch: pytest.MonkeyPatch) -> None:
    real = WorkerRefit.replace

    async def replace(self: WorkerRefit) -> bool:
        await self.admin.resume(self.worker)
        return await real(self)

    patch.setattr(WorkerRefit, "replace", replace)


def no_label_says_in_doubt(patch: pytest.MonkeyPatch) -> None:
    declare, run_order = SimWorker.declare, SimWorker.refit

    async def refit(self: SimWorker, order: Any, fault: str | None) -> Any:
        return await run_order(self, {**order, "leaving": order["label"]}, fault)

    patch.setattr(SimWorker, "declare", lambda self, label: label >= 0 and declare(self, label))
    patch.setattr(SimWorker, "refit", refit)


def a_failed_pause_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: Any) -> None:
        self.worker.report.state = "restored"

    patch.setattr(foreign._ForeignMove, "restore", restore)


def staged_updates_are_kept(patch: pytest.MonkeyPatch) -> None:
    async def discard(self: WorkerRefit) -> None: ...

    patch.setattr(WorkerRefit, "discard", discard)


def updates_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    load, order = SimUpdate.load, WorkerRefit._send_order

    async def load_twice(self: SimUpdate, admin: Any, worker: Any, label: int) -> None:
        await load(self, admin, worker, label)
        await load(self, admin, worker, label)

    async def order_twice(self: WorkerRefit, mode: Any) -> Any:
        reply = await order(self, mode)
        with suppress(RefitRefused):
            await order(self, mode)
        return reply

    patch.setattr(SimUpdate, "load", load_twice)
    patch.setattr(WorkerRefit, "_send_order", order_twice)


def versions_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetVersions, "claim", lambda *_: None)


def the_gate_stays_shut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetVersions, "open", lambda _: None)


def cut_rollouts_are_returned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "resumes", False)


@pytest.mark.parametrize(
    ("sabotage", "kind", "notices"),
    [
        (the_engine_admits_every_request, MANAGED, "stamped"),
        (an_engine_without_a_label_stamps, MANAGED, "stamped"),
        (every_answer_is_believed, MANAGED, "stamped"),
        (every_answer_is_believed, FOREIGN, "stamped"),
        (every_answer_is_believed, ("foreign", "plain"), "stamped"),
        (cached_blocks_have_no_salt, MANAGED, "KV of"),
        (cached_blocks_have_no_salt, FOREIGN, "KV of"),
        (failed_workers_are_resumed, MANAGED, "failed and then got resume"),
        (failed_workers_are_resumed, FOREIGN, "failed and then got resume"),
        (no_label_says_in_doubt, MANAGED, "left paused"),
        (no_label_says_in_doubt, FOREIGN, "left paused"),
        (a_failed_pause_is_not_undone, FOREIGN, "left paused"),
        (staged_updates_are_kept, MANAGED, "keeps staged weights"),
        (updates_are_sent_again, MANAGED, "2 updates"),
        (updates_are_sent_again, FOREIGN, "2 updates"),
        (versions_go_back, MANAGED, "goes from 6 to w5"),
        (versions_go_back, FOREIGN, "goes from 6 to w5"),
        (the_gate_stays_shut, MANAGED, "shut=True"),
        (cut_rollouts_are_returned, MANAGED, "a rollout that nobody aborted"),
    ],
)
def test_a_missing_protection_is_noticed(
    sabotage: Sabotage, kind: tuple[str, str], notices: str
) -> None:
    with pytest.raises(AssertionError, match=notices):
        run_story(sabotage, kind)


# --- prefill and decode apart -----------------------------------------------------------------


def blocks_are_freed_while_others_fetch_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refit, "_DROPPING", ("", "prefill", "decode"))
    patch.setattr(refit.Refit, "_can_release", lambda *_: True)


def one_pool_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetVersions, "needed_roles", frozenset())


def old_blocks_are_fetched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_fleet, "STALE_SECONDS", float("inf"))


def kv_of_nobody_knows_which_version_is_taken(patch: pytest.MonkeyPatch) -> None:
    real = SimWorker.serve

    async def serve(self: SimWorker, request: Any) -> str:
        if request.source is not None:
            request.computed_for = read_version(request.salt)
        return await real(self, request)

    patch.setattr(SimWorker, "serve", serve)


def run_pools(sabotage: Sabotage) -> None:
    """Run traffic through every mode with prefill and decode apart, let a prefill worker join, and
    stop a decode worker for longer than blocks are held."""
    with machine(kind=("managed", "pools"), count=3, unknown_seconds=0.5) as m:
        sabotage(m.patch)
        process, world = m.processes[0], m.world
        # What waits on the way to a decode worker keeps its prefill worker from changing weights.
        world.stalling = {"prefill": 0.3, "decode": 0.3}
        decoding = next(worker for worker in world.workers.values() if worker.role == "decode")
        for worker in world.workers.values():
            worker.lag, worker.load_seconds, worker.sticky = 0.05, 0.01, True

        async def observe(step: str, worker: Any) -> None:
            current = process.versions.current or 0
            if {w.role for w in world.workers.values() if w.served >= current} == {"prefill"}:
                world.broken(f"version {current} is current with prefill workers only")
            await world.observe(step, worker)

        process.fleet.observer = observe
        for version, mode in enumerate(MODES * 4, 1):
            for sampler in m.processes:
                sampler.start(sampler.traffic(120, 4), sampler.sampling)
            m.advance(0.2)
            outcome = m.loop.run_until_complete(process.refit(version, "", mode))
            m.holds()
            assert outcome == "done", process.trouble
            served = process.versions.current
            assert served == version, f"{served} is current after a refit to {version}"
            m.advance(2.0)
        process.start(process.traffic(100, 4), process.sampling)
        world.join_as("prefill", ready_after=0.4)
        m.advance(3.0)
        process.start(process.traffic(20), process.sampling)
        m.advance(0.05)
        decoding.hang(sim_fleet.LEASE_SECONDS + 10.0)
        m.tried = 12
        m.settles()


def test_prefill_and_decode_never_mix_versions() -> None:
    run_pools(nothing)


@pytest.mark.parametrize(
    ("sabotage", "notices"),
    [
        (the_engine_admits_every_request, "stamped"),
        (kv_of_nobody_knows_which_version_is_taken, "stamped"),
        (one_pool_is_enough, "is current with prefill workers only"),
        (blocks_are_freed_while_others_fetch_them, "blocks that were freed"),
        (old_blocks_are_fetched, "blocks that were freed"),
    ],
)
def test_a_missing_protection_of_two_pools_is_noticed(sabotage: Sabotage, notices: str) -> None:
    with pytest.raises(AssertionError, match=notices):
        run_pools(sabotage)
