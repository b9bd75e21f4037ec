"""`rollway bench curator`: Curator's own Dynamo backend and Rollway's, on one cluster.

Both serve the same mockers to the same pipeline in one Ray cluster. They start and stop in turns;
for the rows per second both run beside each other, and short pipelines alternate. Curator's
environment runs the measurement (`benchmarks.curator_driver`), because it has Curator; this side
starts the cluster and reads the figures.

Curator's backend installs its workers at their start, from the network and for CUDA. Here it is
spared that: its runtime environment is emptied, and its commands run in the engine's environment.
So its start is measured without what costs it most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.inputs import build_demo_model
from chaos import make_environment
from rollway.cli.output import print_progress
from rollway.errors import RollwayError, UsageError

ROUNDS = 3
ROWS = 200
REPLICAS = 2
CPUS = 12
"""Ray counts them. Curator's backend takes three for its services, ours one; a worker takes one."""
FIGURES = ("ready_seconds", "stop_seconds")
LIMITS = {"ready": 1.0, "stop": 1.0, "rows": 0.98}
"""Ours against theirs: times at most, rates at least."""


Round = dict[str, Any]
"""One start and one stop of a `backend`: `ready_seconds` and `stop_seconds`."""
Rows = dict[str, list[float]]
"""By backend: rows per second of pipelines that alternate, in pairs, between the two."""


def make_report(rounds: list[Round], rows: Rows) -> dict[str, Any]:
    """Return medians, and ours against theirs; rows are compared within a pair."""
    medians: dict[str, dict[str, float]] = {}
    for backend in ("curator", "rollway"):
        own = [result for result in rounds if result["backend"] == backend]
        medians[backend] = {
            **{name: statistics.median(result[name] for result in own) for name in FIGURES},
            "rows_per_second": statistics.median(rows[backend]),
        }
    pairs = zip(rows["curator"], rows["rollway"], strict=True)
    ratios = [ours / theirs for theirs, ours in pairs]
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    theirs, ours = medians["curator"], medians["rollway"]
    return {
        "rounds": rounds,
        "medians": medians,
        "ready": ours["ready_seconds"] / theirs["ready_seconds"],
        "stop": ours["stop_seconds"] / theirs["stop_seconds"],
        "rows": middle,
        "rows_quartiles": [lower, upper],
        "rows_ratios": ratios,
        "limits": LIMITS,
    }


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    python = options.curator_python.absolute()
    if not python.exists():
        raise UsageError(
            f"There is no interpreter {python}.", "Run `make setup-curator`, or name another."
        )
    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        return 0, _bench_curator(python, Path(scratch))


def _bench_curator(python: Path, scratch: Path) -> dict[str, Any]:
    """Start a cluster in Curator's environment, which `python` is of, and measure both backends in
    it, in turns. Ray and both backends write to `scratch`."""
    engine, model = Path(sys.executable), build_demo_model()
    shim = _write_shim(scratch / "shim")
    env = {
        **make_environment(),
        # Curator's backend looks for `etcd` and `nats-server` on the PATH of Ray's workers.
        "PATH": f"{python.parent}:{engine.parent}:{os.environ['PATH']}",
        "ROLLWAY_ENGINE_PYTHON": str(engine),
        "SHIM": str(shim),
        "PYTHONUNBUFFERED": "1",
    }
    numbers = map(str, (ROUNDS, ROWS, REPLICAS, CPUS))
    command = [str(python), "-m", "benchmarks.curator_driver", str(model), *numbers]
    log = scratch / "driver.log"
    rounds: list[Round] = []
    rows: Rows = {}
    with log.open("w") as output:
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env=env, cwd=scratch
        )
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                entry = json.loads(line) if line.startswith("{") else {}
                if "backend" in entry:
                    rounds.append(entry)
                    print_progress(json.dumps(entry))
                elif entry:
                    rows = entry
        finally:
            if driver.poll() is None:
                driver.terminate()  # it stops the server and the cluster
            driver.wait()
    if driver.returncode != 0 or len(rounds) < 2 * ROUNDS or not rows:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RollwayError(f"The measurement ended with status {driver.returncode}:\n{tail}")
    return make_report(rounds, rows)


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
