"""The counts of a gateway in the record of its stack."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rollway.gateway.command import record_counts
from rollway.gateway.store import SessionStore
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from tests.waiting import wait_until_async


async def test_counts_are_recorded_when_they_change(tmp_path: Path) -> None:
    # A stand-in for the sessions: only the counts are read.
    counts = SimpleNamespace(sessions={}, turns=0, forks=Counter[str]())
    run = Recorder(tmp_path, "gateway")

    def read(kind: str) -> list[dict[str, Any]]:
        return [entry for entry in Run(tmp_path).read() if entry["kind"] == kind]

    async with record_counts(cast(SessionStore, counts), run, seconds=0.01):
        await wait_until_async(lambda: len(read("gateway")) == 1)
        counts.sessions["a"], counts.turns = None, 2
        counts.forks["edited"] += 1
        await wait_until_async(lambda: len(read("forks")) == 1)
        counts.forks["edited"] += 2
    run.close()
    assert [(e["sessions"], e["turns"]) for e in read("gateway")] == [(0, 0), (1, 2)]
    assert [(e["reason"], e["count"]) for e in read("forks")] == [("edited", 1), ("edited", 2)]


async def test_a_stack_that_is_not_recorded_has_no_counts(tmp_path: Path) -> None:
    async with record_counts(SessionStore(None), None):
        pass
