"""A Ray cluster in one event loop: actors are objects, and deaths happen when a test says so.

The Head, its parts and its healing are the real ones; keepers note what they would start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rollway.errors import StartError
from rollway.observe.read import Run as RecordedRun
from rollway.spec import load_spec
from rollway.stack.ray import cluster, groups, head, healing, parts
from rollway.stack.ray.cluster import NodeInfo, Witness
from rollway.stack.ray.placement import plan_placement
from tests.waiting import wait_until_async

JOIN = {
    "discovery": "etcd",
    "etcd_endpoints": "http://10.0.0.1:2379",
    "join": {
        "namespace": "n",
        "frontend": "http://10.0.0.1:8000",
        "rl": "http://10.0.0.1:8001",
        "secret": "s",
    },
}


def node_id(number: int) -> str:
    return str(number) * 56  # as long as Ray's


class Actor:
    """A handle, and the object behind it."""

    def __init__(self, ray_: StandIn, name: str, kind: Callable[..., Any], *arguments: Any) -> None:
        self.name = name
        self.is_dead = False
        self._calls: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}
        ray_.current, self.object = self, None
        self.object = kind(*arguments)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **named: self._call(method, args, named))

    def _call(self, method: str, args: Any, named: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.is_dead:
            answer.set_exception(ActorDiedError())
            return answer

        async def run() -> None:
            try:
                result = await getattr(self.object, method)(*args, **named)
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
                raise
            if not answer.done():
                answer.set_result(result)

        task = asyncio.create_task(run())
        self._calls[answer] = task
        answer.add_done_callback(lambda a: a.cancelled() or a.exception())
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return answer

    def interrupt(self) -> None:
        """Break all connections to the actor, which lives."""
        for answer in self._calls:
            if not answer.done():
                answer.set_exception(ActorUnavailableError("connection reset", None))

    def die(self) -> None:
        self.is_dead = True
        for answer, task in self._calls.items():
            if not answer.done():
                answer.set_exception(ActorDiedError())
            if task is not asyncio.current_task():
                task.cancel()


class StandIn:
    """The cluster: nodes, actors, groups, and the stacks that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int = 2) -> None:
        self.nodes = {node_id(n): f"10.0.0.{n + 1}" for n in range(nodes)}
        self.actors: list[Actor] = []
        self.groups: dict[str, list[str]] = {}
        self.running: dict[str, Actor] = {}
        self.engines: dict[str, set[str]] = {}
        """The replicas of each stack."""
        self.steps: list[str] = []
        self.at_step: Callable[[str], None] = lambda _: None
        self.unknown: set[str] = set()
        """Nodes that are too new for Ray to start actors there."""
        self.problems: dict[str, tuple[str, str]] = {}
        """What nodes lack."""
        self.current: Any = None
        monkeypatch.setattr(
            ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=self.current)
        )
        monkeypatch.setattr(ray, "remote", self._remote)
        monkeypatch.setattr(ray, "kill", lambda actor: self.kill(actor))
        monkeypatch.setattr(groups, "create_group", self._create_group)
        monkeypatch.setattr(groups, "remove_groups", self._remove_groups)
        monkeypatch.setattr(groups, "list_groups", lambda: dict.fromkeys(self.groups, "0" * 16))
        monkeypatch.setattr(groups, "wait_until_free", lambda groups: None)
        monkeypatch.setattr(cluster, "read_nodes", self.read_nodes)
        monkeypatch.setattr(head, "_LAST_CALL_SECONDS", 0.0)
        monkeypatch.setattr(healing, "RETRY_SECONDS", 0.01)
        monkeypatch.setattr(cluster, "_UNAVAILABLE_SECONDS", 0.0)

    def step(self, what: str) -> None:
        self.steps.append(what)
        self.at_step(what)

    def _remote(self, kind: Any) -> Any:
        def options(**named: Any) -> Any:
            node = named["scheduling_strategy"].node_id

            def create(*arguments: Any) -> Actor:
                self.step(f"keeper on node {node[0]}")
                actor = Actor(self, named["name"], FakeKeeper, self, node)
                if node in self.unknown:
                    actor.die()
                self.actors.append(actor)
                return actor

            return SimpleNamespace(remote=create)

        assert kind is parts.Keeper
        return SimpleNamespace(options=options)

    def read_nodes(self) -> list[NodeInfo]:
        def count(node: str) -> int:
            return sum(entry.count(node) for entry in self.groups.values())

        return [NodeInfo(n, a, n == node_id(0), 16.0, 2.0 - min(2, count(n)), {})
                for n, a in self.nodes.items()]  # fmt: skip

    def _create_group(self, name: str, bundles: Any) -> Any:
        self.step(f"group {name.rpartition('/')[2]}")
        self.groups[name] = [node for node, held in bundles if "GPU" in held]
        return SimpleNamespace(wait=lambda seconds: True)

    def _remove_groups(self, names: Any) -> list[str]:
        for name in names:
            engines = {e for stack in self.running for e in self.engines[stack]}
            assert name.rpartition("/")[2] not in engines, "a group is freed while its engines run"
            self.groups.pop(name, None)
        return []

    def kill(self, actor: Actor) -> None:
        """Kill an actor; the supervisors of a Keeper notice it and stop."""
        actor.die()
        self.running = {name: k for name, k in self.running.items() if k is not actor}

    def lose(self, number: int) -> None:
        del self.nodes[node_id(number)]
        for actor in self.actors:
            if actor.object.node == node_id(number):
                self.kill(actor)

    def keeper(self, number: int) -> Actor:
        (keeper,) = (a for a in self.actors if a.object.node == node_id(number) and not a.is_dead)
        return keeper

    def start(self, replicas: int = 4, **settings: Any) -> Run:
        spec = load_spec(
            {"name": "s", "models": [{"path": "org/m", "replicas": replicas}]},
            launcher="ray", ray=settings,
        )  # fmt: skip
        witness = Actor(self, "witness", Witness)
        place = plan_placement(spec, self.read_nodes())
        owner = Actor(
            self, "head", head.Head, spec.model_dump(mode="json"), place, "0" * 16, {}, witness
        )
        return Run(self, owner, witness)

    def left(self) -> dict[str, Any]:
        left = {
            "keepers": [a.name for a in self.actors if not a.is_dead],
            "groups": sorted(self.groups),
            "stacks": sorted(self.running),
        }
        return {what: names for what, names in left.items() if names}


