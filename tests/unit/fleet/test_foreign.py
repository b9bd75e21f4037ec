"""Foreign workers: which of their answers count, and what their canaries say about their weights.

test_fleet.py moves them by single calls, test_refit_machine.py has their promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollway.errors import AdminError
from rollway.fleet import foreign
from rollway.fleet.admin import IN_DOUBT, UNVERIFIED, leaving_label
from rollway.fleet.fleet import Fleet
from rollway.fleet.foreign import Answer, CanaryCheck
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.versions import FleetVersions
from tests.unit.fleet.fake_fleet import FakeWorker, fake_fleet
from tests.waiting import wait_until_async

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
    monkeypatch.setattr(foreign, "OTHERS_SECONDS", 0.01)

    async def ask(worker: Worker) -> Answer:
        return answer(1)

    canaries = CanaryCheck(ask)
    for worker in WORKERS:
        await canaries.record_before(worker)
    with pytest.raises(AdminError, match="exactly as before"):
        await canaries.verify(WORKERS[0])
    assert not await canaries.verify(WORKERS[0], may_equal=True)


# --- answers --------------------------------------------------------------------------------------


def make_versions(*workers: int) -> FleetVersions:
    """Return the versions of foreign workers that serve version 1."""
    versions = FleetVersions()
    for worker in workers:
        versions.note_facts(worker, is_foreign=True)
    versions.learn(dict.fromkeys(workers, 1))
    return versions


def test_an_answer_to_a_request_from_before_the_admission_does_not_count() -> None:
    """A router may send a request to a worker whose taints it does not know yet. By the time of the
    answer the worker may have the version, and say so."""
    versions = make_versions(1)
    early = versions.ticket()
    versions.note_facts(2, is_foreign=True)
    assert not versions.has_served(early, 2)  # nobody knows what it serves
    versions.mark_issued(2)
    assert not versions.has_served(early, 2)
    versions.mark_serving(2, 1)
    assert not versions.has_served(early, 2)
    assert not versions.has_served(early, None)
    assert versions.has_served(early, 1)
    late = versions.ticket()
    assert versions.has_served(late, 2) and versions.has_served(late, None)


def test_no_answer_counts_once_an_update_was_issued() -> None:
    versions = make_versions(1, 2)
    ticket = versions.ticket()
    versions.mark_issued(1)
    assert not versions.has_served(ticket, 1) and versions.has_served(ticket, 2)
    versions.mark_serving(1, 1)  # the update failed before it began
    assert not versions.has_served(ticket, 1) and not versions.has_served(ticket, None)
    assert versions.has_served(versions.ticket(), 1)


def test_what_is_read_again_and_is_the_same_counts_as_before() -> None:
    versions = make_versions(1)
    ticket = versions.ticket()
    versions.learn({1: 1})
    assert versions.has_served(ticket, 1)


def test_only_workers_that_are_known_as_foreign_need_no_stamp() -> None:
    versions = make_versions(1)
    versions.learn({1: 1, 2: 1})
    ticket = versions.ticket()
    assert ticket.stamped  # of worker 2 nobody knows that it stamps nothing
    assert versions.has_served(ticket, 1)
    assert not versions.has_served(ticket, 2) and not versions.has_served(ticket, None)
    versions.note_facts(1, is_foreign=False)  # its engine has loaded the plugin since
    assert not versions.has_served(ticket, 1)
    for worker in (1, 2):
        versions.note_facts(worker, is_foreign=True)
    assert not versions.ticket().stamped


@pytest.mark.parametrize(
    ("label", "counts"),
    [
        (1, True),
        (leaving_label(1), True),  # nothing was generated since
        (IN_DOUBT, False),
        (UNVERIFIED, False),
        (2, False),
        (leaving_label(2), False),
        (None, False),
    ],
)
async def test_the_label_after_an_answer_decides_whether_another_process_has_refitted(
    label: int | None, counts: bool
) -> None:
    worker, other = FakeWorker(1, version=1), FakeWorker(2, version=1)
    async with fake_fleet(worker, other) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.read_versions()
        ticket = fleet.versions.ticket()
        worker.version = label
        assert await fleet.still_serves(ticket, 1) is counts
        assert await fleet.still_serves(ticket, None) is counts
        assert await fleet.still_serves(ticket, 2)


async def test_an_answer_without_a_name_may_be_of_a_worker_that_has_just_joined() -> None:
    worker, joiner = FakeWorker(1, version=1), FakeWorker(2, version=0, error="it is starting")
    async with fake_fleet(worker, joiner) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.read_versions()
        ticket = fleet.versions.ticket()
        joiner.error = None
        assert not await fleet.still_serves(ticket, None)
        assert await fleet.still_serves(ticket, 1)


async def test_the_answer_of_a_worker_that_cannot_be_asked_does_not_count() -> None:
    worker = FakeWorker(1, version=1)
    async with fake_fleet(worker) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.read_versions()
        worker.fail["get_weight_version"] = "the engine is dead"
        assert not await fleet.still_serves(fleet.versions.ticket(), 1)


async def test_an_update_that_is_issued_while_the_worker_is_asked_is_noticed() -> None:
    worker = FakeWorker(1, version=1)
    async with fake_fleet(worker) as url, Http() as http:
        fleet = Fleet(http, url)
        await fleet.read_versions()
        ticket = fleet.versions.ticket()
        worker.fail["get_weight_version"] = 0.2  # its answer takes a moment
        asking = asyncio.create_task(fleet.still_serves(ticket, 1))
        await wait_until_async(lambda: worker.calls.count("get_weight_version") == 2)
        fleet.versions.mark_issued(1)
        assert not await asking
