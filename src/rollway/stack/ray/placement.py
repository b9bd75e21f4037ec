"""Place the replicas of a stack on the nodes of a cluster. Pure: nothing here talks to Ray.

    spec ── replicas and their ranks ──────────────┐
                                                   ├─► plan_placement ──► Placement: the node of the
    nodes (free CPUs, GPUs, labels, head) ─────────┘                      services, and of each rank

- A node may be used if it has the labels of `ray.labels`, and is not the head with `head: avoid`.
- Every rank reserves `ray.cpus` and `ray.gpus`, so a node is one number: the ranks it has room for.
  The services and the frontend reserve `ray.cpus` once, where they take no room from a rank; on the
  head node if there is a choice: the cluster does not survive the head anyway.
- The largest replicas choose first. A replica is whole on one node if that is possible, else spread
  evenly over as few nodes as possible; of several nodes it takes those that it fills best, so that
  whole nodes stay free for others. No choice is taken back.
- The same nodes and the same spec give the same placement.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollway.errors import PlacementError, SpecError
from rollway.model_spec import LAUNCH_ARGS, normalise_option
from rollway.spec import RaySpec, StackSpec
from rollway.stack.ray.cluster import NodeInfo

_EPSILON = 1e-6  # Ray counts in steps of 0.0001, which sums of floats miss


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

    @property
    def nodes(self) -> set[str]:
        """The ids of all nodes that it uses."""
        return {self.services, *(rank.node for place in self.replicas for rank in place.ranks)}


@dataclass(frozen=True, slots=True)
class _Replica:
    """A replica that needs a place."""

    model: str
    role: str
    number: int
    ranks: int
    engine_ranks: int
    """The ranks of one data-parallel engine."""

    @property
    def splits(self) -> list[tuple[int, int]]:
        """The even splits over nodes, as (nodes, ranks on each), the fewest nodes first. vLLM puts
        whole data-parallel engines on a node, or one engine on several nodes, never parts of two
        engines on one node."""
        splits = [(n, self.ranks // n) for n in range(1, self.ranks + 1) if self.ranks % n == 0]
        whole = self.engine_ranks
        return [(n, here) for n, here in splits if here % whole == 0 or whole % here == 0]


def plan_placement(spec: StackSpec, nodes: Sequence[NodeInfo]) -> Placement:
    """Place the services and every replica; raise SpecError if they do not fit."""
    check_ranks(spec)
    usable = _select_nodes(spec.ray, nodes)
    replicas = list(_list_replicas(spec))
    total = sum(replica.ranks for replica in replicas)
    room = [_count_room(spec.ray, node, total) for node in usable]
    left = [_count_room(spec.ray, node, total, services=True) for node in usable]
    services = min(
        (i for i, node in enumerate(usable) if node.cpus + _EPSILON >= spec.ray.cpus),
        key=lambda i: (room[i] - left[i], not usable[i].is_head, -usable[i].cpus, i),
        default=None,
    )
    if services is not None:
        chosen = _fit(replicas, [*room[:services], left[services], *room[services + 1 :]])
        if all(chosen):
            pairs = zip(replicas, chosen, strict=True)
            places = tuple(_make_place(spec.ray, usable, *pair) for pair in pairs)
            return Placement(usable[services].id, places)
    raise _make_refusal(spec, usable, replicas, room)


def place_again(
    spec: StackSpec, displaced: Sequence[ReplicaPlace], nodes: Sequence[NodeInfo]
) -> tuple[list[ReplicaPlace], list[str]]:
    """Find new places for replicas whose nodes were lost.

    `nodes` is what is free after the groups of these replicas were removed. Returns the replicas
    with their new places, and a sentence about each that must wait. Call it again when the cluster
    has changed."""
    lost = {(place.model, place.role, place.replica) for place in displaced}
    replicas = [r for r in _list_replicas(spec) if (r.model, r.role, r.number) in lost]
    usable = _select_nodes(spec.ray, nodes, may_be_empty=True)
    room = [_count_room(spec.ray, node, sum(r.ranks for r in replicas)) for node in usable]
    placed, waiting = [], []
    chosen = _fit(replicas, room)
    free = ", ".join(
        f"{ranks} on {node.address}" for node, ranks in zip(usable, room, strict=True) if ranks
    )
    for replica, positions in zip(replicas, chosen, strict=True):
        place = _make_place(spec.ray, usable, replica, positions)
        if positions:
            placed.append(place)
        else:
            splits = " or ".join(f"{count} x {here}" for count, here in replica.splits)
            waiting.append(
                f"{place}: it needs room for {replica.ranks} ranks of {_describe_rank(spec.ray)} "
                f"(nodes x ranks: {splits}); free: {free or 'none'}"
            )
    return placed, waiting


def _fit(replicas: Sequence[_Replica], room: list[int]) -> list[list[int]]:
    """Return the nodes of each replica, none for those that do not fit; reduce `room`."""
    chosen: list[list[int]] = [[] for _ in replicas]
    for index in sorted(range(len(replicas)), key=lambda index: -replicas[index].ranks):
        for count, here in replicas[index].splits:
            fitting = [node for node, ranks in enumerate(room) if ranks >= here]
            if len(fitting) >= count:
                chosen[index] = sorted(heapq.nsmallest(count, fitting, key=room.__getitem__))
                for node in chosen[index]:
                    room[node] -= here
                break
    return chosen


def check_ranks(spec: StackSpec) -> None:
    """Raise SpecError for sizes and options with which no cluster can place a model."""
    for model in spec.models:
        if 0 < spec.ray.gpus < 1 and any(part.ranks > 1 for part in model.roles.values()):
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


# --- replicas ------------------------------------------------------------------------------------


def _list_replicas(spec: StackSpec) -> Iterator[_Replica]:
    for model in spec.models:
        for role, part in model.roles.items():
            for number in range(part.replicas):
                engine_ranks = part.ranks // part.data_parallel
                yield _Replica(model.name, role, number, part.ranks, engine_ranks)


def _make_place(
    ray: RaySpec, nodes: Sequence[NodeInfo], replica: _Replica, positions: Sequence[int]
) -> ReplicaPlace:
    count = replica.ranks // (len(positions) or 1)
    ranks = tuple(
        RankPlace(nodes[node].id, node_rank, gpus=count * ray.gpus, cpus=count * ray.cpus)
        for node_rank, node in enumerate(positions)
    )
    return ReplicaPlace(replica.model, replica.number, replica.role, ranks)


# --- refusals ------------------------------------------------------------------------------------


def _make_refusal(
    spec: StackSpec, nodes: Sequence[NodeInfo], replicas: Sequence[_Replica], room: Sequence[int]
) -> PlacementError:
    ray = spec.ray
    ranks, free = sum(replica.ranks for replica in replicas), sum(room)
    if all(node.cpus + _EPSILON < ray.cpus for node in nodes):
        message = (
            f"No node has {ray.cpus:g} CPUs (`ray.cpus`) free for the frontend and the services."
        )
    elif ranks > free:
        message = (
            f"The stack needs {ranks} ranks of {_describe_rank(ray)}, but the nodes that it may "
            f"use have room for {free}."
        )
    else:
        message = (
            f"The nodes have room for {free} ranks of {_describe_rank(ray)}, but no even split of "
            f"every replica over nodes was found, the largest first"
            + (f", beside {ray.cpus:g} CPU for the frontend and the services." if ray.cpus else ".")
        )
    hint = "Lower `replicas` or the parallel sizes, add nodes, or free some."
    if ray.gpus and sum(node.gpus for node in nodes) < 1:
        hint = "Set `ray.gpus: 0` for engines on the CPU, or add nodes with GPUs."
    return PlacementError(message, hint, tried=_list_attempts(nodes, replicas, room))


def _describe_rank(ray: RaySpec) -> str:
    return f"{ray.gpus:g} GPU and {ray.cpus:g} CPU each"


def _list_attempts(
    nodes: Sequence[NodeInfo], replicas: Sequence[_Replica], room: Sequence[int]
) -> list[str]:
    """Return lines that show what was tried, and what is free."""
    lines = []
    pools = {(replica.model, replica.role): replica for replica in replicas}
    for (model, role), last in pools.items():
        tries = ", ".join(
            f"{count} x {here} ({sum(ranks >= here for ranks in room)} nodes have {here})"
            for count, here in last.splits
        )
        lines.append(f"{f'{model} {role}'.rstrip()}: {last.number + 1} replicas of {last.ranks} "
                     f"ranks; tried nodes x ranks: {tries}")  # fmt: skip
    lines += [
        f"{node.address}{' (head)' if node.is_head else ''}: {node.gpus:g} GPUs and "
        f"{node.cpus:g} CPUs free, room for {ranks} ranks"
        for ranks, node in sorted(zip(room, nodes, strict=True), key=lambda entry: -entry[0])
    ]
    return lines
