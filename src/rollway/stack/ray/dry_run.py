"""`rollway up --on ray --dry-run`: which process would run where, with which command.

The commands come from the planner that the nodes' supervisors use. Ports are examples, because each
node reserves its own, and so is the namespace; GPUs are counted, because Ray assigns them.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollway.config import StackSpec
from rollway.ranks import PlacedWorker
from rollway.stack.locks import FIRST, Lease
from rollway.stack.plan import ProcessPlan, StackPlan, plan_stack
from rollway.stack.ray.node_check import get_python
from rollway.stack.ray.parts import choose_host
from rollway.stack.ray.placement import NodeInfo, Placement

COLUMNS = ("process", "replica", "rank", "node", "GPUs", "command")
_RUN_DIR = Path("/tmp/rollway-dry-run")


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One row of the table."""

    process: str
    model: str
    role: str
    replica: int | None
    rank: int | None
    """Its position among the nodes of the replica."""
    node: str
    address: str
    gpus: float
    argv: list[str]
    env: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_row(self) -> tuple[str, ...]:
        number, rank = ("" if value is None else str(value) for value in (self.replica, self.rank))
        return self.process, number, rank, self.address, f"{self.gpus:g}", shlex.join(self.argv)


class _ExamplePorts(Lease):
    """Numbers ports from the first one that a node would use; reserves nothing here."""

    def __init__(self) -> None:
        self._next = itertools.count(FIRST)

    def reserve_port(self, wanted: int, host: str, what: str) -> int:
        return wanted or next(self._next)


def plan_processes(
    spec: StackSpec, placement: Placement, nodes: Sequence[NodeInfo]
) -> list[PlannedProcess]:
    """Return all processes of a stack that is placed on these nodes."""
    addresses = {node.id: node.address for node in nodes}
    gpus = {
        (place.model, place.role, place.replica, rank.node_rank): rank.gpus
        for place in placement.replicas
        for rank in place.ranks
    }
    rows = []
    for node, plan in _plan_nodes(spec, placement, addresses):
        for process in plan.processes:
            placed = process.placed
            key = placed and (placed.model, placed.role, placed.replica, placed.node_rank)
            count = gpus[key] if key else 0.0
            rows.append(_make_row(process, node, addresses[node], count))
    return rows


def _make_row(process: ProcessPlan, node: str, address: str, gpus: float) -> PlannedProcess:
    placed = process.placed
    return PlannedProcess(
        process=process.name,
        model=process.model or "",
        role=placed.role if placed else "",
        replica=placed.replica if placed else None,
        rank=placed.node_rank if placed else None,
        node=node,
        address=address,
        gpus=gpus,
        argv=process.argv,
        env=process.env,
    )


def _plan_nodes(
    spec: StackSpec, placement: Placement, addresses: dict[str, str]
) -> Iterator[tuple[str, StackPlan]]:
    """Yield the plan of each node, that of the services first: the others join it."""
    ports = _ExamplePorts()
    workers = _place_workers(placement, addresses, ports)
    is_spread = len({placement.services, *workers}) > 1
    fields: dict[str, Any] = {"launcher": "local", "python": get_python(spec)}
    if is_spread and spec.discovery == "file":
        fields["discovery"] = "etcd"  # a directory is not watched from another machine
    for node in dict.fromkeys([placement.services, *workers]):
        own = {**fields, "placed": workers.get(node, [])}
        if len(addresses) > 1:  # also if the stack runs on one of them only
            own["admin_host"] = choose_host(spec.admin_host, addresses[node])
            host = choose_host(spec.frontend.host, addresses[node])
            own["frontend"] = spec.frontend.model_copy(update={"host": host})
        plan = plan_stack(
            StackSpec.model_validate({**spec.model_dump(), **_as_data(own)}),
            run_id="0" * 16,
            run_dir=_RUN_DIR,
            log_dir=_RUN_DIR,
            ports=ports,
            find_program=lambda name, _: name,  # it is looked for on the node
        )
        fields |= plan.join_spec
        yield node, plan


def _as_data(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields as plain data, which a spec is validated from."""
    return {
        name: value.model_dump() if hasattr(value, "model_dump") else value
        for name, value in fields.items()
    }


def _place_workers(
    placement: Placement, addresses: dict[str, str], ports: _ExamplePorts
) -> dict[str, list[dict[str, Any]]]:
    """Return the workers of each node, as the spec of its supervisor has them."""
    workers: dict[str, list[dict[str, Any]]] = {}
    for place in placement.replicas:
        rendezvous: dict[str, Any] = {}
        if len(place.ranks) > 1:
            host = addresses[place.ranks[0].node]
            master, rpc, admin = (ports.reserve_port(0, host, "") for _ in range(3))
            rendezvous = {"master": f"{host}:{master}", "rpc_port": rpc, "admin_port": admin}
        for rank in place.ranks:
            worker = PlacedWorker(
                model=place.model,
                replica=place.replica,
                role=place.role,
                node_rank=rank.node_rank,
                nodes=len(place.ranks),
                **rendezvous,
            )
            workers.setdefault(rank.node, []).append(worker.model_dump())
    return workers
