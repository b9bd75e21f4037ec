"""A dead rank of a replica over several machines waits for the others. Real processes, no engine:
the stack that they would serve is replaced by a check that passes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollway.http import Http
from rollway.model_spec import PlacedWorker
from rollway.spec import load_spec
from rollway.stack import running
from rollway.stack.children import Children, _make_state
from rollway.stack.plan import ProcessPlan
from rollway.stack.state import WAITS_FOR_REPLICA
from rollway.stack.supervisor import Healer
from tests.waiting import stays_async, wait_until_async

RANK = PlacedWorker(
    model="m", replica=0, nodes=2, node_rank=1, master="127.0.0.1:1", admin_port=0
)  # fmt: skip


@asynccontextmanager
async def healed(placed: PlacedWorker) -> AsyncIterator[Children]:
    """Run one child that only sleeps, under a Healer."""
    restart = {"backoff_seconds": 0.01, "max_failures": 2}
    children = Children(load_spec({"models": [{"path": "org/m"}], "restart": restart}))
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    log_dir = Path(children.state.log_dir)
    plan = ProcessPlan("m-0-rank1", "worker", argv, {}, log_dir / "rank.log", placed=placed)
    children.directory.create()
    log_dir.mkdir()
    Path(children.state.run_dir).mkdir()
    children.plans = {plan.name: plan}
    children.state.processes = [_make_state(plan)]
    children.spawn(plan)
    healer = Healer(children, Http())
    healer.wait_for_workers = _report_ready(children)  # type: ignore[method-assign]
    stopping = asyncio.Event()
    watching = asyncio.create_task(healer.watch(stopping))
    try:
        yield children
    finally:
        stopping.set()
        await watching
        healer.cancel()
        await children.stop()
        # Before the home of the test is cleared: the supervisor of this state is the test itself.
        children.directory.forget()


def _report_ready(children: Children) -> Any:
    async def report(workers: Sequence[ProcessPlan]) -> None:
        for worker in workers:
            children.report(worker, "ready", "")

    return report


def kill(children: Children) -> int:
    (child,) = children.running.values()
    os.kill(child.pid, signal.SIGKILL)
    return child.pid


async def test_a_rank_waits_for_its_replica_and_starts_when_it_is_released() -> None:
    async with healed(RANK) as children:
        state = children.state.processes[0]
        pid = kill(children)
        await wait_until_async(lambda: state.state == WAITS_FOR_REPLICA)
        assert state.detail == "was ended by SIGKILL"
        assert await stays_async(lambda: state.pid == pid, 0.5)
        running.release_rank("default", state.name)
        await wait_until_async(lambda: state.state == "ready")
        assert state.pid != pid and state.restarts == 1
        assert not children.directory.get_restart_request(state.name).exists()


async def test_an_old_release_does_not_count() -> None:
    async with healed(RANK) as children:
        state = children.state.processes[0]
        running.release_rank("default", state.name)  # nobody waits: left by an earlier run
        pid = kill(children)
        await wait_until_async(lambda: state.state == WAITS_FOR_REPLICA)
        assert await stays_async(lambda: state.pid == pid, 0.5)


async def test_a_rank_that_was_stopped_for_another_has_not_failed() -> None:
    async with healed(RANK) as children:
        state = children.state.processes[0]
        for _ in range(4):  # more than `max_failures`
            await wait_until_async(lambda: running.stop_rank("default", state.name))
            await wait_until_async(lambda: state.state == WAITS_FOR_REPLICA)
            running.release_rank("default", state.name)
            await wait_until_async(lambda: state.state == "ready")
        assert (state.failures, state.restarts) == (0, 4)
        assert not running.stop_rank("default", "another"), "there is no such rank"


async def test_a_worker_of_one_machine_restarts_by_itself() -> None:
    async with healed(PlacedWorker(model="m", replica=0)) as children:
        state = children.state.processes[0]
        pid = kill(children)
        await wait_until_async(lambda: state.state == "ready" and state.pid != pid)
