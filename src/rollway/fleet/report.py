"""What a refit tells: the state of every worker, with times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollway.errors import RefitError, RollwayError

RefitMode = Literal["pause-all", "rolling", "in-flight"]
"""pause-all: all at once, running requests finish first. in-flight: all at once, running requests
are cut short and continued on the new weights. rolling: a share of the workers at a time, so that
generation never stops."""

State = Literal[
    "untouched",
    "paused",
    "updating",
    "in doubt",
    "serving",
    "restored",
    "gone",
    "replaced",
    "joining",
]


@dataclass(slots=True)
class WorkerRefit:
    """What a refit did to one worker."""

    instance_id: int
    state: State = "untouched"
    version: int | None = None
    proof: str = ""
    """What shows that it serves the new weights: its parameters, a canary, or its word alone."""
    pause_seconds: float = 0.0
    update_seconds: float = 0.0
    resume_seconds: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class RefitReport:
    """The outcome of one refit."""

    version: int
    mode: RefitMode = "pause-all"
    seconds: float = 0.0
    paused_seconds: float = 0.0
    """From the first pause to the last resume; with `rolling`, of the slowest share."""
    passes: int = 0
    workers: list[WorkerRefit] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Instance ids as text: JSON readers with doubles would round them."""
        plain = asdict(self)
        for worker in plain["workers"]:
            worker["instance_id"] = str(worker["instance_id"])
        return plain

    @property
    def serving(self) -> int:
        return sum(worker.state == "serving" for worker in self.workers)


def refit_error(report: RefitReport, cause: RollwayError | None = None) -> RefitError:
    states = "; ".join(
        f"worker {s.instance_id}: {s.state}" + (f" ({s.error})" if s.error else "")
        for s in report.workers
    )
    why = f" {cause.message}" if cause else ""
    return RefitError(
        f"Not every worker is on version {report.version}.{why} {states}.",
        "Workers in doubt stay paused, so that nothing is sampled from them. Refit again with a "
        "good checkpoint, or restart them.",
        report=report,
    )
