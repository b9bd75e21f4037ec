"""The Lease of a run against a stub of the API server that checks versions, in simulated time.

tests/kubernetes/test_lease.py has the same with real commands and a real server.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import ClusterError, Conflict, Gone, LeaseLost, RunExists
from rollway.kubernetes import lease as module
from rollway.kubernetes.lease import Lease, describe_holder, wait_until_released

COMMANDS = 3
OWNER = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "math", "uid": "u"}}


class StubServer:
    """One Lease with optimistic concurrency, and a clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.live: Any = None
        self.commands: list[Lease] = []
        self.paused: set[int] = set()
        self._versions = itertools.count(1)

    def create(self, _: Any, body: Any) -> Any:
        if self.live is not None:
            raise Conflict("There is one.")
        return self._put({**body, "metadata": {**body["metadata"], "uid": f"{self.now}"}})

    def get(self, *_: Any) -> Any:
        return copy.deepcopy(self.live)

    def patch(self, _: Any, __: str, body: Any, *, resource_version: str) -> Any:
        if self.live is None:
            raise Gone("It is gone.")
        if self.live["metadata"]["resourceVersion"] != resource_version:
            raise Conflict("It has changed.")
        live = copy.deepcopy(self.live)
        live["metadata"] |= body.get("metadata", {})
        live["spec"] |= body["spec"]
        return self._put(live)

    def delete(self, *_: Any, uid: str, resource_version: str) -> bool:
        if self.live is None:
            return False
        meta = self.live["metadata"]
        if (meta["uid"], meta["resourceVersion"]) != (uid, resource_version):
            raise Conflict("It has changed.")
        self.live = None
        return True

    def _put(self, body: Any) -> Any:
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self.live = body
        return copy.deepcopy(body)

    def sleep(self, seconds: float) -> None:
        """Let time pass; commands that are not paused renew, as their threads do."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for number, command in enumerate(self.commands):
                acts = number not in self.paused and command._live is not None
                if acts and not command._lost and command._age >= command._seconds / 2:
                    command._renew()


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(module, "_find_process", lambda _: None)  # all of other machines
    return monkeypatch


def make_server(patch: pytest.MonkeyPatch) -> StubServer:
    server = StubServer()
    patch.setattr(module, "time", SimpleNamespace(sleep=server.sleep))
    patch.setattr(module, "_tick", lambda: server.now)
    patch.setattr(module, "_now", lambda: f"{server.now:.6f}")
    server.commands = [Lease(server, "math") for _ in range(COMMANDS)]  # type: ignore[arg-type]
    return server


def start(server: StubServer, number: int) -> bool:
    """Let a command take the Lease; return whether it did."""
    server.commands[number] = Lease(server, "math")  # type: ignore[arg-type]
    try:
        server.commands[number]._acquire()
    except RunExists:
        return False
    return True


def remove(server: StubServer, seconds: float) -> None:
    """Delete the Lease as `rollway k8s down` does."""
    live = wait_until_released(server, "math", seconds, lambda _: None)  # type: ignore[arg-type]
    if live is not None:
        meta = live["metadata"]
        server.delete(uid=meta["uid"], resource_version=meta["resourceVersion"])


def list_writers(server: StubServer) -> list[int]:
    """Return the commands that would write now."""
    writers = []
    for number, command in enumerate(server.commands):
        if number not in server.paused and command._live is not None:
            with contextlib.suppress(ClusterError):
                command.fence()
                writers.append(number)
    return writers


ACTIONS = st.tuples(
    st.sampled_from(["start", "pause", "go on", "end", "fail", "undo", "down", "wait"]),
    st.integers(0, COMMANDS - 1),
    st.sampled_from([1.0, 8.0, 25.0, 40.0]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_two_commands_never_write_to_one_run(actions: list[tuple[str, int, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_find_process", lambda _: None)
        server = make_server(patch)
        overtaken: set[int] = set()
        for action, number, seconds in actions:
            command = server.commands[number]
            if action == "wait":
                server.sleep(seconds)
            elif action == "down":
                with contextlib.suppress(ClusterError, Conflict):
                    remove(server, seconds)
            elif action == "go on":
                server.paused.discard(number)
            elif number in server.paused:
                continue
            elif action == "pause":
                server.paused.add(number)
            elif action == "start" and command._live is None:
                if start(server, number):
                    overtaken.discard(number)
            elif action == "undo" and command._live is not None:
                if number in overtaken:
                    with pytest.raises(LeaseLost):
                        command.regain()
                else:
                    with contextlib.suppress(LeaseLost):
                        command.regain()
            elif action in ("end", "fail") and command._live is not None:
                error = RuntimeError() if action == "fail" else None
                command.__exit__(None, error, None)
                command._live = None
            overtaken |= {
                i for i, c in enumerate(server.commands) if isinstance(c._lost, LeaseLost)
            }
            assert len(list_writers(server)) <= 1


def test_an_overtaken_command_sees_it_after_the_other_has_ended(
    patch: pytest.MonkeyPatch,
) -> None:
    server = make_server(patch)
    assert start(server, 0)
    server.commands[0].give_to(OWNER)
    server.paused.add(0)
    assert start(server, 1)  # looks for 30 s, and takes over
    assert server.now >= 30.0
    server.commands[1].__exit__(None, None, None)
    server.paused.clear()
    with pytest.raises(LeaseLost, match="another command"):
        server.commands[0].fence()
    with pytest.raises(LeaseLost):
        server.commands[0].regain()
    assert "holderIdentity" in server.live["spec"]  # released, and still there
    assert [owner["uid"] for owner in server.live["metadata"]["ownerReferences"]] == ["u"]


def test_a_holder_that_nobody_overtook_goes_on(patch: pytest.MonkeyPatch) -> None:
    server = make_server(patch)
    assert start(server, 0)
    server.paused.add(0)
    server.sleep(500.0)  # simulated
    before = server.live["metadata"]["resourceVersion"]
    server.commands[0].fence()
    assert server.live["metadata"]["resourceVersion"] != before  # it was renewed first


def test_a_machine_that_slept_counts_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 5000.0}  # and no other: they stop while a machine sleeps
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert module._tick() == 5000.0


def test_who_was_taken_down_may_undo_what_it_made_since(patch: pytest.MonkeyPatch) -> None:
    server = make_server(patch)
    assert start(server, 0)
    server.live = None
    server.sleep(30.0)  # simulated
    with pytest.raises(ClusterError, match="took run math down"):
        server.commands[0].fence()
    server.commands[0].regain()
    server.commands[0].fence()
    server.commands[0].discard()
    assert server.live is None


def test_a_refused_command_leaves_the_lease_as_it_was(patch: pytest.MonkeyPatch) -> None:
    server = make_server(patch)
    assert start(server, 0)
    assert not start(server, 1)
    assert server.now <= 16.0  # it saw a renewal
    assert "holderIdentity" in server.live["spec"] and list_writers(server) == [0]


def test_a_command_that_fails_before_anything_is_there_leaves_no_lease(
    patch: pytest.MonkeyPatch,
) -> None:
    server = make_server(patch)
    assert start(server, 0)
    server.commands[0].__exit__(None, RuntimeError(), None)
    assert server.live is None


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        ("anna@laptop/12/ab", "anna@laptop (process 12)"),
        ("pod-7", "pod-7"),
        ("", "another command"),
        (None, "another command"),
    ],
)
def test_a_holder_is_named(holder: str | None, words: str) -> None:
    assert describe_holder({"spec": {"holderIdentity": holder}}) == words
