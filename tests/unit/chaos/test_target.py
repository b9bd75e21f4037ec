"""Chaos finds the processes of a stack, and what is left of it, by their ids and marks."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from chaos.target import Target
from rollway import processes
from rollway.errors import StackNotRunning, UsageError
from rollway.fleet.workers import Worker
from rollway.processes import ProcessId, make_run_environment
from rollway.spec import load_spec
from rollway.stack.state import ProcessState, StackState


def make_target(*members: ProcessState) -> Target:
    target = Target(load_spec({"name": "t", "models": [{"path": "org/m"}]}))
    state = StackState("t", "0" * 16, 0, 0, "", "", processes=list(members))
    target._access = SimpleNamespace(read_state=lambda: state)
    return target


def run_marked(run_id: str) -> subprocess.Popen[bytes]:
    code = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **make_run_environment(run_id)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline()
    return child


def test_processes_that_outlive_their_stack_are_counted_by_their_own_mark() -> None:
    """On Ray, the run id of the stack is not that of any supervisor."""
    run_id = f"test-{os.getpid()}"
    child = run_marked(run_id)
    worker = ProcessState(name="m-0", role="worker", log="", pid=child.pid, instance=7)
    target = make_target(worker)
    assert target.find_pid(Worker(7, "", "http://h:1")) == child.pid
    assert processes.read_run_id(child.pid) == run_id
    assert processes.find_parent(child.pid) == ProcessId.of(os.getpid())
    assert target.count_orphans() == 1
    child.communicate()
    assert target.count_orphans() == 0


def test_a_stack_of_several_machines_is_refused() -> None:
    target = make_target(
        ProcessState(name="m-0", role="worker", log="", node="10.0.0.1"),
        ProcessState(name="m-1", role="worker", log="", node="10.0.0.2"),
    )
    with pytest.raises(UsageError, match=r"processes on 10\.0\.0\.1, 10\.0\.0\.2"):
        target.open()


def test_a_stack_that_has_ended_has_no_state() -> None:
    def raise_error() -> StackState:
        raise StackNotRunning("It no longer runs.")

    target = make_target()
    target._access = SimpleNamespace(read_state=raise_error)
    assert target.read_state() is None
