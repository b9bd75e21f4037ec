"""Place the replicas of a stack on the nodes of a cluster. Pure: nothing here talks to Ray.

    spec ──list_pools──► replicas and their ranks ─┐
                                                   ├─► plan_placement ──► Placement: the node of the
    nodes (free CPUs, GPUs, labels, head) ─────────┘                      services, and of each rank

- A node may be used if it has the labels of `ray.labels`, and is not the head with `head: avoid`.
- Every rank reserves `ray.cpus` and `ray.gpus`. The services and the frontend reserve `ray.cpus`
  once, on the head node if it may be used: the cluster does not survive the head anyway.
- A replica is whole on one node if that is possible, else spread evenly over as few nodes as
  possible. Replicas fill nodes before they open new ones, so that whole nodes stay free for others.
- The same nodes and the same spec give the same placement.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from rollway.config import StackSpec
from rollway.errors import PlacementError, SpecError
from rollway.model_spec import ModelSpec
from rollway.ranks import LAUNCH_ARGS, RaySpec, normalise_option
from rollway.stack.ray.packing import SearchLimit, Shape, list_splits, pack

_EPSILON = 1e-6  # Ray counts in steps of 0.0001, which sums of floats miss


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of the cluster, with what is free on it."""

    id: str
    address: str
    is_head: bool
    cpus: float
    gpus: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The ranks of a replica on one node, with what they reserve together."""

    node: str
    node_rank: int
    gpus: float
    cpus: float
    gpu_ids: tuple[str, ...] = ()
    """GPUs that the caller holds for them already, so that Ray reserves none."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where one replica runs: one entry per node."""

    model: str
    replica: int
    role: str
    ranks: tuple[RankPlace, ...]

    def __str__(self) -> str:
        return f"{self.model} {self.role}".rstrip() + f" replica {self.replica}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the whole stack runs."""

    services: str
    """The id of the node of the frontend and the services."""
    replicas: tuple[ReplicaPlace, ...]


