"""The parts of a run: one supervisor's stack each, and the Keepers that run them.

A node has one part for its whole replicas. A replica over several nodes has a part of its own on
each of them, so that its ranks can be stopped, and placed again, without touching others. Part 0
has the services and the frontend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollway.config import StackSpec
from rollway.errors import RollwayError, StartError, restore_error
from rollway.ranks import PlacedWorker
from rollway.stack.commands import WILDCARDS
from rollway.stack.ray import cluster
from rollway.stack.ray.groups import Groups
from rollway.stack.ray.keeper import Keeper
from rollway.stack.ray.node_check import get_python, list_needs, make_import_error
from rollway.stack.ray.placement import Placement, RankPlace, ReplicaPlace
from rollway.stack.state import make_ray_part_name

SERVICES = 0


@dataclass(slots=True)
class Part:
    """One stack of one node."""

    number: int
    name: str
    node: str
    workers: list[tuple[ReplicaPlace, RankPlace]] = field(default_factory=list)

    @property
    def shares_replica(self) -> bool:
        return any(len(place.ranks) > 1 for place, _ in self.workers)

    def describe(self, addresses: Mapping[str, str]) -> str:
        return f"node {addresses.get(self.node, '?')} ({self.node[:8]})"


class Parts:
    """Creates Keepers and parts, with their groups; remembers all of them."""

    def __init__(self, spec: StackSpec, run_id: str, head: Any) -> None:
        self.spec = spec
        self.run_id = run_id
        self.groups = Groups(spec, run_id)
        self.keepers: dict[str, Any] = {}
        """The Keeper of each node that has one, or is about to have one."""
        self.parts: dict[int, Part] = {}
        self.addresses: dict[str, str] = {}
        self.steps: dict[str, float] = {}
        """The seconds after which each step of the start was done."""
        self._head = head
        self._has_gpus: dict[str, bool] = {}
        self._join: dict[str, Any] = {}
        self._next_part = 0
        self._next_keeper = 0
        self._rendezvous: dict[ReplicaPlace, asyncio.Future[tuple[int, int, int]]] = {}
        self._is_spread = False

    # --- start -----------------------------------------------------------------------------------

    async def start(self, placement: Placement) -> None:
        """Create everything; return when all workers are ready."""
        self.read_addresses()
        nodes = {placement.services, *(r.node for p in placement.replicas for r in p.ranks)}
        self._is_spread = len(self.addresses) > 1
        began = time.monotonic()
        bundles = self.groups.record_bundles(placement.replicas, placement.services)
        needs = {
            node: list_needs(
                self.spec, runs_services=node == placement.services, is_spread=len(nodes) > 1
            )
            # The services' Keeper is `node-0`; the ids of nodes are random.
            for node in sorted(nodes, key=lambda node: (node != placement.services, node))
        }
        # Ray has registered the Keepers, which know their groups, before it hears of the groups.
        # Their processes start while Ray reserves.
        keepers = {node: self._create_keeper(node) for node in needs}
        groups = asyncio.ensure_future(self.groups.create(bundles))
        try:
            checks = (self._examine(n, keepers[n], need) for n, need in needs.items())
            await asyncio.gather(*checks)
            self.steps["keepers"] = time.monotonic() - began
            await self.groups.read_gpus(placement.replicas, await groups, self._has_gpus)
        finally:
            groups.cancel()
        self.steps["groups"] = time.monotonic() - began
        parts = self._divide(placement.replicas, services=placement.services)
        is_on_one_node = len(nodes) == 1
        first = asyncio.ensure_future(
            self._start_part(parts[0], {} if is_on_one_node else {"discovery": "etcd"})
        )
        rest: list[Any] = []
        try:
            if len(parts) > 1:
                await self._learn_join(parts[0], first)
                self.steps["services"] = time.monotonic() - began
                rest = [asyncio.ensure_future(self._start_part(p, self._join)) for p in parts[1:]]
            await asyncio.gather(first, *rest)
        finally:
            for task in (first, *rest):
                task.cancel()

    async def add(self, replicas: Sequence[ReplicaPlace]) -> list[Part]:
        """Start parts for replicas that were placed again; return them, or leave nothing."""
        self.read_addresses()
        nodes = {rank.node for place in replicas for rank in place.ranks}
        missing = sorted(nodes - self.keepers.keys())
        needs = list_needs(self.spec, runs_services=False, is_spread=True)
        await asyncio.gather(*(self.create_keeper(node, needs) for node in missing))
        parts: list[Part] = []
        try:
            await self._reserve(replicas)
            parts = self._divide(replicas)
            # All starts must have ended before any is stopped.
            starts = (self.launch(part) for part in parts)
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.remove(parts, replicas)
            raise
        return parts

    async def remove(self, parts: Sequence[Part], replicas: Sequence[ReplicaPlace]) -> None:
        """Stop parts, then free the groups of these replicas."""
        for part in parts:
            self.parts.pop(part.number, None)
            keeper = self.keepers.get(part.node)
            if keeper is not None:
                calls = [keeper.stop_part.remote(part.name)]
                await asyncio.gather(*calls, return_exceptions=True)  # the node may be lost
        await self.groups.remove(replicas)

    def renew(self, part: Part) -> Part:
        """Return a new part with the same workers on the same node, in place of a dead one."""
        del self.parts[part.number]
        return self._make_part(part.node, list(part.workers))

    async def launch(self, part: Part, after: Sequence[str] = ()) -> None:
        """Start a part that joins the first, once the stacks `after` are gone from its node."""
        await self._start_part(part, self._join, after)

    async def _learn_join(self, first: Part, start: asyncio.Future[None]) -> None:
        """Wait until the other parts can join; raise the error of the first part's start."""
        keeper = self.keepers[first.node]
        join = asyncio.ensure_future(
            cluster.get_result(keeper.wait_until_joinable.remote(first.name))
        )
        await asyncio.wait({join, start}, return_when=asyncio.FIRST_COMPLETED)
        if not join.done():
            await start
        self._join = await join

    def read_addresses(self) -> None:
        self.addresses = {node.id: node.address for node in cluster.read_nodes()}

    def _name_node(self, node: str) -> str:
        return f"{self.addresses.get(node, '?')} ({node[:8]})"

    # --- keepers ---------------------------------------------------------------------------------

    async def create_keeper(self, node: str, needs: dict[str, Any] | None = None) -> None:
        """Create the Keeper of a node, and learn what it finds there."""
        await self._examine(node, self._create_keeper(node), needs)

    def _create_keeper(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = cluster.get_part_name(self.run_id, f"node-{self._next_keeper}")
        self._next_keeper += 1
        options = ray.remote(Keeper).options(
            name=name,
            namespace=self.spec.ray.namespace,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        groups = self.groups.list_on(node)  # also those of a Keeper that died here
        keeper = self.keepers[node] = options.remote(self.run_id, name, self._head, groups)
        return keeper

    async def _examine(self, node: str, keeper: Any, needs: dict[str, Any] | None) -> None:
        """Learn what a new Keeper finds; raise StartError if its node lacks what is needed."""
        import ray

        try:
            facts = await keeper.examine.remote(needs)
        except ray.exceptions.RayError as error:  # it has gone, or is too new for Ray to use it
            self._drop_keeper(node, keeper)
            if (cause := make_import_error(error, f"Node {self._name_node(node)}")) is not None:
                raise cause from None
            raise
        self._has_gpus[node] = bool(facts["gpus"])
        if facts["problem"] is not None:
            # Another attempt is to look again, and meanwhile this Keeper has nothing to do.
            self._drop_keeper(node, keeper)
            message, hint = facts["problem"]
            raise StartError(f"Node {self._name_node(node)}: {message}", hint)

    def _drop_keeper(self, node: str, keeper: Any) -> None:
        import ray

        if self.keepers.get(node) is keeper:
            del self.keepers[node]
        ray.kill(keeper)

    async def _reserve(self, replicas: Sequence[ReplicaPlace]) -> None:
        """Have Ray hold the resources of these replicas, and read which GPUs it chose."""
        bundles = self.groups.record_bundles(replicas)
        nodes = {node for ranks in bundles.values() for node, _ in ranks}
        adds = (self.keepers[n].add_groups.remote(self.groups.list_on(n)) for n in nodes)
        await asyncio.gather(*map(cluster.get_result, adds))
        await self.groups.read_gpus(replicas, await self.groups.create(bundles), self._has_gpus)

    # --- parts -----------------------------------------------------------------------------------

    def _divide(self, replicas: Sequence[ReplicaPlace], services: str | None = None) -> list[Part]:
        """Make the parts of these replicas; that of the services is the first."""
        whole: dict[str, list[tuple[ReplicaPlace, RankPlace]]] = {}
        if services is not None:
            whole[services] = []
        for place in replicas:
            if len(place.ranks) == 1:
                whole.setdefault(place.ranks[0].node, []).append((place, place.ranks[0]))
        parts = [self._make_part(node, workers) for node, workers in whole.items()]
        for place in replicas:
            if len(place.ranks) > 1:
                parts += [self._make_part(rank.node, [(place, rank)]) for rank in place.ranks]
        return parts

    def _make_part(self, node: str, workers: list[tuple[ReplicaPlace, RankPlace]]) -> Part:
        number = self._next_part
        self._next_part += 1
        name = make_ray_part_name(self.spec.name, self.run_id, number)
        part = self.parts[number] = Part(number, name, node, workers)
        return part

    async def _start_part(
        self, part: Part, fields: Mapping[str, Any], after: Sequence[str] = ()
    ) -> None:
        keeper = self.keepers[part.node]
        spec = self._make_spec(part, fields, await self._place(part))
        answer = await keeper.start.remote(spec, list(after))
        if "error" in answer:
            raise _locate_error(answer["error"], part.describe(self.addresses))

    async def _place(self, part: Part) -> list[dict[str, Any]]:
        """Return the workers of a part as the spec's `placed` has them."""
        placed = []
        for place, rank in part.workers:
            worker = PlacedWorker(
                model=place.model,
                replica=place.replica,
                role=place.role,
                gpus=self.groups.get_gpus(place, rank),
                node_rank=rank.node_rank,
                nodes=len(place.ranks),
                **await self._choose_rendezvous(place),
            )
            placed.append(worker.model_dump(mode="json"))
        return placed

    async def _choose_rendezvous(self, place: ReplicaPlace) -> dict[str, Any]:
        """Return the rendezvous of a replica's ranks; it is the same for all of them."""
        if len(place.ranks) == 1:
            return {}
        if place not in self._rendezvous:
            node = place.ranks[0].node
            self._rendezvous[place] = asyncio.ensure_future(
                cluster.get_result(self.keepers[node].lease_ports.remote(self.addresses[node]))
            )
        master, rpc, admin = await self._rendezvous[place]
        host = self.addresses[place.ranks[0].node]
        return {"master": f"{host}:{master}", "rpc_port": rpc, "admin_port": admin}

    def _make_spec(
        self, part: Part, fields: Mapping[str, Any], placed: list[dict[str, Any]]
    ) -> dict[str, Any]:
        own = self.spec.model_dump(mode="json", exclude={"launcher", "ray", "placed", "join"})
        own |= {**fields, "name": part.name, "placed": placed, "python": get_python(self.spec)}
        own["observe"]["part_of"] = f"{self.spec.name}/{self.run_id}"
        if self._is_spread:
            address = self.addresses[part.node]
            own["admin_host"] = choose_host(self.spec.admin_host, address)
            own["frontend"] = {
                **own["frontend"], "host": choose_host(self.spec.frontend.host, address)
            }  # fmt: skip
        if self.spec.log_dir is not None and part.number != SERVICES:
            own["log_dir"] = str(self.spec.log_dir / f"node-{part.number}")
        return own


def choose_host(requested: str, address: str) -> str:
    """Return where to listen: other nodes do not reach loopback, nor dial all addresses."""
    return address if requested in ("127.0.0.1", "localhost", *WILDCARDS) else requested


def _locate_error(error: Mapping[str, Any], where: str) -> RollwayError:
    """Restore the error of a part's start, with its node."""
    return restore_error({**error, "message": f"On {where}: {error['message']}"})
