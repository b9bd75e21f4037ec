"""Workers that sleep serve nothing, and come back with the version that they had or were given.

The fleet is real, the workers are simulated (sim_fleet.py), as in test_refit_machine.py, whose
machine also sleeps and wakes between all other events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollway.engine.guard import EngineOrders
from rollway.errors import AdminError, RolloutError, UsageError
from rollway.fleet.admin import IN_DOUBT, StillAsleep, leaving_label
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import SleepReport
from rollway.fleet.workers import StaticList
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.signed_calls import SECRET
from rollway.versions import taint_of
from tests.checkpoints import write_checkpoint
from tests.light.engine import Engine, Pause
from tests.light.routes import AdminRoutes
from tests.light.weights import LightWorker
from tests.stack.policies import perturbed
from tests.unit.fleet.refit_machine import RefitMachine, machine
from tests.unit.fleet.sim_fleet import SimUpdate, SimWorker

BOTH = {"weights", "kv_cache"}


def state_of(worker: SimWorker) -> tuple[Any, ...]:
    return worker.label, worker.taints, worker.sleep_level, worker.paused


def touching_calls(m: RefitMachine, since: int) -> list[str]:
    routes = ("sleep", "wake", "declare", "taint", "pause", "resume", "update", "refit")
    return [call.route for call in m.world.log[since:] if call.route in routes]


def refit(m: RefitMachine, version: int, **options: Any) -> str:
    m.tried = max(m.tried, version)
    return m.loop.run_until_complete(m.processes[0].refit(version, **options))


def test_level_1_returns_with_its_version_and_without_its_cache() -> None:
    with machine() as m:
        run, fleet = m.loop.run_until_complete, m.processes[0].fleet
        assert refit(m, 1) == "done"
        run(m.processes[0].sample(8))
        workers = list(m.world.workers.values())
        report: SleepReport = run(fleet.sleep())
        assert [state_of(w) for w in workers] == [(leaving_label(1), (), 1, True)] * 2
        assert all(w.sleeping == BOTH and w.cache == {} for w in workers)
        assert report.asleep == 2 and report.released_bytes == 2 * 90
        assert all(w.version == 1 and set(w.memory) == {"before", "asleep"} for w in report.workers)
        woken: SleepReport = run(fleet.wake())
        assert [state_of(w) for w in workers] == [(1, (taint_of(1),), 0, False)] * 2
        assert woken.asleep == 0 and [w.state for w in woken.workers] == ["serving"] * 2
        assert all(set(w.memory) == {"asleep", "after"} for w in woken.workers)
        m.time_passes(1.0)
        (rollout,) = run(m.processes[0].rollouts.generate([1], Sampling(max_tokens=3)))
        assert rollout.weight_version == 1
        m.settles()


@pytest.mark.parametrize("level", [1, 2])
def test_a_refit_wakes_workers_by_the_same_two_calls(level: int) -> None:
    """tests/unit/engine/test_guard.py has the order in which memory comes back."""
    with machine(count=1) as m:
        fleet, (worker,) = m.processes[0].fleet, m.world.workers.values()
        m.loop.run_until_complete(fleet.sleep(level))
        began = len(m.world.log)
        update = SimUpdate(Path("/weights/w1"))
        report = m.loop.run_until_complete(fleet.refit(1, update))
        assert [call.route for call in m.world.log[began:]] == ["check", "refit"]
        assert state_of(worker) == (1, (taint_of(1),), 0, False) and worker.weights == "w1"
        assert report.workers[0].memory.keys() == {"asleep", "after"}
        assert "wake.kv_cache" in report.workers[0].steps
        m.tried = 1
        m.settles()


def test_level_2_needs_a_refit_and_a_wake_says_so() -> None:
    with machine() as m:
        run, fleet = m.loop.run_until_complete, m.processes[0].fleet
        run(fleet.sleep(level=2))
        report: SleepReport = run(fleet.wake())
        assert [(w.state, w.level, w.version) for w in report.workers] == [("asleep", 2, None)] * 2
        assert all(w.sleeping == BOTH for w in m.world.workers.values())
        m.settles()


@pytest.mark.parametrize("level", [1, 2])
def test_rollouts_wait_for_their_patience_and_are_told_to_wake(level: int) -> None:
    with machine() as m:
        run, process = m.loop.run_until_complete, m.processes[0]
        run(process.fleet.sleep(level))
        for rollouts in (process.rollouts, m.processes[1].rollouts):  # also another process
            with pytest.raises(RolloutError, match="2 workers sleep") as caught:
                run(rollouts.generate([1], Sampling(max_tokens=3)))
            assert "rollway fleet wake" in caught.value.hint
        with pytest.raises(AdminError, match="2 of 2 workers sleep") as error:
            run(process.fleet.resume())
        assert "Wake them" in error.value.hint
        m.settles()


def test_a_rollout_that_a_sleep_cuts_continues_after_the_wake() -> None:
    with machine(count=1) as m:
        run, process, (worker,) = (
            m.loop.run_until_complete,
            m.processes[0],
            m.world.workers.values(),
        )
        worker.load_seconds = 0.02
        work = process.rollouts.generate([1, 2], Sampling(max_tokens=100))
        sampling = m.loop.create_task(work)
        m.time_passes(1.0)
        run(process.fleet.sleep(level=1, mode="abort"))
        m.time_passes(1.0)
        assert not sampling.done()
        run(process.fleet.wake())
        (rollout,) = run(sampling)
        assert len(rollout.token_ids) == 100 and {s.version for s in rollout.spans} == {0}
        process._check_rollout(rollout)
        m.settles()


def test_a_sleep_that_waits_lets_running_requests_finish() -> None:
    with machine(count=1) as m:
        process = m.processes[0]
        sampling = m.loop.create_task(process.rollouts.generate([1], Sampling(max_tokens=100)))
        m.time_passes(0.5)
        m.loop.run_until_complete(process.fleet.sleep())
        m.time_passes(0.1)
        (rollout,) = sampling.result()
        assert len(rollout.token_ids) == 100
        m.settles()


def test_a_process_that_comes_later_learns_the_version_of_workers_that_sleep() -> None:
    with machine() as m:
        run = m.loop.run_until_complete
        assert refit(m, 1) == "done" and refit(m, 2) == "done"
        run(m.processes[0].fleet.sleep())
        m._crash(m.processes[0])
        m.time_passes(1.0)
        later = m.processes[0]
        with pytest.raises(RolloutError, match="no other serves version 2"):
            run(later.rollouts.generate([1], Sampling(max_tokens=3)))
        assert run(later.refit(1)) == "refused" and "older than 2" in later.trouble
        m.settles()


def test_engines_without_sleep_mode_are_refused_before_anything_changes() -> None:
    with machine() as m:
        m.world.sleep_mode = False
        began = len(m.world.log)
        with pytest.raises(UsageError, match="cannot sleep at level 2: no sleep mode"):
            m.loop.run_until_complete(m.processes[0].fleet.sleep(level=2))
        assert touching_calls(m, began) == []
        m.settles()


@pytest.mark.parametrize(("level", "mode"), [(0, "wait"), (3, "wait"), (1, "keep"), (1, "soon")])
def test_wrong_arguments_are_refused(level: int, mode: Any) -> None:
    with machine() as m:
        with pytest.raises(UsageError, match="cannot sleep with level"):
            m.loop.run_until_complete(m.processes[0].fleet.sleep(level, mode))
        m.settles()


def test_workers_without_a_version_are_refused() -> None:
    with machine(kind=("managed", "attached")) as m:
        with pytest.raises(UsageError, match="declares no version"):
            m.loop.run_until_complete(m.processes[0].fleet.sleep())
        m.settles()


def test_a_second_sleep_changes_nothing_and_another_level_is_refused() -> None:
    with machine() as m:
        run, fleet = m.loop.run_until_complete, m.processes[1].fleet
        run(m.processes[0].fleet.sleep(level=1))
        began = len(m.world.log)
        report = run(fleet.sleep(level=1))
        assert [(w.state, w.version) for w in report.workers] == [("asleep", 0)] * 2
        with pytest.raises(UsageError, match="sleeps at level 1 already"):
            run(fleet.sleep(level=2))
        assert touching_calls(m, began) == []
        m.settles()


def test_a_wake_of_workers_that_are_awake_changes_nothing() -> None:
    with machine() as m:
        began, workers = len(m.world.log), list(m.world.workers.values())
        before = [state_of(worker) for worker in workers]
        report = m.loop.run_until_complete(m.processes[0].fleet.wake())
        assert [(w.state, w.version) for w in report.workers] == [("awake", 0)] * 2
        assert touching_calls(m, began) == ["wake"] * 2  # an order to sleep may still be running
        assert [state_of(worker) for worker in workers] == before
        m.settles()


def test_a_sleep_waits_for_a_refit_also_of_another_process() -> None:
    with machine() as m:
        refitting = m.loop.create_task(m.processes[1].refit(1))
        m.time_passes(0.01)
        m.loop.run_until_complete(m.processes[0].fleet.sleep())
        assert refitting.result() == "done"
        assert [w.label for w in m.world.workers.values()] == [leaving_label(1)] * 2
        m.tried = 1
        m.settles()


@pytest.mark.parametrize("ends", ["cancel", "crash"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_ends_at_any_call_leaves_nothing_that_cannot_be_repaired(
    level: int, ends: str
) -> None:
    for calls in range(1, 14):
        with machine() as m:
            m.samples(0, 40, 8)
            m.time_passes(0.1)
            m.sleeps(0, level=level, fuse=(calls, ends), seconds=5.0)
            m.samples(1, 5, 8)
            if ends == "cancel" and level == 1:
                m.time_passes(1.0)
                labels = {w.label for w in m.world.workers.values()}
                assert labels in ({0}, {leaving_label(0)}), calls
            m.settles()


@pytest.mark.parametrize("ends", ["cancel", "crash"])
def test_a_wake_that_ends_at_any_call_leaves_nothing_that_cannot_be_repaired(ends: str) -> None:
    for calls in range(1, 14):
        with machine() as m:
            m.sleeps(0)
            m.wakes(0, fuse=(calls, ends))
            m.samples(1, 5, 8)
            labels = {w.label for w in m.world.workers.values()}
            assert labels <= {0, leaving_label(0)}, calls  # each worker has woken, or it sleeps
            m.wakes(1)
            assert {w.label for w in m.world.workers.values()} == {0}, calls
            m.settles()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("ends", ["cancel", "crash"])
def test_a_refit_of_sleeping_workers_that_ends_at_any_call_is_repaired(
    level: int, ends: str
) -> None:
    for calls in range(1, 40, 2):
        with machine() as m:
            m.sleeps(0, level=level)
            m.refits(0, fuse=(calls, ends), seconds=20.0)
            m.samples(1, 5, 8)
            m.wakes(1)
            m.settles()


def test_if_one_worker_fails_the_others_are_woken() -> None:
    with machine() as m:
        m.world.faults["sleep", 2] = "refuse"
        with pytest.raises(AdminError, match="refuses"):
            m.loop.run_until_complete(m.processes[0].fleet.sleep())
        workers = m.world.workers.values()
        assert [state_of(w) for w in workers] == [(0, (taint_of(0),), 0, False)] * 2
        m.settles()


def test_a_worker_that_joins_while_others_sleep_is_left_alone_until_they_wake() -> None:
    with machine() as m:
        run, process = m.loop.run_until_complete, m.processes[0]
        assert refit(m, 1) == "done"
        run(process.fleet.sleep())
        joiner = m.world.join(ready_after=20.0)  # its launcher has not labelled it
        m.time_passes(6.0)
        report = run(process.fleet.sleep())
        assert sorted(w.state for w in report.workers) == ["asleep", "asleep", "joining"]
        m.time_passes(40.0)
        assert run(process.admit()) == "done" and joiner.label == 0  # version 1 is current
        run(process.fleet.wake())
        assert run(process.admit()) == "done" and joiner.label == 1
        m.settles()


def test_a_worker_that_is_killed_asleep_comes_back_awake_and_is_moved_after_the_wake() -> None:
    with machine() as m:
        run, process = m.loop.run_until_complete, m.processes[0]
        assert refit(m, 1) == "done"
        run(process.fleet.sleep())
        m.world.workers[1].die()
        successor = m.world.join(ready_after=1.0)
        m.time_passes(40.0)
        run(process.admit())
        assert successor.label == 0
        report = run(process.fleet.wake())
        assert sorted(w.state for w in report.workers) == ["awake", "serving"]
        run(process.admit())
        assert successor.label == 1 == m.world.workers[2].label
        m.settles()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("weights", ["unfit", "bad"])
def test_after_a_refused_refit_workers_sleep_as_before(level: int, weights: str) -> None:
    with machine() as m:
        run, process = m.loop.run_until_complete, m.processes[0]
        run(process.fleet.sleep(level))
        assert refit(m, 1, weights=weights) == "refused"
        for worker in m.world.workers.values():
            assert state_of(worker) == (leaving_label(0), (), level, True)
            assert worker.sleeping == BOTH and worker.staged is None
        run(process.fleet.wake())
        assert {w.label for w in m.world.workers.values()} == ({0} if level == 1 else {-3})
        m.settles()


def test_weights_that_may_be_half_written_are_not_restored_by_a_wake() -> None:
    with machine(count=1) as m:
        run, process, (worker,) = (
            m.loop.run_until_complete,
            m.processes[0],
            m.world.workers.values(),
        )
        run(process.fleet.sleep(level=1))
        m.world.faults["refit", 1] = "half"
        assert refit(m, 1) == "failed"
        assert worker.label == IN_DOUBT and worker.sleeping == BOTH
        report = run(process.fleet.wake())
        assert [(w.state, w.version) for w in report.workers] == [("asleep", None)]
        assert worker.label == IN_DOUBT
        m.settles()


def test_a_cache_that_does_not_fit_fails_the_refit_and_the_worker_is_not_restarted() -> None:
    with machine(count=1, replacing=True) as m:
        process, (worker,) = m.processes[0], m.world.workers.values()
        m.loop.run_until_complete(process.fleet.sleep(level=2))
        real = worker.wake_memory

        async def wake_memory() -> None:
            raise StillAsleep("CUDA error: out of memory.")

        worker.wake_memory = wake_memory  # type: ignore[method-assign]
        assert refit(m, 1) == "failed" and "out of memory" in process.trouble
        assert worker.alive and worker.label is not None and worker.label < 0
        assert worker.sleeping == BOTH and worker.taints == ()
        worker.wake_memory = real  # type: ignore[method-assign]
        assert refit(m, 2) == "done"
        m.settles()


# --- the same checks, with one protection switched off ---------------------------------------


def test_a_wake_after_a_half_written_update_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = SimWorker.load

    async def keep_and_load(self: SimWorker, *arguments: Any) -> None:
        self.kept = 0
        await load(self, *arguments)

    monkeypatch.setattr(SimWorker, "load", keep_and_load)
    with pytest.raises(AssertionError, match="stamped 0"), machine(count=1) as m:
        m.sleeps(0)
        m.world.faults["refit", 1] = "half"
        assert refit(m, 1) == "failed"
        m.loop.run_until_complete(m.processes[0].fleet.wake())
        m.samples(0, 5, 8)
        m.time_passes(5.0)
        m.holds()


# --- over HTTP, on a light worker with the guard's orders --------------------------------------


def add_orders(engine: Engine) -> tuple[dict[str, Any], list[Any]]:
    """Return the routes of a light worker with those that the guard adds, and the taints that it
    gets."""
    orders, taints = EngineOrders(), []

    async def set_taints(body: dict[str, Any]) -> dict[str, Any]:
        taints.append(body["taints"])
        return {"status": "ok"}

    own = {**AdminRoutes(engine).table(), "update/model_taints": set_taints}
    routes = {name: orders.wrap(name, handler) for name, handler in own.items()}
    return routes | orders.list_own(), taints


@asynccontextmanager
async def serve(routes: dict[str, Any]) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        route = routes.get(request.match_info["route"])
        if route is None:
            return web.Response(status=404, text="{}")
        return web.json_response(await route(await request.json()))

    app = web.Application()
    app.router.add_post("/engine/{route:.+}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_the_same_orders_over_http(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "a secret")
    engine = Engine(LightWorker(base_model))
    routes, taints = add_orders(engine)
    checkpoint = perturbed(base_model, tmp_path / "other", seed=1)
    async with serve(routes) as url, Http() as http:
        fleet = Fleet(http, StaticList((url,), "m"))
        (worker,) = await fleet.workers()
        await fleet.admin.declare_version(worker, 0)
        report = await fleet.sleep()
        assert report.released_bytes == 2 * 10**9 and [w.version for w in report.workers] == [0]
        assert engine.pause_state is not Pause.NONE
        assert (await fleet.admin.read(worker)).label == leaving_label(0)
        with pytest.raises(AdminError, match="it sleeps"):
            await fleet.admin.resume(worker)
        assert [w.state for w in (await fleet.wake()).workers] == ["serving"]
        assert engine.pause_state is Pause.NONE
        await fleet.sleep(level=2)
        assert not engine.worker.usable
        with pytest.raises(AdminError, match="it sleeps"):
            await fleet.admin.update_from_disk(worker, checkpoint, 1)
        with pytest.raises(UsageError):
            await fleet.refit(1, tmp_path / "nowhere")
        assert (await fleet.wake()).asleep == 1
        refit = await fleet.refit(1, checkpoint)
        assert [(w.state, w.proof) for w in refit.workers] == [("serving", "parameters")]
        assert set(refit.workers[0].memory) == {"asleep", "after"}
        assert {"wake.weights", "wake.kv_cache"} <= refit.workers[0].steps.keys()
        assert engine.worker.usable and engine.pause_state is Pause.NONE and engine.label == 1
        facts = await fleet.admin.read(worker)
        assert (facts.label, facts.sleep_level, facts.enforces) == (1, 0, True)
        assert taints == [[], ["rollway-v0"], [], [], ["rollway-v1"]]


async def test_after_a_refused_refit_a_worker_sleeps_again_over_http(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "a secret")
    engine = Engine(LightWorker(base_model))
    routes, _ = add_orders(engine)
    unfit = write_checkpoint(tmp_path / "unfit")
    async with serve(routes) as url, Http() as http:
        fleet = Fleet(http, StaticList((url,), "m"))
        (worker,) = await fleet.workers()
        await fleet.admin.declare_version(worker, 0)
        before = (await fleet.sleep()).released_bytes
        with pytest.raises(UsageError):
            await fleet.refit(1, unfit)
        (rank,) = await fleet.admin.memory(worker)
        assert sum(rank["asleep_bytes"].values()) == before
        assert (await fleet.admin.read(worker)).label == leaving_label(0)
        assert [(w.state, w.version) for w in (await fleet.wake()).workers] == [("serving", 0)]


async def test_workers_without_rollways_orders_cannot_sleep(base_model: Path) -> None:
    routes = AdminRoutes(Engine(LightWorker(base_model))).table()
    async with serve(routes) as url, Http() as http:
        fleet = Fleet(http, StaticList((url,), "m"))
        (worker,) = await fleet.workers()
        await fleet.admin.declare_version(worker, 0)
        with pytest.raises(UsageError, match="cannot sleep") as caught:
            await fleet.sleep()
        assert "Start the workers by Rollway" in caught.value.hint
