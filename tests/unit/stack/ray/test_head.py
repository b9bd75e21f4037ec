"""The life of a run on Ray: whatever dies, and whenever, nothing is left of it."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError

from rollway.stack.ray import healing
from tests.unit.stack.ray.stand_in import StandIn, node_id
from tests.waiting import settle, wait_until_async

STEPS = [
    *("keeper on node 0", "keeper on node 1"),
    *("group services", "group m-0", "group m-1", "group m-2", "group m-3"),
    *("part 0 on node 0", "part 1 on node 1"),
]


async def test_a_run_starts_in_order_and_stops_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()
    assert await run.head.wait_until_ready.remote() is None
    assert ray.steps == STEPS
    assert len(ray.groups) == 5 and len(ray.running) == 2
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


@pytest.mark.parametrize("step", range(len(STEPS)))
async def test_an_owner_that_dies_at_any_step_of_the_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()
    ray.at_step = lambda what: run.witness.die() if what == STEPS[step] else None
    await run.wait_until_over()
    assert ray.steps[step] == STEPS[step]
    assert ray.left() == {}


async def test_a_detached_run_outlives_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    await run.head.detach.remote()
    run.witness.die()
    assert (await run.head.identify.remote())["phase"] == "ready"
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


async def test_a_part_that_does_not_start_takes_all_down_and_names_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()

    def fail(what: str) -> None:
        if what == "group m-3":
            ray.keeper(1).object.failure = "the engine exited"

    ray.at_step = fail
    error = await run.head.wait_until_ready.remote()
    assert error["message"] == "On node 10.0.0.2 (11111111): the engine exited"
    await run.wait_until_over()
    assert ray.left() == {}


async def test_a_killed_keeper_is_followed_by_another_on_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    groups = set(ray.groups)
    ray.kill(ray.keeper(1))
    await wait_until_async(lambda: len(ray.running) == 2)
    assert ray.steps[-2:] == ["keeper on node 1", "part 2 on node 1"]
    assert set(ray.groups) == groups  # its resources were held all the time
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


async def test_a_part_that_ends_is_healed_by_the_keeper_that_runs_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a failed look at the node nor a broken connection is a reason to kill it."""
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    keeper, answers = ray.keeper(1), iter([ActorUnavailableError("connection reset", None)])

    async def read_states() -> list[object]:
        for error in answers:
            raise error
        return []

    monkeypatch.setattr(keeper.object, "read_states", read_states)
    ray.problems[node_id(1)] = "Dynamo is not installed.", "Install it."
    (ended,) = (name for name, k in ray.running.items() if k is keeper)
    await keeper.object.stop_part(ended)
    await wait_until_async(lambda: len(ray.running) == 2)
    assert ray.keeper(1) is keeper
    assert ray.steps[len(STEPS) :] == ["part 2 on node 1"]
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


async def test_a_keeper_that_no_longer_answers_is_ended_before_another_takes_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its other parts would keep their GPUs, and nobody would know of them."""
    monkeypatch.setattr(healing, "NODE_SECONDS", 0.2)
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    keeper = ray.keeper(1)
    monkeypatch.setattr(keeper.object, "read_states", asyncio.Event().wait)
    (ended,) = (name for name, k in ray.running.items() if k is keeper)
    await keeper.object.stop_part(ended)
    await wait_until_async(lambda: keeper.is_dead)
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


async def test_an_interrupted_network_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the owner and of a Keeper: Ray says `unavailable` before it knows that an actor died."""
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    over = run.head.wait_until_over.remote()
    run.witness.interrupt()
    ray.keeper(1).interrupt()
    await settle()
    assert ray.steps == STEPS and not over.done()
    assert run.read_events() == ["ready"]
    run.witness.die()
    assert "process that owns the stack has ended" in (await over)["message"]
    await run.wait_until_over()
    assert ray.left() == {}


async def test_a_node_that_is_too_new_for_an_actor_gets_one_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    ray.lose(1)
    ray.unknown.add(node_id(2))
    ray.nodes[node_id(2)] = "10.0.0.3"
    await wait_until_async(lambda: ray.steps.count("keeper on node 2") >= 2)
    ray.unknown.clear()
    await wait_until_async(lambda: len(ray.running) == 2)
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


async def test_replicas_of_a_lost_node_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    ray.lose(1)
    await wait_until_async(lambda: bool(run.head.object._healing.waiting))
    assert len(run.head.object._healing.waiting) == 2
    assert len(ray.running) == 1  # the rest goes on
    ray.nodes[node_id(2)] = "10.0.0.3"
    await wait_until_async(lambda: len(ray.running) == 2)
    await wait_until_async(lambda: run.head.object._healing.waiting == [])
    assert ray.keeper(2)
    assert run.read_events()[-4:] == ["part lost", "node lost", "waiting", "placed again"]
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


async def test_replicas_that_do_not_start_elsewhere_are_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room on another node, but it lacks the model."""
    ray = StandIn(monkeypatch)
    run = ray.start()
    await run.head.wait_until_ready.remote()
    ray.problems[node_id(2)] = "there is no model directory /m.", "Copy it there."
    ray.nodes[node_id(2)] = "10.0.0.3"
    ray.lose(1)
    await wait_until_async(lambda: bool(run.head.object._healing.waiting))
    assert run.head.object._healing.waiting == [
        f"m replica {replica}: it did not start, and is tried again: Node 10.0.0.3 (22222222): "
        "there is no model directory /m. Copy it there."
        for replica in (2, 3)
    ]
    # Between two attempts no Keeper is left there.
    there = node_id(2)
    await wait_until_async(lambda: all(a.is_dead for a in ray.actors if a.object.node == there))
    ray.problems.clear()
    await wait_until_async(lambda: len(ray.running) == 2)
    await wait_until_async(lambda: run.head.object._healing.waiting == [])
    await run.head.stop.remote()
    await run.wait_until_over()
    assert ray.left() == {}


@pytest.mark.parametrize("policy", ["fail", "replace"])
async def test_a_loss_ends_the_run_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Any node with `fail`; the node of the services with either."""
    ray = StandIn(monkeypatch)
    run = ray.start(on_node_lost=policy)
    await run.head.wait_until_ready.remote()
    over = run.head.wait_until_over.remote()
    ray.kill(ray.keeper(1 if policy == "fail" else 0))
    assert "The actor that ran the engines of node 10.0.0." in (await over)["message"]
    await run.wait_until_over()
    assert ray.left() == {}
