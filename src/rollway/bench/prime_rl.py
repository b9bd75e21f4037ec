"""`rollway bench prime-rl`: prime-rl's own clients through the server, against Dynamo alone.

    single, 64,  the released `renderers` client, at the server and straight at Dynamo's own
    512          generate route of the same workers, by turns, with so many episodes in flight
    controller   how many episodes prime-rl's own concurrency controller allows, by which address
                 it reads the engines' metrics from (from a checkout: ROLLWAY_PRIME_RL_SRC)
    pause        how long running rollouts get no token while a model of 500 MB is broadcast, and
                 while Dynamo updates it from disk
    broadcast    prime-rl's `nccl` broadcast over gloo, against Rollway's own `collective`

All engines are real vLLM workers. Arms alternate, and a ratio is the median of the rounds' ratios:
a machine that slows down affects both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rollway.aio import up
from rollway.api import make_spec
from rollway.bench import Say, prime_rl_broadcast, prime_rl_pause, round_floats
from rollway.errors import RollwayError, UsageError
from rollway.integrations.prime_rl.serve import API_KEY

SOURCE = "ROLLWAY_PRIME_RL_SRC"
"""Environment variable: a checkout of prime-rl, which is not on a package index."""
VERIFIERS = "ROLLWAY_VERIFIERS_SRC"
"""Environment variable: a checkout of the verifiers of its time; its submodule without it."""
LIMITS = {
    "single": 0.85, "64": 0.9, "512": 0.9, "controller": 1.0, "pause": 0.25, "broadcast": 0.8,
}  # fmt: skip
"""The pause at most, the others at least."""
MODEL = "bench"
_DRIVER = Path(__file__).with_name("prime_rl_driver.py")
_DRIVER_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Load:
    """Episodes of two turns, so many at once."""

    name: str
    episodes: int
    in_flight: int
    rounds: int
    max_tokens: int = 64
    """Of each turn. Shorter turns are more requests for the same work of the engines."""


LOADS = (Load("single", 4, 1, 9), Load("64", 128, 64, 7), Load("512", 512, 512, 3, max_tokens=32))
EPISODE = {"prompt_tokens": 128, "turns": 2}
PARTS = (*(load.name for load in LOADS), "controller", "pause", "broadcast")


async def bench_prime_rl(
    python: Path, model: Path, scratch: Path, say: Say, *, parts: Sequence[str] = PARTS
) -> dict[str, Any]:
    """Measure these parts; `python` is the interpreter that has `renderers`."""
    if not python.is_file():
        raise UsageError(
            f"There is no interpreter {python}.",
            "Run `make setup-prime-rl`, or name the one that has renderers: --prime-rl-python.",
        )
    figures: dict[str, Any] = {"limits": LIMITS}
    loads = [load for load in LOADS if load.name in parts]
    if loads or "controller" in parts:
        needs_controller = "controller" in parts
        figures |= await _measure_clients(python, model, scratch, say, loads, needs_controller)
    if "pause" in parts:
        figures["pause"] = await prime_rl_pause.measure(scratch, say, _serve)
    if "broadcast" in parts:
        say("broadcast: 500 MB to two processes, by prime-rl's messages and by ours")
        figures["broadcast"] = await asyncio.to_thread(prime_rl_broadcast.measure)
    return round_floats(figures, ".4g")


async def _measure_clients(
    python: Path,
    model: Path,
    scratch: Path,
    say: Say,
    loads: Sequence[Load],
    needs_controller: bool,
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    args = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 64}
    served = {"path": str(model), "name": MODEL, "replicas": 2, "args": args}
    say("starting two vLLM workers")
    spec = make_spec({"name": "bench-prime-rl", "models": [served]})
    async with up(spec) as stack, _serve(stack.name, scratch) as server:
        job = _Job(python, scratch, stack.frontend_url, server)
        if loads:
            measure = partial(_measure_throughput, job, model, say, loads)
            figures["throughput"] = await asyncio.to_thread(measure)
        if needs_controller:
            figures["controller"] = await asyncio.to_thread(_measure_controller, job, say)
    return figures


@contextlib.asynccontextmanager
async def _serve(stack: str, output_dir: Path) -> AsyncIterator[str]:
    """Run `rollway prime-rl serve` in a process of its own; yield its address."""
    command = [sys.executable, "-m", "rollway.cli", "prime-rl", "serve", stack, "--json"]
    command += ["--port", "0", "--output-dir", str(output_dir)]
    command += ["--journal", str(output_dir / f"{stack}.jsonl")]
    os.environ.setdefault(API_KEY, secrets.token_hex(16))  # for the server and its clients
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RollwayError("The server did not start.")
        yield str(json.loads(line)["url"]).removesuffix("/v1")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# --- throughput and controller --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """Where the driver runs, and the two addresses that it compares."""

    python: Path
    scratch: Path
    frontend: str
    server: str

    def run(self, part: str, job: dict[str, Any], **env: str) -> Iterator[dict[str, Any]]:
        """Yield what the driver prints, in the environment of prime-rl's clients."""
        file, log = self.scratch / f"{part}.json", self.scratch / f"{part}.log"
        file.write_text(json.dumps(job))
        # -P: `prime_rl` is prime-rl, not the module beside the driver.
        command = [str(self.python), "-P", str(_DRIVER), part, str(file)]
        quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as errors:
            driver = subprocess.Popen(
                command,
                env={**os.environ, **quiet, **env},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            if driver.poll() is None and sys.exc_info()[0] is not None:
                driver.kill()
            driver.wait(_DRIVER_SECONDS)
        if driver.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RollwayError(f"prime-rl's client ended with {driver.returncode}:\n{tail}")


def _measure_throughput(job: _Job, model: Path, say: Say, loads: Sequence[Load]) -> dict[str, Any]:
    runs = list_runs(loads)
    urls = {"rollway": f"{job.server}/v1", "dynamo": f"{job.frontend}/v1"}
    fields = {"tokenizer": str(model), "model": MODEL, "urls": urls, "runs": runs, **EPISODE}
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for run in job.run("episodes", fields):
        rate = run["tokens"] / run["seconds"]
        rates.setdefault((run["load"], run["round"]), {})[run["arm"]] = rate
        say(f"{run['load']} in flight, {run['arm']}: {rate:.0f} tokens/s")
    return {load.name: summarize(load, rates) for load in loads}


def list_runs(loads: Sequence[Load] = LOADS) -> list[dict[str, Any]]:
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


def summarize(load: Load, rates: dict[tuple[str, int], dict[str, float]]) -> dict[str, Any]:
    """Return tokens per second of each arm, and the ratio, without the warm-up."""
    rounds = [rates[load.name, number] for number in range(1, load.rounds + 1)]
    ratios = [both["rollway"] / both["dynamo"] for both in rounds]
    return {
        "tokens_per_second": {arm: median(r[arm] for r in rounds) for arm in rounds[0]},
        "ratio": median(ratios),
        "ratios": ratios,
    }


def _measure_controller(job: _Job, say: Say) -> dict[str, Any]:
    """Return the episodes that prime-rl's controller allows with our metrics, and with Dynamo's."""
    source = os.environ.get(SOURCE)
    if not source:
        return {"skipped": f"{SOURCE} names no checkout of prime-rl"}
    job = replace(job, python=_find_source_python(job.python))
    urls = {"rollway": job.server, "dynamo": job.frontend}
    # Its own verifiers, beside it: the environment of a checkout has none.
    verifiers = os.environ.get(VERIFIERS) or f"{source}/deps/verifiers"
    parts = f"{source}/src", f"{source}/packages/prime-rl-configs/src", verifiers
    path = os.pathsep.join(parts)
    lines = list(job.run("controller", {"urls": urls, "seq_len": 2048}, PYTHONPATH=path))
    allowed = {line["arm"]: line["allowed"] for line in lines}
    maximum = lines[0]["maximum"]
    say(f"controller: {allowed} of {maximum} episodes")
    return {"maximum": maximum, "allowed": allowed, "ratio": allowed["rollway"] / maximum}


def _find_source_python(python: Path) -> Path:
    """Return the interpreter for a checkout: that of the environment beside, if there is one."""
    beside = python.parents[1].with_name(f"{python.parents[1].name}-src") / "bin" / "python"
    return beside if beside.is_file() else python


def format_figures(figures: dict[str, Any]) -> str:
    """Write the figures as a table in Markdown."""
    lines = ["| | Dynamo | Rollway | ratio | limit |", "|---|---:|---:|---:|---:|"]
    for title, theirs, ours, ratio, name in _list_rows(figures):
        limit = f"at {'most' if name == 'pause' else 'least'} {figures['limits'][name]}"
        lines.append(f"| {title} | {theirs:g} | {ours:g} | {ratio:.2f} | {limit} |")
    if reason := figures.get("controller", {}).get("skipped"):
        lines += ["", f"The controller was not measured: {reason}."]
    return "\n".join(lines)


def _list_rows(figures: dict[str, Any]) -> Iterator[tuple[str, float, float, float, str]]:
    """Yield title, Dynamo's figure, ours, the ratio and the name of its limit."""
    for name, load in figures.get("throughput", {}).items():
        rate = load["tokens_per_second"]
        title = "one episode at a time" if name == "single" else f"{name} episodes in flight"
        yield f"{title}, tokens/s", rate["dynamo"], rate["rollway"], load["ratio"], name
    if "allowed" in (controller := figures.get("controller", {})):
        allowed, title = controller["allowed"], f"episodes allowed, of {controller['maximum']}"
        yield title, allowed["dynamo"], allowed["rollway"], controller["ratio"], "controller"
    if pause := figures.get("pause"):
        theirs, ours = pause["seconds"]["stock"], pause["seconds"]["rollway"]
        title = "pause of running rollouts, s"
        yield title, theirs["pause"], ours["pause"], pause["ratio"], "pause"
    if broadcast := figures.get("broadcast"):
        seconds = broadcast["seconds"]["collective"], broadcast["seconds"]["broadcast"]
        yield "`nccl` over gloo against `collective`, s", *seconds, broadcast["ratio"], "broadcast"
