"""Answers of two workers: one computed the prompt, the other decoded."""

from __future__ import annotations

from typing import Any

import pytest

from rollway.rollout.completion import Completion, Nvext, WorkerIds
from rollway.rollout.sender import Sender
from rollway.rollout.sequence import _span_as_json, _span_from_json
from rollway.rollout.trajectory import Span
from rollway.versions import FleetVersions

PREFILL, DECODE = 1, 2


@pytest.fixture
def versions() -> FleetVersions:
    versions = FleetVersions()
    versions.note_roles({PREFILL: "prefill", DECODE: "decode"})
    versions.learn({PREFILL: 3, DECODE: 3})
    versions.tainted = True
    return versions


async def is_attributed(versions: FleetVersions, *, stamped: bool) -> bool:
    """Ask whether an answer counts for which the prefill worker has moved on to version 4."""
    http: Any = None
    sender, ticket = Sender(http, "http://f", "m", versions), versions.ticket()
    versions.mark_issued(PREFILL)
    versions.mark_serving(PREFILL, 4)
    stamps = [(0, 3)] if stamped else None
    answer = Completion([7], [-1.0], "stop", DECODE, 0, None, stamps, PREFILL)
    return await sender._is_attributed(ticket, answer)


async def test_an_answer_of_foreign_workers_counts_only_if_the_prefill_worker_had_the_version(
    versions: FleetVersions,
) -> None:
    for worker in (PREFILL, DECODE):
        versions.note_facts(worker, is_foreign=True)
    http: Any = None
    sender, ticket = Sender(http, "http://f", "m", versions), versions.ticket()
    answer = Completion([7], [-1.0], "stop", DECODE, 0, None, None, PREFILL)
    assert await sender._is_attributed(ticket, answer)
    assert not await is_attributed(versions, stamped=False)


async def test_a_stamp_is_also_of_the_prefill_worker(versions: FleetVersions) -> None:
    """A decode engine takes only KV that was computed for the version that it names
    (tests/unit/engine/test_core.py)."""
    assert await is_attributed(versions, stamped=True)


def test_a_version_is_served_when_both_pools_have_it(versions: FleetVersions) -> None:
    versions.learn({PREFILL: 4, DECODE: 3})
    assert not versions.is_served(4) and not versions.is_served(3)
    assert (versions.current, versions.newest) == (3, 4)  # the others have to move to 4
    versions.learn({PREFILL: 4, DECODE: 4})
    assert versions.current == 4
    assert not versions.is_served(4, without={DECODE})


def test_an_aggregated_worker_is_no_prefill_worker() -> None:
    assert Nvext(worker_id=WorkerIds(DECODE, DECODE)).prefill_worker is None
    assert Nvext(worker_id=WorkerIds(DECODE, PREFILL)).prefill_worker == PREFILL


@pytest.mark.parametrize("prefill", [None, 2**63 + 1])
def test_spans_keep_both_workers_as_json(prefill: int | None) -> None:
    span = Span(0, 4, 3, DECODE, prefill)
    assert _span_from_json(_span_as_json(span)) == span
