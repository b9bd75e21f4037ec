"""Place the replicas of a stack on the nodes of a cluster. Pure: nothing here talks to Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where one replica runs: one entry per node."""

    model: str
    replica: int
    role: str
    ranks: tuple[RankPlace, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the whole stack runs."""

    services: str
    """The id of the node of the frontend and the services."""
    replicas: tuple[ReplicaPlace, ...]
