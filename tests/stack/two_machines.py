"""One replica over two machines, as two supervisors of this one: rank 0 behind the frontend, and a
headless rank in a stack that joins."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import rollway
from rollway.stack import running
from rollway.stack.locks import Lease
from rollway.stack.state import WAITS_FOR_REPLICA, ProcessState, StackDir, read_secret
from tests.waiting import wait_until

RANKS = {"first": "tiny-0", "second": "tiny-0-rank1"}
"""The process of each rank, by its stack."""


@contextmanager
def two_machines(spec: dict[str, Any]) -> Iterator[rollway.Stack]:
    """Start a replica of the spec's model `tiny` over two stacks, `first` and `second`."""
    lease = Lease()
    master, admin = (lease.reserve_port(0, "127.0.0.1", "a test") for _ in range(2))
    lease.release()
    ranks = [
        {"model": "tiny", "replica": 0, "nodes": 2, "node_rank": rank, "admin_port": admin,
         "master": f"127.0.0.1:{master}"}
        for rank in range(2)
    ]  # fmt: skip
    with ExitStack() as cleanup, ThreadPoolExecutor() as threads:
        # In a thread: neither stack is ready before the other one runs.
        first = rollway.up({**spec, "name": "first", "placed": ranks[:1]})
        start = threads.submit(cleanup.enter_context, first)
        wait_until(lambda: has_plan("first") or start.done())
        state = StackDir("first").read()
        assert state is not None, start.exception()
        join = {**state.join_spec["join"], "secret": read_secret(state)}
        guest = {**spec, **state.join_spec, "name": "second", "placed": ranks[1:], "join": join}
        with rollway.up(guest):
            yield start.result()


def has_plan(name: str) -> bool:
    state = StackDir(name).read()
    return state is not None and bool(state.join_spec)


def read_rank(stack: str) -> ProcessState:
    state = StackDir(stack).read()
    assert state is not None
    return next(process for process in state.processes if process.name == RANKS[stack])


def kill_rank(stack: str) -> None:
    pid = read_rank(stack).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def restart_replica(dead: str) -> None:
    """Do what the launcher does about a dead rank: stop the others, then release all."""
    wait_until(lambda: read_rank(dead).state == WAITS_FOR_REPLICA)
    for stack, process in RANKS.items():
        if stack != dead:
            running.stop_rank(stack, process)
    wait_until(lambda: all(read_rank(stack).state == WAITS_FOR_REPLICA for stack in RANKS))
    for stack, process in RANKS.items():
        running.release_rank(stack, process)
