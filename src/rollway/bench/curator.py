"""`rollway bench curator`: Curator's own Dynamo backend and Rollway's, on one cluster.

Both serve the same mockers to the same pipeline in one Ray cluster. They start and stop in turns;
for the rows per second both run beside each other, and short pipelines alternate. Curator's
environment runs the measurement (`rollway.bench.curator_driver`), because it has Curator; this side
starts the cluster and reads the figures.

Curator's backend installs its workers at their start, from the network and for CUDA. Here it is
spared that: its runtime environment is emptied, and its commands run in the engine's environment.
So its start is measured without what costs it most.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import RollwayError, UsageError

ROUNDS = 3
ROWS = 200
REPLICAS = 2
CPUS = 12
"""Ray counts them. Curator's backend takes three for its services, ours one; a worker takes one."""
FIGURES = ("ready_seconds", "stop_seconds")
LIMITS = {"ready": 1.0, "stop": 1.0, "rows": 0.98, "client": 0.95}
"""Ours against theirs: times at most, rates at least."""


@dataclass(frozen=True, slots=True)
class Round:
    """One start and one stop of a backend."""

    backend: str
    ready_seconds: float
    stop_seconds: float
    client_rates: list[float] = field(default_factory=list)
    """Requests per second of Curator's client, for each pair of runs."""
    bare_rates: list[float] = field(default_factory=list)
    """The same of OpenAI's own client to the same frontend, right before or after."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows per second of pipelines that alternate, in pairs, between both backends."""

    curator: list[float]
    rollway: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours against theirs, for each pair."""
        return [ours / theirs for theirs, ours in zip(self.curator, self.rollway, strict=True)]


@dataclass(frozen=True, slots=True)
class CuratorReport:
    """All rounds, and ours against theirs."""

    rounds: list[Round]
    rows: Rows

    def median(self, backend: str, figure: str) -> float:
        values = [float(getattr(r, figure)) for r in self.rounds if r.backend == backend]
        return statistics.median(values)

    def compare(self, figure: str) -> float:
        return self.median("rollway", figure) / self.median("curator", figure)

    @property
    def client_ratios(self) -> list[float]:
        """Curator's client against a bare one, through our server, for each pair of runs.

        The machine's speed changes by more than the clients differ: only runs that follow each
        other can be compared."""
        return [
            client / bare
            for result in self.rounds
            for client, bare in zip(result.client_rates, result.bare_rates, strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        lower, middle, upper = statistics.quantiles(self.client_ratios, n=4)
        rows_lower, rows_middle, rows_upper = statistics.quantiles(self.rows.ratios, n=4)
        return {
            "rounds": [asdict(r) for r in self.rounds],
            "medians": {
                backend: {
                    **{figure: self.median(backend, figure) for figure in FIGURES},
                    "rows_per_second": statistics.median(getattr(self.rows, backend)),
                }
                for backend in ("curator", "rollway")
            },
            "ready": self.compare("ready_seconds"),
            "stop": self.compare("stop_seconds"),
            "rows": rows_middle,
            "rows_quartiles": [rows_lower, rows_upper],
            "rows_ratios": self.rows.ratios,
            "client": middle,
            "client_quartiles": [lower, upper],
            "client_ratios": self.client_ratios,
            "client_rate": statistics.median(rate for r in self.rounds for rate in r.client_rates),
            "bare_rate": statistics.median(rate for r in self.rounds for rate in r.bare_rates),
            "limits": LIMITS,
        }


def format_figures(figures: dict[str, Any]) -> str:
    """Write the report as a table in Markdown: theirs, ours, the ratio and what is asked of it."""
    theirs, ours = figures["medians"]["curator"], figures["medians"]["rollway"]
    rows = [
        ("ready, s", theirs["ready_seconds"], ours["ready_seconds"], "ready", "at most"),
        ("stop, s", theirs["stop_seconds"], ours["stop_seconds"], "stop", "at most"),
        ("rows/s*", theirs["rows_per_second"], ours["rows_per_second"], "rows", "at least"),
        (
            "requests/s: bare client, Curator's**",
            *(figures["bare_rate"], figures["client_rate"]),
            *("client", "at least"),
        ),
    ]
    lines = ["| | Curator's | Rollway | ratio | limit |", "|---|---:|---:|---:|---:|"]
    for title, first, second, name, word in rows:
        limit = f"{word} {figures['limits'][name]}"
        lines.append(f"| {title} | {first:.1f} | {second:.1f} | {figures[name]:.2f} | {limit} |")
    notes = [
        f"\\* Both servers run; {_describe_pairs(figures, 'rows')}",
        f"\\*\\* Both through Rollway's server; {_describe_pairs(figures, 'client')}",
    ]
    return "\n".join([*lines, "", *notes])


def _describe_pairs(figures: dict[str, Any], name: str) -> str:
    lower, upper = figures[f"{name}_quartiles"]
    return (
        f"the ratio is the median of {len(figures[f'{name}_ratios'])} pairs of runs that follow "
        f"each other; half of them are between {lower:.2f} and {upper:.2f}."
    )


def bench_curator(
    python: Path, engine: Path, model: Path, scratch: Path, progress: Callable[[str], None]
) -> CuratorReport:
    """Start a cluster in Curator's environment, and measure both backends in it, in turns.

    Args:
        python: the interpreter of the environment with Curator.
        engine: the interpreter of the environment with Dynamo, and with etcd and NATS beside it.
        model: a checkpoint whose tokenizer the mockers use.
        scratch: where Ray and both backends write their files.
        progress: called with a line for each round.
    """
    if not python.exists():
        raise UsageError(
            f"There is no interpreter {python}.", "Run `make setup-curator`, or name another."
        )
    shim = _write_shim(scratch / "shim")
    env = {
        **os.environ,
        # Curator's backend looks for `etcd` and `nats-server` on the PATH of Ray's workers.
        "PATH": f"{python.parent}:{engine.parent}:{os.environ['PATH']}",
        "ROLLWAY_ENGINE_PYTHON": str(engine),
        "SHIM": str(shim),
        "PYTHONUNBUFFERED": "1",
    }
    numbers = map(str, (ROUNDS, ROWS, REPLICAS, CPUS))
    command = [str(python), "-m", "rollway.bench.curator_driver", str(model), *numbers]
    log = scratch / "driver.log"
    rounds: list[Round] = []
    rows = None
    with log.open("w") as output:
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env=env, cwd=scratch
        )
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                entry = json.loads(line) if line.startswith("{") else {}
                if "backend" in entry:
                    rounds.append(Round(**entry))
                    progress(_describe(rounds[-1]))
                elif entry:
                    rows = Rows(**entry)
        finally:
            if driver.poll() is None:
                driver.terminate()  # it stops the server and the cluster
            driver.wait()
    if driver.returncode != 0 or len(rounds) < 2 * ROUNDS or rows is None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RollwayError(f"The measurement ended with status {driver.returncode}:\n{tail}")
    return CuratorReport(rounds, rows)


def _describe(result: Round) -> str:
    return (
        f"{result.backend}: ready in {result.ready_seconds:.1f} s, stopped in "
        f"{result.stop_seconds:.1f} s"
    )


def _write_shim(directory: Path) -> Path:
    """Write modules that stand in for `dynamo.vllm` and `dynamo.frontend` in Curator's environment.

    They replace their process by the engine's Python: a mocker, and the real frontend."""
    for name, program in (("vllm", _MOCKER), ("frontend", _FRONTEND)):
        package = directory / "dynamo" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(program)
    return directory


_RUN = """
import os, sys
python = os.environ["ROLLWAY_ENGINE_PYTHON"]
env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
"""
_MOCKER = f"""{_RUN}
import argparse
parser = argparse.ArgumentParser()
for name in ("model", "served-model-name", "endpoint"):
    parser.add_argument("--" + name)
for name in ("discovery-backend", "request-plane", "event-plane"):
    parser.add_argument("--" + name)
options, _ = parser.parse_known_args()
env["DYN_DISCOVERY_BACKEND"] = options.discovery_backend
env["DYN_REQUEST_PLANE"] = options.request_plane
env["DYN_EVENT_PLANE"] = options.event_plane
env["DYN_NAMESPACE"] = options.endpoint.removeprefix("dyn://").split(".")[0]
command = [python, "-m", "dynamo.mocker", "--model-path", options.model]
command += ["--model-name", options.served_model_name, "--endpoint", options.endpoint]
os.execve(python, command, env)
"""
_FRONTEND = f"""{_RUN}
os.execve(python, [python, "-m", "dynamo.frontend", *sys.argv[1:]], env)
"""
