"""A Keeper whose Head dies; a stop that comes during a start. The stacks are stand-ins."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rollway.stack.ray import groups, keeper
from rollway.stack.ray.cluster import Witness
from rollway.stack.ray.keeper import Keeper
from tests.unit.stack.ray.stand_in import Actor, StandIn
from tests.waiting import settle, wait_until_async

RUN = "0" * 16
FIELDS = {"name": "ray-s-00000000-0", "models": [{"path": "org/m"}]}


class Machine:
    """Notes what happens, in order; starts last until `ready`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.ready = threading.Event()
        monkeypatch.setattr(keeper.local, "start", self._start)
        monkeypatch.setattr(groups, "remove_run", self.log.append)
        self.names: list[str] = []
        monkeypatch.setattr(
            ray.util, "list_named_actors", lambda all_namespaces: [{"name": n} for n in self.names]
        )

    def _start(self, spec: Any, progress: Callable[[Any], None], *, as_grandchild: bool) -> Any:
        assert as_grandchild  # Ray kills the children of an actor that it ends
        while not self.ready.wait(0.01):
            progress(None)
        self.log.append(f"start {spec.name}")
        return SimpleNamespace(stop=lambda: self.log.append(f"stop {spec.name}"), state={})


class Head(Witness):
    async def wait_until_over(self) -> None:
        await asyncio.Event().wait()


def create(stand_in: StandIn) -> tuple[Actor, Actor]:
    head = Actor(stand_in, "head", Head)
    return head, Actor(stand_in, "keeper", Keeper, RUN, f"rollway/{RUN}/node-0", head)


async def test_a_keeper_without_its_head_stops_first_and_then_frees_the_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, stand_in = Machine(monkeypatch), StandIn(monkeypatch)
    machine.ready.set()
    head, actor = create(stand_in)
    assert await actor.start.remote(FIELDS, []) is None
    # The groups are freed after the other Keeper has gone, too.
    machine.names = [f"rollway/{RUN}/node-0", f"rollway/{RUN}/node-1"]
    head.die()
    stopped = [f"start {FIELDS['name']}", f"stop {FIELDS['name']}"]
    await wait_until_async(lambda: machine.log == stopped)
    await settle()
    machine.names.pop()
    await wait_until_async(lambda: actor.is_dead)
    assert machine.log == [*stopped, RUN]


async def test_a_stop_during_a_start_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, stand_in = Machine(monkeypatch), StandIn(monkeypatch)
    _, actor = create(stand_in)
    start = actor.start.remote(FIELDS, [])
    await wait_until_async(lambda: bool(actor.object._starts))
    await actor.stop.remote()
    assert (await start)["message"] == "The start was cancelled."
    assert machine.log == []


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [("rollway.stack.ray.head", "aiohttp"), ("rollway.stack.ray.cluster", "pydantic")],
)
def test_actors_import_little(module: str, unneeded: str) -> None:
    """Every start of a stack pays for the imports of six processes, on each node."""
    code = f"import sys, {module}; sys.exit({unneeded!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
