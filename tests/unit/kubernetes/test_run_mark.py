"""The mark of a run against a stub of the API server that checks versions.

tests/kubernetes/test_run_mark.py has the same with real commands and a real server.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import ClusterError, Conflict, Gone, RunExists, RunTaken
from rollway.kubernetes.run_mark import RunMark, take_mark

COMMANDS = 3
OWNER = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "math", "uid": "u"}}


class StubServer:
    """One object with optimistic concurrency."""

    def __init__(self) -> None:
        self.live: Any = None
        self._versions = itertools.count(1)

    def create(self, _: Any, body: Any) -> Any:
        if self.live is not None:
            raise Conflict("There is one.")
        version = str(next(self._versions))
        meta = {**body["metadata"], "uid": version, "resourceVersion": version}
        self.live = {**body, "metadata": meta}

    def get(self, *_: Any) -> Any:
        return copy.deepcopy(self.live)

    def patch(self, _: Any, __: str, body: Any, *, resource_version: str) -> Any:
        if self.live is None:
            raise Gone("It is gone.")
        if self.live["metadata"]["resourceVersion"] != resource_version:
            raise Conflict("It has changed.")
        self.live["metadata"] |= body.get("metadata", {})
        self.live["metadata"]["resourceVersion"] = str(next(self._versions))
        self.live["data"] |= body["data"]

    def delete(self, *_: Any, uid: str, resource_version: str) -> None:
        meta = (self.live or {"metadata": {}})["metadata"]
        if (meta.get("uid"), meta.get("resourceVersion")) != (uid, resource_version):
            raise Conflict("It has changed.")
        self.live = None


def make_mark(server: StubServer) -> RunMark:
    return RunMark(server, "math")  # type: ignore[arg-type]


def take(mark: RunMark, *, take_over: bool = False) -> None:
    mark.take(take_over=take_over, report=lambda _: None)


def may_act(mark: RunMark) -> bool:
    with contextlib.suppress(ClusterError):
        mark.check()
        return True
    return False


ACTIONS = st.tuples(
    st.sampled_from(["start", "resume", "give", "undo", "end", "down"]),
    st.integers(0, COMMANDS - 1),
)


@given(st.lists(ACTIONS, max_size=25))
def test_two_commands_never_act_on_one_run(actions: list[tuple[str, int]]) -> None:
    server = StubServer()
    marks = [make_mark(server) for _ in range(COMMANDS)]
    overtaken: set[int] = set()
    for action, number in actions:
        mark, others = marks[number], set(range(COMMANDS)) - {number}
        if action in ("start", "resume"):
            was_held = [other for other in others if may_act(marks[other])]
            try:
                take(mark, take_over=action == "resume")
            except RunExists:
                assert action == "start" and server.live["data"]["holder"]
                continue
            assert action == "resume" or not was_held
            overtaken |= others
            overtaken.discard(number)
        elif action == "give":
            with contextlib.suppress(ClusterError):
                mark.give_to(OWNER)
        elif action == "undo" and server.live is not None:
            if number in overtaken:
                with pytest.raises(RunTaken):
                    mark.regain()
            else:
                with contextlib.suppress(RunTaken):
                    mark.regain()
        elif action == "end":
            with contextlib.suppress(ClusterError):
                mark.release()
        elif action == "down":
            down = take_mark(server, "math")  # type: ignore[arg-type]
            if down is not None:
                assert not any(map(may_act, marks))
                down.discard()
            overtaken.clear()
        assert sum(map(may_act, marks)) <= 1


def test_a_second_command_is_told_who_starts_the_run_and_how_to_go_on() -> None:
    server = StubServer()
    take(make_mark(server))
    with pytest.raises(RunExists, match=r"is being started by .*\(process \d+\)") as caught:
        take(make_mark(server))
    assert "--resume" in caught.value.hint and "rollway k8s down math" in caught.value.hint


def test_what_was_made_after_a_down_is_still_removed() -> None:
    server = StubServer()
    mark = make_mark(server)
    take(mark)
    server.live = None  # `down`
    with pytest.raises(ClusterError, match="took run math down"):
        mark.check()
    mark.regain()
    mark.check()


def test_the_mark_of_somebody_else_is_not_touched() -> None:
    server = StubServer()
    server.create(None, {"metadata": {"name": "rollway-math"}, "data": {}})
    before = server.get()
    with pytest.raises(RunExists, match="does not belong to run math"):
        take(make_mark(server), take_over=True)
    assert take_mark(server, "math") is None  # type: ignore[arg-type]
    assert server.get() == before
