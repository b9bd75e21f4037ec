"""The report of a refit: the final state of every worker, with times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollway.errors import RefitError, RollwayError

RefitMode = Literal["pause-all", "rolling", "in-flight", "keep"]
"""pause-all: all workers at once, running requests finish first. in-flight: all workers at once,
running requests are aborted and continued on the new weights. rolling: a share of the workers at a
time, so that generation never stops. keep: all workers at once, running requests stay in the engine
and continue on the new weights, with their KV cache computed again; needs workers that name the
versions of their tokens."""

State = Literal[
    "untouched", "paused", "updating", "in doubt", "serving", "restored", "gone", "replaced",
    "joining", "asleep",
]  # fmt: skip
"""See the drawing in rollway.fleet.worker_refit."""


@dataclass(slots=True)
class WorkerReport:
    """What a refit did to one worker."""

    instance_id: int
    state: State = "untouched"
    version: int | None = None
    proof: str = ""
    """How the weights were verified: `parameters`, `canary`, `declared` (by its label alone) or
    `earlier refit`."""
    strategy: str = ""
    """How the staged weights reached the serving parameters, as the worker reports it, and why."""
    preflight_seconds: float = 0.0
    """The check before the pause, with the staging of the weights. Each of these times is 0 unless
    its step succeeded."""
    pause_seconds: float = 0.0
    """From its leaving the routing until it is paused."""
    update_seconds: float = 0.0
    """The load or swap of the weights, the flush of the cache, and the verification."""
    resume_seconds: float = 0.0
    """From the verification until it serves the version."""
    waited_seconds: float = 0.0
    """How long running requests took to end before the pause (pause-all and rolling)."""
    paused_seconds: float = 0.0
    """How long the engine generated nothing because of the refit."""
    calls: int = 0
    """Calls of the preflight, and the order to refit, each of which waits for the worker's event
    loop. A worker that takes orders needs two: to stage the weights, and to refit. An order to
    stage that is repeated counts once; calls that wake a worker, and single calls after the
    preflight, do not count."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of every step, in the order in which they ended. Steps inside an order have a dot:
    `order.engine.swap` is part of `order.engine`."""
    memory: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Of a worker that slept: the memory of every rank `asleep` and `after` the refit woke it."""
    error: str | None = None


@dataclass(slots=True)
class RefitReport:
    """The outcome of one refit.

    Example:
        report = stack.refit(1, "/checkpoints/step-1")
        print(report.seconds, report.paused_seconds, report.serving)
    """

    version: int
    mode: RefitMode = "pause-all"
    seconds: float = 0.0
    paused_seconds: float = 0.0
    """The longest time for which a worker generated nothing because of the refit. Workers that are
    refitted by single calls count from the first pause to the last resume of their share."""
    waited_seconds: float = 0.0
    """The longest time that running requests took to end before that."""
    passes: int = 0
    """How often the workers were listed and refitted; more than 1 if some joined meanwhile."""
    workers: list[WorkerReport] = field(default_factory=list)
    """For each worker its state, version, proof, error, and the seconds of its preflight, pause,
    update and resume."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON types, with instance ids as text: readers that store numbers
        as doubles would round them."""
        return _as_json(self)

    @property
    def serving(self) -> int:
        """How many workers serve the version."""
        return sum(worker.state == "serving" for worker in self.workers)


SleepState = Literal["asleep", "awake", "serving", "joining"]


@dataclass(slots=True)
class WorkerSleep:
    """What a sleep or a wake did to one worker."""

    instance_id: int
    state: SleepState = "awake"
    """`serving`: it was woken. `awake`: nothing was to do. `asleep`: also after a wake, if the
    worker needs a refit first. `joining`: it was still starting, and is left alone."""
    level: int = 0
    """The level at which it sleeps, or slept."""
    version: int | None = None
    """The version that it serves, or will serve after a wake; None if it needs a refit."""
    memory: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Of each rank `before` a sleep and `asleep`, or `asleep` and `after` a wake: the device, its
    `free` and `total` bytes for all processes, the `asleep_bytes` of each pool of this rank, and
    the `resident` bytes of its process in the host's memory. `releases` is False for an engine that
    keeps its memory (on CPU)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`leave`: out of the routing. `sleep`: until running requests have ended and memory is
    released. `wake`: until memory is back. `enter`: into the routing."""


@dataclass(slots=True)
class SleepReport:
    """The outcome of a sleep or a wake.

    Example:
        report = stack.sleep(level=2)
        print(report.seconds, report.asleep, report.released_bytes)
    """

    level: int = 0
    """The level of the sleep; 0 for a wake."""
    seconds: float = 0.0
    workers: list[WorkerSleep] = field(default_factory=list)

    @property
    def asleep(self) -> int:
        """How many workers sleep now."""
        return sum(worker.state == "asleep" for worker in self.workers)

    @property
    def released_bytes(self) -> int:
        """How much memory of devices the sleeping workers have released. Unlike the free memory,
        it does not count twice where workers share a device."""
        ranks = [rank for worker in self.workers for rank in worker.memory.get("asleep", [])]
        return sum(sum(rank["asleep_bytes"].values()) for rank in ranks)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON types, with instance ids as text."""
        return _as_json(self) | {"asleep": self.asleep, "released_bytes": self.released_bytes}


def _as_json(report: RefitReport | SleepReport) -> dict[str, Any]:
    fields = asdict(report)
    for worker in fields["workers"]:
        worker["instance_id"] = str(worker["instance_id"])
    return fields


def refit_error(report: RefitReport, cause: RollwayError | None = None) -> RefitError:
    """Return the error of a refit that did not reach every worker."""
    states = "; ".join(
        f"worker {worker.instance_id}: {worker.state}"
        + (f" ({worker.error})" if worker.error else "")
        for worker in report.workers
    )
    reason = f" {cause.message}" if cause else ""
    return RefitError(
        f"Not every worker is on version {report.version}.{reason} {states}.",
        "Workers in doubt stay paused, so that nothing is sampled from them. Refit again with a "
        "good checkpoint, or restart them.",
        report=report,
    )
