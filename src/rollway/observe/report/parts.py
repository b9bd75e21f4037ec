"""The parts of a summary: a worker, a refit, what a transport carried, a time of stale weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollway.observe.bins import Bins


@dataclass(slots=True)
class WorkerSummary:
    """One worker over the whole run, all its processes together."""

    name: str
    hits_over_time: Bins
    """The share of its prompt tokens that it found."""
    node: str = ""
    role: str = ""
    state: str = ""
    version: int | None = None
    restarts: int = 0
    deaths: int = 0
    refits: int = 0
    slow_refits: int = 0
    failed_refits: int = 0
    hits: float = 0.0
    queries: float = 0.0
    samples: int = 0
    kv: float = 0.0
    kv_full: int = 0
    unread: int = 0
    """Samples in which its page could not be read."""


@dataclass(slots=True)
class RefitPoint:
    """One refit, as far as plots and findings need it."""

    t: float
    version: int
    seconds: float
    paused: float
    outcome: str
    phases: tuple[float, ...]
    error: str = ""
    kept_out: list[str] = field(default_factory=list)
    """Workers that did not serve after it, with their errors."""


@dataclass(slots=True)
class Transfers:
    """What one transport carried, and how long the slowest worker took to check and stage it."""

    refits: int = 0
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class StaleTime:
    """A time in which not every serving worker had the newest version."""

    began: float
    ended: float
    workers: int
