"""Admin calls and refits when foreign workers misbehave (scripted, see fake_fleet.py).

They take no orders: each is moved by single calls."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollway.errors import (
    AdminError,
    NoWorkers,
    RefitError,
    RolloutError,
    Unreachable,
    UsageError,
)
from rollway.fleet import worker_refit
from rollway.fleet.admin import leaving_label
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.rollout.client import Rollouts
from rollway.spec import AdminTimeouts
from tests.checkpoints import write_checkpoint
from tests.unit.fleet.fake_fleet import FakeWorker, fake_fleet
from tests.waiting import wait_until_async

BIG = 2**64 - 59


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


async def test_instance_ids_are_exact_and_failures_listed() -> None:
    broken = FakeWorker(2, error="DeadlineExceeded")
    async with fake_fleet(FakeWorker(BIG), broken) as url, Http() as http:
        workers = await Fleet(http, url).workers()
        assert [worker.instance_id for worker in workers] == [2, BIG]
        assert workers[0].error == "DeadlineExceeded"
        with pytest.raises(AdminError, match=r"1 of 2 workers do not answer.*DeadlineExceeded"):
            await Fleet(http, url).resume()


async def test_no_listing_and_no_workers_are_different_errors() -> None:
    async with Http() as http:
        with pytest.raises(Unreachable, match="DYN_RL_PORT"):
            await Fleet(http, "http://127.0.0.1:9").workers()
        async with fake_fleet() as url:
            with pytest.raises(NoWorkers):
                await Fleet(http, url).pause()


async def test_a_refit_moves_every_worker(checkpoint: Path) -> None:
    workers = [FakeWorker(1), FakeWorker(2)]
    async with fake_fleet(*workers) as url, Http() as http:
        fleet = Fleet(http, url)
        report = await fleet.refit(7, checkpoint)
        assert fleet.versions.current == 7
        assert fleet.versions.by_worker == {1: 7, 2: 7}
        assert not fleet.versions.is_closed
    assert [worker.state for worker in report.workers] == ["serving", "serving"]
    for worker in workers:
        assert worker.calls == [
            "get_weight_version",
            "get_weight_version", "set_weight_version", "update/model_taints",
            "pause_generation", "pause_generation",  # in mode wait, then what has not begun
            "update_weights_from_disk", "flush_cache", "get_weight_version",
            "pause_generation", "update/model_taints", "resume_generation", "set_weight_version",
        ]  # fmt: skip
        assert worker.taints == ["rollway-v7"]


async def test_the_report_says_how_long_each_step_of_a_worker_took(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only the steps advance, so that the times are exact."""
    times = {"preflight": 8.0, "pause": 4.0, "update": 2.0, "resume": 1.0}
    now = 100.0
    monkeypatch.setattr(worker_refit, "time", SimpleNamespace(monotonic=lambda: now))

    async def advance(step: str, worker: Worker) -> None:
        nonlocal now
        now += times.get(step, 0.0)

    async with fake_fleet(FakeWorker(1)) as url, Http() as http:
        fleet = Fleet(http, url)
        fleet.observer = advance
        report = await fleet.refit(7, checkpoint)
    [worker] = report.as_json()["workers"]
    assert {step: worker[f"{step}_seconds"] for step in times} == times


async def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_served(checkpoint: Path) -> None:
    """It was not published with digests, so only its files' times show the change."""
    weights = checkpoint / "model.safetensors"

    async def damage(step: str, worker: Worker) -> None:
        if step == "update":
            data = bytearray(weights.read_bytes())
            data[-4:] = b"junk"
            weights.write_bytes(data)

    async with fake_fleet(FakeWorker(1)) as url, Http() as http:
        fleet = Fleet(http, url)
        fleet.observer = damage
        with pytest.raises(RefitError, match="changed while") as failure:
            await fleet.refit(7, checkpoint)
        assert [w.state for w in failure.value.report.workers] == ["in doubt"]


