"""What a worker's answers before and after an update say about its weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollway.fleet.canary import Answer, CanaryCheck

from rollway.errors import AdminError
from rollway.fleet import canary
from rollway.fleet.workers import Worker

WORKERS = [Worker(number, "tiny", f"http://127.0.0.1:{number}") for number in (1, 2, 3)]


def answer(weights: float) -> Answer:
    return Answer((1, 2), (-weights, -weights))


async def check(
    before: list[float],
    after: list[float],
    *,
    may_equal: bool = False,
    expected: Answer | None = None,
) -> list[Any]:
    """Ask workers that have these weights before and after an update, and verify all at once."""
    weights: dict[int, float] = {}

    async def ask(worker: Worker) -> Answer:
        await asyncio.sleep(0)  # as a request does, it lets others run
        return answer(weights[worker.instance_id])

    canaries = CanaryCheck(ask, expected)
    workers = WORKERS[: len(before)]
    for worker, has in zip(workers, before, strict=True):
        weights[worker.instance_id] = has
        await canaries.record_before(worker)
    weights |= {worker.instance_id: has for worker, has in zip(workers, after, strict=True)}
    verifying = (canaries.verify(worker, may_equal=may_equal) for worker in workers)
    return await asyncio.gather(*verifying, return_exceptions=True)


async def test_answers_that_change_alike_are_right() -> None:
    assert await check([1, 1, 1], [2, 2, 2]) == [True, True, True]
    results = await check([1, 1], [2, 3])
    assert results[0] is True and "differently than the other workers" in str(results[1])


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_successor_that_had_the_weights_already_is_right(position: int) -> None:
    """It starts from the base checkpoint, and those are the weights that all others now load."""
    before = [2.0, 2.0, 2.0]
    before[position] = 1.0
    assert await check(before, [1, 1, 1]) == [True, True, True]


async def test_one_that_ignores_the_update_is_found() -> None:
    results = await check([1, 1, 1], [1, 2, 2])
    assert results[1:] == [True, True] and "the other workers" in str(results[0])


async def test_nobody_changes_only_if_the_weights_may_be_the_old_ones() -> None:
    results = await check([1, 1], [1, 1])
    assert all("exactly as before" in str(result) for result in results)
    assert await check([1, 1], [1, 1], may_equal=True) == [False, False]  # nothing is proven
    assert await check([1], [1], expected=answer(1)) == [True]


async def test_a_worker_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canary, "OTHERS_SECONDS", 0.01)

    async def ask(worker: Worker) -> Answer:
        return answer(1)

    canaries = CanaryCheck(ask)
    for worker in WORKERS:
        await canaries.record_before(worker)
    with pytest.raises(AdminError, match="exactly as before"):
        await canaries.verify(WORKERS[0])
    assert not await canaries.verify(WORKERS[0], may_equal=True)
