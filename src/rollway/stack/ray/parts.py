"""The parts of a run: one supervisor's stack each, and the Keepers that run them.

A node has one part for its whole replicas. A replica over several nodes has a part of its own on
each of them, so that its ranks can be stopped, and placed again, without touching others. Part 0
has the services and the frontend.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import StartError, restore_error
from rollway.model_spec import PlacedWorker
from rollway.spec import StackSpec
from rollway.stack.commands import WILDCARDS
from rollway.stack.locks import FIRST, Lease
from rollway.stack.plan import plan_stack
from rollway.stack.ray import cluster
from rollway.stack.ray.cluster import NodeInfo
from rollway.stack.ray.groups import Groups
from rollway.stack.ray.keeper import Keeper
from rollway.stack.ray.node_check import get_python, list_needs, make_import_error
from rollway.stack.ray.placement import Placement, RankPlace, ReplicaPlace
from rollway.stack.state import make_ray_part_name

SERVICES = 0


@dataclass(slots=True)
class StackPart:
    """One stack of one node."""

    number: int
    name: str
    node: str
    workers: list[tuple[ReplicaPlace, RankPlace]] = field(default_factory=list)

    @property
    def shares_replica(self) -> bool:
        return any(len(place.ranks) > 1 for place, _ in self.workers)


class Parts:
    """Creates Keepers and parts, with their groups; remembers all of them."""

    def __init__(self, spec: StackSpec, run_id: str, head: Any) -> None:
        self.spec = spec
        self.run_id = run_id
        self.groups = Groups(spec, run_id)
        self.keepers: dict[str, Any] = {}
        """The Keeper of each node that has one, or is about to have one."""
        self.parts: dict[int, StackPart] = {}
        self.addresses: dict[str, str] = {}
        self._head = head
        self._has_gpus: dict[str, bool] = {}
        self.join: dict[str, Any] = {}
        """How parts join the first, as soon as its services answer."""
        self._needs = list_needs(spec)
        self._next_part = 0
        self._next_keeper = 0
        self._is_spread = False
        self._rendezvous: dict[ReplicaPlace, asyncio.Future[tuple[int, int, int]]] = {}

    # --- start -----------------------------------------------------------------------------------

    async def start(self, placement: Placement) -> None:
        """Create everything; return when all workers are ready."""
        parts = await self._prepare(placement.replicas, placement.services)
        fields = self.get_services_fields(placement)
        starts = [asyncio.ensure_future(self.launch(parts[0], fields))]
        try:
            await self._learn_join(parts[0], starts[0])
            starts += [asyncio.ensure_future(self.launch(part)) for part in parts[1:]]
            await asyncio.gather(*starts)
        finally:
            for task in starts:
                task.cancel()

    async def add(self, replicas: Sequence[ReplicaPlace]) -> list[StackPart]:
        """Start parts for replicas that were placed again; return them, or leave nothing."""
        parts: list[StackPart] = []
        try:
            parts = await self._prepare(replicas)
            # All starts must have ended before any is stopped.
            starts = (self.launch(part) for part in parts)
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.remove(parts, replicas)
            raise
        return parts

    async def _prepare(
        self, replicas: Sequence[ReplicaPlace], services: str | None = None
    ) -> list[StackPart]:
        """Have Keepers on all nodes, and Ray hold the resources; return the parts to start."""
        self.note_nodes(cluster.read_nodes())
        nodes = {rank.node for place in replicas for rank in place.ranks}
        # The services' Keeper is `node-0`; the ids of nodes are random.
        first = [services] if services is not None else []
        missing = [*first, *sorted(nodes - self.keepers.keys() - {*first})]
        # Ray has registered the Keepers, which free the groups if the Head dies, before it hears of
        # the groups. Their processes start while Ray reserves.
        checks = [self.create_keeper(node) for node in missing]
        groups = asyncio.ensure_future(self.groups.create(replicas, services))
        try:
            await asyncio.gather(*checks)
            await self.groups.read_gpus(replicas, await groups, self._has_gpus)
        finally:
            groups.cancel()
        return self.divide(replicas, services)

    async def remove(self, parts: Sequence[StackPart], replicas: Sequence[ReplicaPlace]) -> None:
        """Stop parts, then free the groups of these replicas."""
        for part in parts:
            self.parts.pop(part.number, None)
            keeper = self.keepers.get(part.node)
            if keeper is not None:
                calls = [keeper.stop_part.remote(part.name)]
                await asyncio.gather(*calls, return_exceptions=True)  # the node may be lost
        await self.groups.remove(replicas)

    def renew(self, part: StackPart) -> StackPart:
        """Return a new part with the same workers on the same node, in place of a dead one."""
        del self.parts[part.number]
        return self._make_part(part.node, list(part.workers))

    async def _learn_join(self, first: StackPart, start: asyncio.Future[None]) -> None:
        """Wait until the other parts can join; raise the error of the first part's start."""
        keeper = self.keepers[first.node]
        join = asyncio.ensure_future(keeper.wait_until_joinable.remote(first.name))
        await asyncio.wait({join, start}, return_when=asyncio.FIRST_COMPLETED)
        if not join.done():
            await start
        self.join = await join

    def note_nodes(self, nodes: Sequence[NodeInfo]) -> None:
        """Learn the addresses of the living nodes."""
        self.addresses = {node.id: node.address for node in nodes}
        # Also after all nodes but one were lost: another may come.
        self._is_spread = self._is_spread or len(nodes) > 1

    def describe(self, node: str) -> str:
        return f"node {self.addresses.get(node, '?')} ({node[:8]})"

    # --- keepers ---------------------------------------------------------------------------------

    async def ask_keepers(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the answers of all Keepers that answer, by their nodes; one may be lost."""
        keepers = dict(self.keepers)
        calls = [getattr(keeper, method).remote(*arguments) for keeper in keepers.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        pairs = zip(keepers, answers, strict=True)
        return {node: answer for node, answer in pairs if not isinstance(answer, BaseException)}

    def create_keeper(self, node: str) -> Coroutine[Any, Any, None]:
        """Create the Keeper of a node; return what learns what it finds there."""
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
        keeper = self.keepers[node] = options.remote(self.run_id, name, self._head)
        return self.examine(node, keeper)

    async def examine(self, node: str, keeper: Any) -> None:
        """Learn what a Keeper finds; raise StartError if its node lacks what is needed."""
        import ray

        where = self.describe(node).capitalize()
        problem = None
        try:
            self._has_gpus[node], problem = await keeper.examine.remote(self._needs)
        except ray.exceptions.RayError as error:  # it has gone, or is too new for Ray to use it
            self.drop_keeper(node, keeper)
            raise make_import_error(error, where) or error from None
        if problem is not None:
            # Another attempt is to look again, and meanwhile this Keeper has nothing to do.
            self.drop_keeper(node, keeper)
            raise StartError(f"{where}: {problem[0]}", problem[1])

    def drop_keeper(self, node: str, keeper: Any) -> None:
        """End a Keeper: another one takes its place."""
        import ray

        if self.keepers.get(node) is keeper:
            del self.keepers[node]
        ray.kill(keeper)

    # --- parts -----------------------------------------------------------------------------------

    def divide(
        self, replicas: Sequence[ReplicaPlace], services: str | None = None
    ) -> list[StackPart]:
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

    def _make_part(self, node: str, workers: list[tuple[ReplicaPlace, RankPlace]]) -> StackPart:
        number = self._next_part
        self._next_part += 1
        name = make_ray_part_name(self.spec.name, self.run_id, number)
        part = self.parts[number] = StackPart(number, name, node, workers)
        return part

    def get_services_fields(self, placement: Placement) -> dict[str, Any]:
        """Return what the spec of the first part has instead of a stack to join."""
        # A directory is not watched from another machine.
        return {} if len(placement.nodes) == 1 else {"discovery": "etcd"}

    async def launch(
        self, part: StackPart, fields: Mapping[str, Any] | None = None, after: Sequence[str] = ()
    ) -> None:
        """Start a part, which joins the first unless it has other `fields`, once the stacks `after`
        are gone from its node."""
        shared = [place for place, _ in part.workers if len(place.ranks) > 1]
        spec = self.make_spec(
            part,
            self.join if fields is None else fields,
            {place: await self._choose_rendezvous(place) for place in shared},
        )
        error = await self.keepers[part.node].start.remote(spec, list(after))
        if error is not None:
            message = f"On {self.describe(part.node)}: {error['message']}"
            raise restore_error({**error, "message": message})

    async def _choose_rendezvous(self, place: ReplicaPlace) -> dict[str, Any]:
        """Return the rendezvous of a replica's ranks; it is the same for all of them."""
        node = place.ranks[0].node
        if place not in self._rendezvous:
            lease = self.keepers[node].lease_ports.remote(self.addresses[node])
            self._rendezvous[place] = asyncio.ensure_future(lease)
        return make_rendezvous(self.addresses[node], *await self._rendezvous[place])

    def make_spec(
        self,
        part: StackPart,
        fields: Mapping[str, Any],
        rendezvous: Mapping[ReplicaPlace, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return the spec of a part's own stack."""
        placed = [
            PlacedWorker(
                model=place.model,
                replica=place.replica,
                role=place.role,
                gpus=self.groups.get_gpus(place, rank),
                node_rank=rank.node_rank,
                nodes=len(place.ranks),
                **rendezvous.get(place, {}),
            ).model_dump(mode="json")
            for place, rank in part.workers
        ]
        own = self.spec.model_dump(mode="json", exclude={"launcher", "ray", "placed", "join"})
        own |= {**fields, "name": part.name, "placed": placed, "python": get_python(self.spec)}
        own["observe"]["part_of"] = f"{self.spec.name}/{self.run_id}"
        if self._is_spread:
            address = self.addresses[part.node]
            own["admin_host"] = choose_host(self.spec.admin_host, address)
            own["frontend"]["host"] = choose_host(self.spec.frontend.host, address)
        if self.spec.log_dir is not None and part.number != SERVICES:
            own["log_dir"] = str(self.spec.log_dir / f"node-{part.number}")
        return own


def make_rendezvous(host: str, master: int, rpc: int, admin: int) -> dict[str, Any]:
    """Return where the ranks of a replica over several nodes meet: on the node of rank 0."""
    return {"master": f"{host}:{master}", "rpc_port": rpc, "admin_port": admin}


def choose_host(requested: str, address: str) -> str:
    """Return where to listen: other nodes do not reach loopback, nor dial all addresses."""
    return address if requested in ("127.0.0.1", "localhost", *WILDCARDS) else requested


# --- `rollway up --on ray --dry-run` -------------------------------------------------------------


class _ExamplePorts(Lease):
    """Numbers ports from the first one that a node would use; reserves nothing here."""

    def __init__(self) -> None:
        self._next = itertools.count(FIRST)

    def reserve_port(self, wanted: int, host: str, what: str) -> int:
        return wanted or next(self._next)


def plan_processes(
    spec: StackSpec, placement: Placement, nodes: Sequence[NodeInfo]
) -> list[dict[str, Any]]:
    """Return all processes of a stack that is placed on these nodes, as JSON has them: node, GPUs
    and command. Ports are examples, because each node reserves its own, and so is the namespace;
    GPUs are counted, because Ray assigns them."""
    run_id, run_dir = "0" * 16, Path("/tmp/rollway-dry-run")
    parts, ports = Parts(spec, run_id, None), _ExamplePorts()
    parts.note_nodes(nodes)
    rendezvous = {
        place: make_rendezvous(
            parts.addresses[place.ranks[0].node],
            *(ports.reserve_port(0, "", "") for _ in range(3)),
        )
        for place in placement.replicas
        if len(place.ranks) > 1
    }
    fields = parts.get_services_fields(placement)
    rows = []
    for part in parts.divide(placement.replicas, services=placement.services):
        plan = plan_stack(
            StackSpec.model_validate(parts.make_spec(part, fields, rendezvous)),
            run_id=run_id,
            run_dir=run_dir,
            log_dir=run_dir,
            ports=ports,
            find_program=lambda name, _: name,  # it is looked for on the node
        )
        fields = fields | plan.join_spec
        gpus = {(place.model, place.role, place.replica): rank.gpus for place, rank in part.workers}
        for process in plan.processes:
            placed = process.placed
            key = placed and (placed.model, placed.role, placed.replica)
            rows.append({
                "process": process.name,
                "model": process.model or "",
                "role": placed.role if placed else "",
                "replica": placed.replica if placed else None,
                "rank": placed.node_rank if placed else None,
                "node": part.node,
                "address": parts.addresses[part.node],
                "gpus": gpus[key] if key else 0.0,
                "argv": process.argv,
                "env": process.env,
            })  # fmt: skip
    return rows
