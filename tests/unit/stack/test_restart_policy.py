"""How often and how soon the supervisor restarts a dead process."""

from __future__ import annotations

import time

import pytest

from rollway.http import Http
from rollway.spec import load_spec
from rollway.stack.children import Children
from rollway.stack.state import ProcessState
from rollway.stack.supervisor import Healer


@pytest.fixture
def healer() -> Healer:
    children = Children(load_spec({"models": [{"path": "org/model"}]}))
    children.state.started_at = time.time() - 1000
    return Healer(children, Http())


def test_the_wait_doubles_with_each_death_in_a_row_until_restarts_end(healer: Healer) -> None:
    state = ProcessState("w", "worker", "w.log")
    waits = []
    for _ in range(6):
        state.ready_seconds = None  # it was not ready again
        waits.append(healer.choose_backoff(state))
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_a_stable_minute_resets_the_wait(healer: Healer) -> None:
    state = ProcessState("w", "worker", "w.log", failures=4)
    state.ready_seconds = 100.0
    assert healer.choose_backoff(state) == 1.0
    state.ready_seconds = 990.0  # ready again, for ten seconds
    assert healer.choose_backoff(state) == 2.0