@dataclass(frozen=True, slots=True)
class WaitingReplica:
    """A replica that has no room at the moment."""

    place: ReplicaPlace
    """Where it ran."""
    reason: str


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one model that are alike."""

    role: str
    replicas: int
    ranks: int
    engine_ranks: int
    """The ranks of one data-parallel engine."""


def list_pools(model: ModelSpec) -> tuple[Pool, ...]:
    """List the pools of a model: one, unless prefill and decode are apart."""
    return tuple(
        Pool(role, part.replicas, part.ranks, part.ranks // part.data_parallel)
        for role, part in model.roles.items()
    )


def plan_placement(spec: StackSpec, nodes: Sequence[NodeInfo]) -> Placement:
    """Place the services and every replica; raise SpecError if they do not fit."""
    check_ranks(spec)
    usable = _select_nodes(spec.ray, nodes)
    replicas = list(_list_replicas(spec))
    total = sum(pool.ranks for _, pool, _ in replicas)
    capacities = [_count_room(spec.ray, node, total) for node in usable]
    shapes = [Shape(p.ranks, list_splits(p.ranks, p.engine_ranks)) for _, p, _ in replicas]
    is_unknown = False
    # First without splits that no replica needs for itself, wherever the services then run.
    for is_narrow in (True, False):
        for services in _list_service_nodes(spec.ray, usable, capacities, total):
            room = list(capacities)
            room[services] = _count_room(spec.ray, usable[services], total, services=True)
            try:
                places = pack(room, shapes, is_narrow=is_narrow)
            except SearchLimit:
                is_unknown = not is_narrow
                continue
            if places is not None:
                replica_places = _make_places(spec.ray, usable, replicas, places)
                return Placement(usable[services].id, replica_places)
    raise _make_refusal(spec, usable, replicas, capacities, is_unknown)


def place_again(
    spec: StackSpec, placement: Placement, nodes: Sequence[NodeInfo], lost: Set[str]
) -> tuple[tuple[ReplicaPlace, ...], tuple[WaitingReplica, ...]]:
    """Find new places for the replicas that had a rank on a lost node.

    `nodes` is what is free after the groups of these replicas were removed. Returns the replicas
    with their new places, and those that must wait. Call it again when the cluster has changed."""
    usable = [n for n in _select_nodes(spec.ray, nodes, may_be_empty=True) if n.id not in lost]
    pools = {(model.name, pool.role): pool for model in spec.models for pool in list_pools(model)}
    affected = [
        place for place in placement.replicas if any(rank.node in lost for rank in place.ranks)
    ]
    affected.sort(key=lambda place: -pools[place.model, place.role].ranks)
    sizes = [pools[place.model, place.role] for place in affected]
    shapes = [Shape(pool.ranks, list_splits(pool.ranks, pool.engine_ranks)) for pool in sizes]
    room = [_count_room(spec.ray, node, sum(pool.ranks for pool in sizes)) for node in usable]
    placed: list[ReplicaPlace] = []
    waiting: list[WaitingReplica] = []
    for place, pool, chosen in zip(affected, sizes, _pack_what_fits(room, shapes), strict=True):
        if chosen is None:
            waiting.append(WaitingReplica(place, _explain_wait(spec.ray, pool, usable, room)))
        else:
            ranks = _make_ranks(spec.ray, usable, pool, chosen)
            placed.append(ReplicaPlace(place.model, place.replica, place.role, ranks))
    return tuple(placed), tuple(waiting)


def _pack_what_fits(room: list[int], shapes: Sequence[Shape]) -> list[list[int] | None]:
    """Return the nodes of each replica, None for those that must wait; reduce `room` by the rest.

    If not all fit, the largest come first, one by one: those that do not fit must not keep others
    from starting."""
    together = None
    with contextlib.suppress(SearchLimit):
        together = pack(room, shapes, is_narrow=True) or pack(room, shapes)
    places: list[list[int] | None] = []
    for number, shape in enumerate(shapes):
        alone = [together[number]] if together is not None else pack(room, [shape])
        places.append(alone[0] if alone else None)
        for nodes in alone or ():
            for node in nodes:
                room[node] -= shape.ranks // len(nodes)
    return places


def check_ranks(spec: StackSpec) -> None:
    """Raise SpecError for sizes and options with which no cluster can place a model."""
    for model in spec.models:
        if 0 < spec.ray.gpus < 1 and any(pool.ranks > 1 for pool in list_pools(model)):
            raise SpecError(
                f"`ray.gpus` is {spec.ray.gpus:g}, but replicas of `{model.name}` have several "
                "ranks, which cannot share GPUs with others.",
                "Use whole GPUs (`ray.gpus: 1`), or one rank per replica.",
            )
        if model.engine != "vllm":
            continue
        for name in (name for part in model.roles.values() for name in part.args):
            if normalise_option(name) in LAUNCH_ARGS:
                raise SpecError(
                    f"`args.{name}` of `{model.name}` says which part of a replica a process is, "
                    "which the Ray launcher decides.",
                    "Remove it, and give the sizes: `tensor_parallel`, `pipeline_parallel`, "
                    "`data_parallel`.",
                )


# --- nodes ---------------------------------------------------------------------------------------


def _select_nodes(
    ray: RaySpec, nodes: Sequence[NodeInfo], *, may_be_empty: bool = False
) -> list[NodeInfo]:
    """Return the nodes that the stack may use, in a fixed order."""
    allowed = [node for node in nodes if not (node.is_head and ray.head == "avoid")]
    usable = [node for node in allowed if has_labels(node, ray.labels)]
    if not usable and not may_be_empty:
        if not nodes:
            raise SpecError("The cluster has no nodes.", "Start Ray on them: `ray start`.")
        if not allowed:
            raise SpecError(
                "`ray.head` is `avoid`, but the cluster has only its head node.",
                "Add nodes with `ray start --address …`, or set `ray.head: use`.",
            )
        wanted = ", ".join(f"{key}={value}" for key, value in ray.labels.items())
        raise SpecError(
            f"None of the {len(allowed)} nodes that the stack may use has the labels of "
            f"`ray.labels` ({wanted}).",
            "Start nodes with `ray start --labels …`, or change `ray.labels`.",
        )
    return sorted(usable, key=lambda node: (not node.is_head, node.address, node.id))


def has_labels(node: NodeInfo, selector: Mapping[str, str]) -> bool:
    """Return whether a node matches a selector: `value`, `!value`, `in(a, b)` or `!in(a, b)`."""
    for key, condition in selector.items():
        is_negated = condition.startswith("!")
        text = condition.removeprefix("!")
        group = re.fullmatch(r"in\((.*)\)", text)
        values = [part.strip() for part in group[1].split(",")] if group else [text]
        if (node.labels.get(key) in values) == is_negated:
            return False
    return True


def _count_room(ray: RaySpec, node: NodeInfo, total: int, *, services: bool = False) -> int:
    """Return how many ranks a node can take; all `total` ones if they reserve nothing."""
    rooms = []
    if ray.cpus:
        rooms.append(int(node.cpus / ray.cpus + _EPSILON) - services)
    if ray.gpus:
        # Ray never combines parts of two GPUs: with 0.4 each, a GPU takes two ranks, not 2.5.
        whole = int(node.gpus + _EPSILON)
        per_gpu = int(1 / ray.gpus + _EPSILON)
        part = int((node.gpus - whole) / ray.gpus + _EPSILON)
        rooms.append(whole * per_gpu + max(0, part))
    return max(0, min(rooms, default=total))


def _list_service_nodes(
    ray: RaySpec, nodes: Sequence[NodeInfo], capacities: Sequence[int], total: int
) -> Iterator[int]:
    """Yield the nodes that may run the services, the best first: the head, then those where they
    take no room from a rank. Of nodes that make no difference to the ranks, only the first."""
    seen = set()

    def rate(position: int) -> tuple[bool, int, float, int]:
        node = nodes[position]
        loss = capacities[position] - _count_room(ray, node, total, services=True)
        return not node.is_head, loss, -node.cpus, position

    for position in sorted(range(len(nodes)), key=rate):
        if nodes[position].cpus + _EPSILON < ray.cpus:
            continue
        key = capacities[position], rate(position)[1]
        if key not in seen:
            seen.add(key)
            yield position


# --- replicas ------------------------------------------------------------------------------------

_Replica = tuple[str, Pool, int]
"""A model, one of its pools, and the number of a replica in it."""


def _list_replicas(spec: StackSpec) -> Iterator[_Replica]:
    for model in spec.models:
        for pool in list_pools(model):
            yield from ((model.name, pool, replica) for replica in range(pool.replicas))


def _make_places(
    ray: RaySpec,
    nodes: Sequence[NodeInfo],
    replicas: Sequence[_Replica],
    places: Sequence[Sequence[int]],
) -> tuple[ReplicaPlace, ...]:
    return tuple(
        ReplicaPlace(model, replica, pool.role, _make_ranks(ray, nodes, pool, chosen))
        for (model, pool, replica), chosen in zip(replicas, places, strict=True)
    )


def _make_ranks(
    ray: RaySpec, nodes: Sequence[NodeInfo], pool: Pool, chosen: Sequence[int]
) -> tuple[RankPlace, ...]:
    count = pool.ranks // len(chosen)
    return tuple(
        RankPlace(nodes[node].id, node_rank, gpus=count * ray.gpus, cpus=count * ray.cpus)
        for node_rank, node in enumerate(chosen)
    )


# --- refusals ------------------------------------------------------------------------------------


def _explain_wait(ray: RaySpec, pool: Pool, nodes: Sequence[NodeInfo], room: Sequence[int]) -> str:
    splits = " or ".join(
        f"{count} x {here}" for count, here in list_splits(pool.ranks, pool.engine_ranks)
    )
    free = ", ".join(
        f"{ranks} on {node.address}" for node, ranks in zip(nodes, room, strict=True) if ranks
    )
    return (
        f"it needs room for {pool.ranks} ranks of {_describe_rank(ray)} "
        f"(nodes x ranks: {splits}); free: {free or 'none'}"
    )


def _make_refusal(
    spec: StackSpec,
    nodes: Sequence[NodeInfo],
    replicas: Sequence[_Replica],
    capacities: Sequence[int],
    is_unknown: bool,
) -> PlacementError:
    ray = spec.ray
    ranks, room = sum(pool.ranks for _, pool, _ in replicas), sum(capacities)
    if all(node.cpus + _EPSILON < ray.cpus for node in nodes):
        message = (
            f"No node has {ray.cpus:g} CPUs (`ray.cpus`) free for the frontend and the services."
        )
    elif ranks > room:
        message = (
            f"The stack needs {ranks} ranks of {_describe_rank(ray)}, but the nodes that it may "
            f"use have room for {room}."
        )
    elif is_unknown:
        message = (
            f"No placement of {ranks} ranks was found within the time limit, though the nodes have "
            f"room for {room}."
        )
    else:
        message = (
            f"The nodes have room for {room} ranks of {_describe_rank(ray)}, but no even split of "
            f"every replica over nodes fits them"
            + (f", beside {ray.cpus:g} CPU for the frontend and the services." if ray.cpus else ".")
        )
    hint = "Lower `replicas` or the parallel sizes, add nodes, or free some."
    if ray.gpus and sum(node.gpus for node in nodes) < 1:
        hint = "Set `ray.gpus: 0` for engines on the CPU, or add nodes with GPUs."
    return PlacementError(message, hint, tried=_list_attempts(spec, nodes, replicas, capacities))


def _describe_rank(ray: RaySpec) -> str:
    return f"{ray.gpus:g} GPU and {ray.cpus:g} CPU each"


def _list_attempts(
    spec: StackSpec,
    nodes: Sequence[NodeInfo],
    replicas: Sequence[_Replica],
    capacities: Sequence[int],
) -> list[str]:
    """Return lines that show what was tried, and what is free."""
    lines = []
    for model in spec.models:
        for pool in list_pools(model):
            name = f"{model.name} {pool.role}".rstrip()
            tries = ", ".join(
                f"{count} x {here} ({sum(room >= here for room in capacities)} nodes have {here})"
                for count, here in list_splits(pool.ranks, pool.engine_ranks)
            )
            lines.append(f"{name}: {pool.replicas} replicas of {pool.ranks} ranks; tried nodes x "
                         f"ranks: {tries}")  # fmt: skip
    shown = sorted(zip(capacities, nodes, strict=True), key=lambda entry: -entry[0])
    for room, node in shown[:_MOST_SHOWN]:
        lines.append(
            f"{node.address}{' (head)' if node.is_head else ''}: {node.gpus:g} GPUs and "
            f"{node.cpus:g} CPUs free, room for {room} ranks"
        )
    if len(nodes) > _MOST_SHOWN:
        lines.append(f"and {len(nodes) - _MOST_SHOWN} more nodes")
    return lines


_MOST_SHOWN = 16
