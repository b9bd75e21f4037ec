"""How often and how soon a dead process is started again."""

from __future__ import annotations

import time

import pytest

from rollway.config import load_spec
from rollway.stack.state import ProcessState
from rollway.stack.supervisor import Supervisor


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor(load_spec({"models": [{"path": "org/model"}]}), lifeline=None)


def test_deaths_in_a_row_are_answered_later_each_time_and_then_not_at_all(
    supervisor: Supervisor,
) -> None:
    state = ProcessState("w", "worker", "w.log")
    supervisor.state.started_at = time.time() - 1000
    waits = []
    for _ in range(6):
        state.ready_seconds = None  # it never got ready again
        waits.append(supervisor._backoff(state))
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_a_stable_minute_forgives(supervisor: Supervisor) -> None:
    state = ProcessState("w", "worker", "w.log", failures=4)
    supervisor.state.started_at = time.time() - 1000
    state.ready_seconds = 100.0
    assert supervisor._backoff(state) == 1.0
    state.ready_seconds = 990.0  # ready again, for ten seconds
    assert supervisor._backoff(state) == 2.0
