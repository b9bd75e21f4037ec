"""`rollway bench prime-rl`: prime-rl's own clients through the server, against Dynamo alone.

    single, 64,  the released `renderers` client, at the server and straight at Dynamo's own
    512          generate route of the same workers, by turns, with so many episodes in flight

All engines are real vLLM workers. Arms alternate, and a ratio is the median of the rounds' ratios:
a machine that slows down affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import round_floats
from benchmarks.children import start_child
from benchmarks.inputs import build_demo_model, read_parts
from rollway.aio import up
from rollway.api import make_spec
from rollway.cli.output import print_progress
from rollway.errors import RollwayError, UsageError
from rollway.integrations.prime_rl.serve import API_KEY

LIMITS = {"single": 0.85, "64": 0.9, "512": 0.9}
MODEL = "bench"
_DRIVER = Path(__file__).with_name("prime_rl_driver.py")
_DRIVER_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class EpisodeLoad:
    """Episodes of two turns, so many at once."""

    name: str
    episodes: int
    in_flight: int
    rounds: int
    max_tokens: int = 64
    """Of each turn. Shorter turns are more requests for the same work of the engines."""


LOADS = (
    EpisodeLoad("single", 4, 1, 9),
    EpisodeLoad("64", 128, 64, 7),
    EpisodeLoad("512", 512, 512, 3, max_tokens=32),
)
EPISODE = {"prompt_tokens": 128, "turns": 2}
PARTS = tuple(load.name for load in LOADS)


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    parts, python = read_parts(options, PARTS), options.prime_rl_python.absolute()
    if not python.is_file():
        raise UsageError(
            f"There is no interpreter {python}.",
            "Run `make setup-prime-rl`, or name the one that has renderers: --prime-rl-python.",
        )
    loads = [load for load in LOADS if load.name in parts]
    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        figures = asyncio.run(_measure_clients(python, Path(scratch), loads))
    return 0, round_floats({"limits": LIMITS, "throughput": figures}, ".4g")


async def _measure_clients(
    python: Path, scratch: Path, loads: Sequence[EpisodeLoad]
) -> dict[str, Any]:
    """Measure these loads; `python` is the interpreter that has `renderers`."""
    model = build_demo_model()
    args = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 64}
    served = {"path": str(model), "name": MODEL, "replicas": 2, "args": args}
    print_progress("starting two vLLM workers")
    spec = make_spec({"name": "bench-prime-rl", "models": [served]})
    os.environ.setdefault(API_KEY, secrets.token_hex(16))  # for the server and its clients
    serve = ["rollway.cli", "prime-rl", "serve", spec.name, "--json", "--port", "0"]
    serve += ["--output-dir", str(scratch), "--journal", str(scratch / "gateway.sqlite")]
    async with up(spec) as stack, start_child(*serve) as (_, ready):
        urls = {"rollway": ready["url"], "dynamo": f"{stack.frontend_url}/v1"}
        fields = {"tokenizer": str(model), "model": MODEL, "urls": urls, **EPISODE}
        fields["runs"] = list_runs(loads)
        runs = await asyncio.to_thread(lambda: list(_drive(python, scratch, fields)))
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for run in runs:
        rate = run["tokens"] / run["seconds"]
        rates.setdefault((run["load"], run["round"]), {})[run["arm"]] = rate
    return {load.name: summarize(load, rates) for load in loads}


def _drive(python: Path, scratch: Path, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the driver prints, in the environment of prime-rl's clients."""
    file, log = scratch / "job.json", scratch / "driver.log"
    file.write_text(json.dumps(job))
    # -P: `prime_rl` is prime-rl, not the module beside the driver.
    command = [str(python), "-P", str(_DRIVER), str(file)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as driver,
    ):
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                if line.startswith("{"):
                    print_progress(line.rstrip())
                    yield json.loads(line)
            driver.wait(_DRIVER_SECONDS)
        finally:
            driver.kill()
    if driver.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RollwayError(f"prime-rl's client ended with {driver.returncode}:\n{tail}")


def list_runs(loads: Sequence[EpisodeLoad] = LOADS) -> list[dict[str, Any]]:
    """List the runs of these loads in order. The first round of a load is its warm-up; then the two
    arms alternate in which is first."""
    return [
        {
            "name": f"{load.name}-{number}-{arm}",
            "arm": arm,
            "load": load.name,
            "round": number,
            "episodes": load.episodes,
            "in_flight": load.in_flight,
            "max_tokens": load.max_tokens,
        }
        for load in loads
        for number in range(load.rounds + 1)
        for arm in (("rollway", "dynamo"), ("dynamo", "rollway"))[number % 2]
    ]


def summarize(load: EpisodeLoad, rates: dict[tuple[str, int], dict[str, float]]) -> dict[str, Any]:
    """Return tokens per second of each arm, and the ratio, without the warm-up."""
    rounds = [rates[load.name, number] for number in range(1, load.rounds + 1)]
    ratios = [both["rollway"] / both["dynamo"] for both in rounds]
    return {
        "tokens_per_second": {arm: median(r[arm] for r in rounds) for arm in rounds[0]},
        "ratio": median(ratios),
        "ratios": ratios,
    }