class Run:
    """A run of the real Head."""

    def __init__(self, ray_: StandIn, owner: Actor, witness: Actor) -> None:
        self.head, self.witness = owner, witness
        self._ray = ray_

    async def wait_until_over(self) -> None:
        await wait_until_async(lambda: self.head.is_dead, 20)

    def read_events(self) -> list[str]:
        """Return what the Head has recorded so far."""
        recorder = self.head.object._recorder
        assert recorder.flush()
        entries = RecordedRun(recorder.directory).read()
        return [entry["event"] for entry in entries if "event" in entry]


class FakeKeeper:
    """Notes what it would start."""

    def __init__(self, ray_: StandIn, node: str) -> None:
        self.node = node
        self._ray = ray_
        self._handle = ray_.current
        self._stacks: dict[str, asyncio.Event] = {}
        self.failure = ""

    async def examine(self, needs: dict[str, Any]) -> tuple[bool, tuple[str, str] | None]:
        if self.node not in self._ray.nodes:
            await asyncio.Event().wait()
        return False, self._ray.problems.get(self.node)

    async def start(self, fields: dict[str, Any], after: list[str]) -> dict[str, Any] | None:
        self._ray.engines[fields["name"]] = {f"m-{w['replica']}" for w in fields["placed"]}
        self._ray.running[fields["name"]] = self._handle
        self._stacks[fields["name"]] = asyncio.Event()
        self._ray.step(f"part {fields['name'].rpartition('-')[2]} on node {self.node[0]}")
        await asyncio.sleep(0)  # a start takes time, in which others act
        if self.failure:
            await self.stop_part(fields["name"])
            return StartError(self.failure).as_json()
        return None

    async def wait_until_joinable(self, name: str) -> dict[str, Any]:
        await wait_until_async(lambda: name in self._stacks)
        return JOIN

    async def watch(self, name: str) -> str:
        await self._stacks[name].wait()
        return ""

    async def read_states(self) -> list[Any]:
        return []

    async def stop_part(self, name: str) -> None:
        self._ray.running.pop(name, None)
        self._stacks[name].set()

    async def stop(self) -> None:
        for name in list(self._stacks):
            self._ray.running.pop(name, None)


def make_nodes(*gpus: float, cpus: float = 64, head: int | None = 0) -> list[NodeInfo]:
    return [
        NodeInfo(f"n{i}", f"10.0.0.{i}", i == head, cpus, count, {"zone": "ab"[i % 2]})
        for i, count in enumerate(gpus)
    ]
