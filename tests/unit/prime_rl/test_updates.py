"""Pause, update and resume: which calls change what, and what a repeated one gets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from rollway.errors import RefitError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.directories import BroadcastRules
from rollway.integrations.prime_rl.memory import Memory, hold_alone
from rollway.integrations.prime_rl.updates import WeightUpdates
from tests.unit.prime_rl.fakes import FakeFleet, write_weights


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for number in range(4):
        (write_weights(tmp_path / f"step_{number}", value=number) / "STABLE").touch()
    return tmp_path


def make(fleet: FakeFleet, root: Path, file: Path | None = None, run: str = "r") -> WeightUpdates:
    rules = BroadcastRules([root], root, marker_seconds=0.0)
    return WeightUpdates(cast(Fleet, fleet), rules, Memory(file, run), gate_seconds=0.05)


async def test_steps_become_rising_versions(steps: Path) -> None:
    fleet = FakeFleet()
    updates = make(fleet, steps)
    served = []
    # The first broadcast is step 0; a resumed run comes back to step 1, and once more to it.
    for step in (0, 1, 2, 1, 1):
        updates.pause()
        served.append(await updates.update(f"step_{step}"))
        await updates.resume()
    assert served == [1, 2, 3, 4, 4]  # the same weights keep their version
    assert all(options["mode"] == "in-flight" for _, _, options in fleet.refits)
    assert all(options["allow_cast"] for _, _, options in fleet.refits)


async def test_a_step_that_comes_again_with_other_weights_is_new(
    steps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    updates = make(FakeFleet(), steps)
    updates.pause()
    assert await updates.update("step_1") == 1
    await updates.resume()
    write_weights(steps / "step_1", "model.norm.weight", "lm_head.weight")
    (steps / "step_1" / "STABLE").touch()
    updates.pause()
    assert await updates.update("step_1") == 2
    assert "comes again with other weights" in caplog.text


async def test_an_update_needs_a_pause_and_calls_may_be_repeated(steps: Path) -> None:
    fleet = FakeFleet()
    updates = make(fleet, steps)
    with pytest.raises(Refused, match="without /pause") as refusal:
        await updates.update("step_0")
    assert refusal.value.status == 409
    await updates.resume()  # nobody asked for it: nothing happens
    updates.pause()
    updates.pause()
    fleet.go_on.clear()
    calls = [asyncio.create_task(updates.update("step_0")) for _ in range(3)]
    await fleet.began.wait()
    with pytest.raises(Refused, match="still running"):
        await updates.update("step_1")
    fleet.go_on.set()
    assert await asyncio.gather(*calls) == [1, 1, 1]
    assert await updates.update("step_0") == 1  # its answer got lost
    assert len(fleet.refits) == 1


async def test_a_client_that_hangs_up_does_not_stop_the_update(steps: Path) -> None:
    fleet = FakeFleet()
    updates = make(fleet, steps)
    updates.pause()
    fleet.go_on.clear()
    call = asyncio.create_task(updates.update("step_0"))
    await fleet.began.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    resuming = asyncio.create_task(updates.resume())  # it gave up, and resumes
    await asyncio.sleep(0)  # one turn of the loop
    assert not updates.is_open
    fleet.go_on.set()
    await resuming
    assert updates.is_open and fleet.versions.current == 1


async def test_a_directory_that_was_written_again_is_not_taken_for_a_repeated_call(
    steps: Path,
) -> None:
    """The orchestrator died before /resume; its successor's trainer wrote the step once more."""
    fleet = FakeFleet()
    updates = make(fleet, steps)
    updates.pause()
    assert [await updates.update("step_1") for _ in range(3)] == [1, 1, 1]
    (write_weights(steps / "step_1", value=9) / "STABLE").touch()
    updates.pause()
    assert [await updates.update("step_1") for _ in range(3)] == [2, 2, 2]
    assert len(fleet.refits) == 2