async def test_a_joining_worker_does_not_load_a_checkpoint_that_was_changed(
    checkpoint: Path,
) -> None:
    first, second = FakeWorker(1), FakeWorker(2)
    workers = [first]
    async with fake_fleet(*workers) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.refit(7, checkpoint)
        os.utime(checkpoint / "model.safetensors")
        first.version = 0  # as if it had restarted
        with pytest.raises(UsageError, match="names other weights"):
            await fleet.admit()
        assert second.version == 0 and first.version == 0


async def test_status_error_under_200_is_an_error() -> None:
    async with fake_fleet(FakeWorker(1, fail={"flush_cache": "no"})) as url, Http() as http:
        with pytest.raises(AdminError, match="refused `flush_cache`: no"):
            await Fleet(http, url).flush_cache()


async def test_a_failed_pause_undoes_the_others(checkpoint: Path) -> None:
    good, bad = FakeWorker(1), FakeWorker(2, fail={"pause_generation": "engine is busy"})
    async with fake_fleet(good, bad) as url, Http() as http:
        fleet = Fleet(http, url)
        with pytest.raises(RefitError, match="engine is busy") as failure:
            await fleet.refit(7, checkpoint)
        assert not fleet.versions.is_closed
        assert fleet.versions.current is None
        assert {w.state for w in failure.value.report.workers} == {"restored"}
    assert good.taints == ["rollway-v0"]
    assert not good.paused and good.version == 0
    assert "update_weights_from_disk" not in good.calls + bad.calls


async def test_an_update_is_sent_once_and_its_worker_stays_paused(checkpoint: Path) -> None:
    good, bad = FakeWorker(1), FakeWorker(2, fail={"update_weights_from_disk": 500})
    async with fake_fleet(good, bad) as url, Http() as http:
        fleet = Fleet(http, url)
        with pytest.raises(RefitError, match="worker 2: in doubt") as failure:
            await fleet.refit(7, checkpoint)
        assert fleet.versions.by_worker == {1: 7}
        assert fleet.versions.current == 7  # the good one serves it
        with pytest.raises(AdminError, match="left between two versions"):
            await fleet.resume()
    assert bad.calls.count("update_weights_from_disk") == 1
    assert bad.paused and "resume_generation" not in bad.calls
    assert bad.taints == []  # the router sends it nothing that asks for a version
    assert not good.paused
    assert bad.version == leaving_label(0)
    assert [worker.state for worker in failure.value.report.workers] == ["serving", "in doubt"]


async def test_a_cancelled_refit_marks_only_verified_workers_as_serving(checkpoint: Path) -> None:
    quick, slow = FakeWorker(1), FakeWorker(2, fail={"update_weights_from_disk": 1.0})
    async with fake_fleet(quick, slow) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.read_versions()
        task = asyncio.create_task(fleet.refit(7, checkpoint))
        await wait_until_async(lambda: fleet.versions.by_worker.get(1) == 7)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.versions.by_worker == {1: 7}
        assert fleet.versions.current == 7
        assert not fleet.versions.is_closed and not fleet.versions.changing
    assert slow.paused and slow.version == leaving_label(0) and slow.taints == []


async def test_a_rollout_is_refused_when_no_worker_serves_its_version(checkpoint: Path) -> None:
    only = FakeWorker(1, fail={"update_weights_from_disk": 500})
    async with fake_fleet(only) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.read_versions()
        with pytest.raises(RefitError):
            await fleet.refit(7, checkpoint)
        rollouts = Rollouts(http, url, "tiny", fleet.versions, refresh=fleet.refresh, patience=0.3)
        with pytest.raises(RolloutError, match="No worker is known to serve weight version 0"):
            await rollouts.generate([1])


async def test_a_refit_cancelled_while_pausing_changes_nothing(checkpoint: Path) -> None:
    quick, slow = FakeWorker(1), FakeWorker(2, fail={"pause_generation": 2.0})
    async with fake_fleet(quick, slow) as url, Http() as http:
        fleet = Fleet(http, url)
        task = asyncio.create_task(fleet.refit(7, checkpoint))
        await wait_until_async(lambda: quick.paused)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not fleet.versions.is_closed
    assert not quick.paused
    assert "resume_generation" in slow.calls  # its pause may have been on its way