async def test_a_pause_touches_no_worker(steps: Path) -> None:
    """So none can be left paused by a pause that fails half-way."""
    updates = make(cast(FakeFleet, object()), steps)
    updates.pause()
    assert not updates.is_open
    await updates.resume()
    assert updates.is_open


async def test_a_request_waits_at_the_gate_for_a_bounded_time(steps: Path) -> None:
    updates = make(FakeFleet(), steps)
    await updates.wait_open()
    updates.pause()
    with pytest.raises(Refused, match="paused for longer") as refusal:
        await updates.wait_open()
    assert refusal.value.status == 503 and updates.waiting == 0
    updates.gate_seconds = 60.0
    waiting = asyncio.create_task(updates.wait_open())
    await asyncio.sleep(0)  # one turn of the loop
    assert updates.waiting == 1
    await updates.resume()
    await waiting


async def test_a_refused_update_leaves_the_old_weights_in_service(steps: Path) -> None:
    fleet = FakeFleet()
    updates = make(fleet, steps)
    updates.pause()
    with pytest.raises(UsageError, match="is absent, of another user"):
        await updates.update("step_9")
    fleet.fail = UsageError("A worker refused the shapes.")
    with pytest.raises(UsageError, match="shapes"):
        await updates.update("step_0")
    await updates.resume()
    assert updates.is_open and updates.failures == 2


async def test_a_failed_update_stays_paused_until_one_succeeds(steps: Path) -> None:
    fleet = FakeFleet()
    updates = make(fleet, steps)
    updates.pause()
    fleet.fail = RefitError("worker 7 is in doubt.")
    with pytest.raises(Refused, match="worker 7") as refusal:
        await updates.update("step_0")
    assert refusal.value.status == 503  # prime-rl repeats it
    with pytest.raises(Refused, match="worker 7") as refusal:
        await updates.resume()
    assert refusal.value.status == 409 and not updates.is_open
    fleet.fail = UsageError("refused")
    with pytest.raises(UsageError):
        await updates.update("step_1")
    with pytest.raises(Refused, match="worker 7"):
        await updates.resume()
    fleet.fail = None
    await updates.update("step_0")
    await updates.resume()
    assert updates.is_open and updates.failures == 2


async def test_a_successor_of_a_killed_server_goes_on(steps: Path, tmp_path: Path) -> None:
    file = tmp_path / "home" / "state.json"
    fleet = FakeFleet()
    make(fleet, steps, file).pause()
    paused = make(fleet, steps, file)
    assert not paused.is_open
    fleet.go_on.clear()
    dying = asyncio.create_task(paused.update("step_0"))
    await fleet.began.wait()
    await paused.close()  # as far as a file can tell, this is a kill
    await asyncio.gather(dying, return_exceptions=True)
    successor = make(fleet, steps, file)
    with pytest.raises(Refused, match="ended during the update to step 0"):
        await successor.resume()
    fleet.go_on.set()
    await successor.update("step_0")
    await successor.resume()
    assert make(fleet, steps, file).is_open
    successor.pause()
    assert make(fleet, steps, file, run="another stack").is_open


def test_two_servers_of_one_model_are_refused(tmp_path: Path) -> None:
    with (
        hold_alone(tmp_path / "a.json"),
        hold_alone(tmp_path / "b.json"),
        pytest.raises(UsageError, match="Another server"),
        hold_alone(tmp_path / "a.json"),
    ):
        pass
    with hold_alone(tmp_path / "a.json"):
        pass


def test_a_failed_broadcaster_is_the_answer_of_the_next_pause_once(tmp_path: Path) -> None:
    async def run() -> None:
        updates = make(FakeFleet(), tmp_path)
        updates.broadcaster_failure = "no nccl here"
        with pytest.raises(Refused, match="no nccl here"):
            updates.pause()
        updates.pause()

    asyncio.run(run())