async def test_of_two_refits_at_once_the_older_version_does_not_win(checkpoint: Path) -> None:
    worker = FakeWorker(1, fail={"update_weights_from_disk": 0.1})
    async with fake_fleet(worker) as url, Http() as http:
        fleet = Fleet(http, url)
        results = await asyncio.gather(
            fleet.refit(6, checkpoint), fleet.refit(5, checkpoint), return_exceptions=True
        )
    assert isinstance(results[1], UsageError)
    assert worker.version == 6


async def test_an_update_that_succeeds_without_an_effect_is_noticed(checkpoint: Path) -> None:
    async with fake_fleet(FakeWorker(1, ignores_updates=True)) as url, Http() as http:
        with pytest.raises(RefitError, match="has not applied the update"):
            await Fleet(http, url).refit(7, checkpoint)


async def test_calls_that_are_safe_to_repeat_are_retried() -> None:
    worker = FakeWorker(1, fail={"resume_generation": [503, 500]})
    async with fake_fleet(worker) as url, Http() as http:
        await Fleet(http, url).resume()
    assert worker.calls.count("resume_generation") == 3


async def test_a_call_to_a_hung_worker_times_out() -> None:
    worker = FakeWorker(1, fail={"flush_cache": 2.0})
    async with fake_fleet(worker) as url, Http() as http:
        fleet = Fleet(http, url, timeouts=AdminTimeouts(probe=0.1))
        with pytest.raises(AdminError, match=r"no answer within 0\.1 s"):
            await fleet.flush_cache()


async def test_a_worker_without_the_route_is_named() -> None:
    async with fake_fleet(FakeWorker(1, routes=[])) as url, Http() as http:
        with pytest.raises(AdminError, match="does not offer pause_generation"):
            await Fleet(http, url).resume()


async def test_versions_only_go_up(checkpoint: Path) -> None:
    worker = FakeWorker(1)
    async with fake_fleet(worker) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.refit(7, checkpoint)
        with pytest.raises(UsageError, match="older than 7"):
            await fleet.refit(6, checkpoint)
        other = write_checkpoint(checkpoint.parent / "other", 2.0)
        with pytest.raises(UsageError, match="7 already names other weights"):
            await fleet.refit(7, other)
        updates = worker.calls.count("update_weights_from_disk")
        again = await fleet.refit(7, checkpoint)  # the same weights: nothing to do
        assert [state.proof for state in again.workers] == ["earlier refit"]
    assert worker.calls.count("update_weights_from_disk") == updates == 1


async def test_a_bad_checkpoint_touches_no_worker(tmp_path: Path) -> None:
    worker = FakeWorker(1)
    async with fake_fleet(worker) as url, Http() as http:
        with pytest.raises(UsageError, match=r"no config\.json"):
            await Fleet(http, url).refit(1, tmp_path)
    assert worker.calls == []


async def test_the_newest_declared_version_is_the_current_one() -> None:
    async with (
        fake_fleet(FakeWorker(1, version=4), FakeWorker(2, version=4)) as url,
        Http() as http,
    ):
        fleet = Fleet(http, url)
        assert await fleet.read_versions() == {1: 4, 2: 4}
        assert fleet.versions.current == 4
    undeclared = FakeWorker(2, version=None)
    async with fake_fleet(FakeWorker(1, version=4), undeclared) as url, Http() as http:
        fleet = Fleet(http, url)
        assert await fleet.read_versions() == {1: 4, 2: None}
        assert fleet.versions.current == 4
        assert fleet.versions.by_worker == {1: 4}
    base, hung = FakeWorker(2, version=0), FakeWorker(3, error="DeadlineExceeded")
    async with fake_fleet(FakeWorker(1, version=5), base, hung) as url, Http() as http:
        fleet = Fleet(http, url)
        assert await fleet.read_versions() == {1: 5, 2: 0, 3: None}
        assert fleet.versions.current == 5
