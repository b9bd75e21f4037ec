"""`rollway bench verl`: measure the prefix-cache hits of verl's own agent loops for each affinity.

The same prompts go through verl's `AgentLoopManager` and `LLMServerManager` to
`rollout.name=dynamo`. Arms with the same router mode alternate in one stack, whose caches are
cleared before every batch, as for new weights. The engines count the hits of each request.

Rollouts of a prompt share all of it; prompts share a system prompt. The tokenizer has one token per
byte, so characters are tokens. verl's environment imports this module for the prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from rollway.demo.task import INSTRUCTION
from rollway.errors import RollwayError, UsageError
from rollway.integrations.verl.requests import RequestRecord, read_log
from rollway.integrations.verl.spec import Affinity

ROLLOUTS = 8
"""Rollouts of each prompt."""
TURNS = 4
SYSTEM_TOKENS = 256
QUESTION_TOKENS = 384
"""Tokens before the instruction, which has 137."""
OBSERVATION_TOKENS = 96
TOOL = "look_up"
TOOL_SECONDS = 0.25
"""Average duration of a call."""
LONGEST_PROMPT = 832
LONGEST_RESPONSE = 1024
"""Of all turns and observations; a turn has 9 tokens on average, and sometimes 60."""


@dataclass(frozen=True, slots=True)
class Load:
    """The number of prompts in a batch."""

    name: str
    prompts: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a load. Its prompts differ from those of other batches, and every arm gets the
    same ones."""

    load: Load
    number: int

    @property
    def name(self) -> str:
        return f"{self.load.name}-{self.number}"

    def messages(self) -> list[list[dict[str, str]]]:
        """Return the first messages of each rollout; rollouts of a prompt are adjacent."""
        return [
            _make_messages(f"{self.name}/{prompt}", start=prompt % 10)
            for prompt in range(self.load.prompts)
            for _ in range(ROLLOUTS)
        ]


def _make_messages(name: str, start: int) -> list[dict[str, str]]:
    question = f"{make_text(name, QUESTION_TOKENS)}\n{INSTRUCTION}{start}"
    return [
        {"role": "system", "content": make_text("system", SYSTEM_TOKENS - 1) + "\n"},
        {"role": "user", "content": question},
    ]


def make_text(seed: str, length: int) -> str:
    """Return text of this length, always the same for a seed."""
    rng = Random(seed)
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) + " "
    return text[:length]


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    router_mode: str
    affinity: Affinity


ARMS = (
    Arm("group", "kv", "group"),
    Arm("trajectory", "kv", "trajectory"),
    Arm("off", "kv", "off"),
    Arm("round robin", "round-robin", "off"),
)
BASELINE = "off"
RATES = ("hit_rate", "first_turns", "later_turns", "together")
WORKERS = 4
CACHE_BLOCKS = 416
"""Blocks of 32 tokens in each engine: the smaller load always fits, the larger never does."""
LOADS = (Load("fits", 8), Load("scarce", 24))
BATCHES = 2
_WARM_UP = Load("warm-up", WORKERS)
_SECONDS = 1800.0
"""Limit for one stack and its batches."""


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The figures of one batch in one arm."""

    hit_rate: float
    """Fraction of prompt tokens that were cached."""
    first_turns: float
    """The same for the first requests of trajectories, and for all later ones."""
    later_turns: float
    together: float
    """Fraction of requests that went to the worker most used by their group."""
    ms_per_token: float
    """Time from the first request to the last answer, tools included, per sampled token."""
    requests: int

    @classmethod
    def compute(cls, records: Sequence[RequestRecord], seconds: float) -> BatchFigures:
        first, later = split_turns(records)
        return cls(
            hit_rate=measure_hit_rate(records),
            first_turns=measure_hit_rate(first),
            later_turns=measure_hit_rate(later),
            together=measure_togetherness(records),
            ms_per_token=1000 * seconds / sum(record.output_tokens for record in records),
            requests=len(records),
        )


@dataclass(frozen=True, slots=True)
class ArmFigures:
    arm: str
    load: str
    batches: tuple[BatchFigures, ...]

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(batch, name) for batch in self.batches)

    def spread(self, name: str) -> tuple[float, float]:
        values = [getattr(batch, name) for batch in self.batches]
        return min(values), max(values)


@dataclass(slots=True)
class VerlReport:
    rows: list[ArmFigures]

    def time_ratio(self, row: ArmFigures) -> float | None:
        """Return the time per token relative to the arm without affinity, under the same load."""
        for other in self.rows:
            if (other.arm, other.load) == (BASELINE, row.load):
                return row.mean("ms_per_token") / other.mean("ms_per_token")
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "workers": WORKERS,
            "cache_blocks": CACHE_BLOCKS,
            "loads": {load.name: load.prompts for load in LOADS},
            "rollouts": ROLLOUTS,
            "turns": TURNS,
            "rows": [
                {
                    "arm": row.arm,
                    "load": row.load,
                    **{name: round(row.mean(name), 4) for name in RATES},
                    "ms_per_token": round(row.mean("ms_per_token"), 3),
                    "time_ratio": self.time_ratio(row),
                    "batches": [asdict(batch) for batch in row.batches],
                }
                for row in self.rows
            ],
        }


def measure_hit_rate(records: Sequence[RequestRecord]) -> float:
    prompt = sum(record.prompt_tokens for record in records)
    return sum(record.cached_tokens for record in records) / prompt if prompt else 0.0


def split_turns(
    records: Iterable[RequestRecord],
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Split into first and later turns; records are in the order of their answers."""
    first: dict[str | None, RequestRecord] = {}
    later = []
    for record in records:
        if first.setdefault(record.trajectory, record) is not record:
            later.append(record)
    return list(first.values()), later


def measure_togetherness(records: Sequence[RequestRecord]) -> float:
    by_group: dict[str | None, Counter[int | None]] = defaultdict(Counter)
    for record in records:
        by_group[record.group][record.worker] += 1
    most = sum(max(workers.values()) for workers in by_group.values())
    return most / len(records) if records else 0.0


# --- runs ----------------------------------------------------------------------------------------


def bench_verl(
    python: Path, model: Path, scratch: Path, arms: Sequence[Arm], report: Callable[[str], None]
) -> VerlReport:
    if not python.is_file():
        raise UsageError(
            f"There is no interpreter {python}.",
            "Run `make setup-verl`, or name the one of your verl environment: --verl-python.",
        )
    rows: list[ArmFigures] = []
    for router_mode in dict.fromkeys(arm.router_mode for arm in arms):
        group = [arm for arm in arms if arm.router_mode == router_mode]
        for figures in measure_arms(router_mode, group, python, model, scratch / router_mode):
            rows.append(figures)
            report(
                f"{figures.arm}, {figures.load}: {figures.mean('hit_rate'):.3f} hits, "
                f"{figures.mean('ms_per_token'):.2f} ms per token"
            )
    return VerlReport([row for load in LOADS for row in rows if row.load == load.name])


def measure_arms(
    router_mode: str, arms: Sequence[Arm], python: Path, model: Path, directory: Path
) -> list[ArmFigures]:
    """Measure arms that share a stack; results that exist already are only read."""
    results = directory / "results"
    if not all((results / f"{_name(*run)}.seconds").is_file() for run in list_runs(arms)):
        shutil.rmtree(directory, ignore_errors=True)
        results.mkdir(parents=True)
        run_stack(router_mode, arms, python, model, directory)
    return [
        ArmFigures(
            arm.name,
            load.name,
            tuple(_read_batch(arm, Batch(load, number), results) for number in range(BATCHES)),
        )
        for load in LOADS
        for arm in arms
    ]


def run_stack(
    router_mode: str, arms: Sequence[Arm], python: Path, model: Path, directory: Path
) -> None:
    """Run all batches in verl's environment."""
    # A short path, since Ray puts sockets there.
    ray_directory = Path(tempfile.mkdtemp(prefix="rollway-ray-"))
    overrides = list_overrides(router_mode, model, directory)
    job = {
        "overrides": [f"{name}={value}" for name, value in overrides],
        "batches": [
            {
                "name": _name(arm, batch),
                "load": asdict(batch.load),
                "number": batch.number,
                "affinity": arm.affinity,
            }
            for arm, batch in list_runs(arms)
        ],
        "request_log": str(directory / "answers.jsonl"),
        "results": str(directory / "results"),
        "ray": {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": 4 * WORKERS + 8,  # what verl reserves, not what the machine has
            "num_gpus": WORKERS,
            "object_store_memory": 200 << 20,
            "_temp_dir": str(ray_directory),
        },
    }
    (directory / "job.json").write_text(json.dumps(job, indent=2))
    try:
        _run_driver(python, directory)
    finally:
        shutil.rmtree(ray_directory, ignore_errors=True)


def list_runs(arms: Sequence[Arm]) -> list[tuple[Arm, Batch]]:
    """List all batches in order: a warm-up that reaches every worker and is not counted, then arms
    alternately forward and backward, so that no arm always runs first."""
    runs = [(Arm("warm-up", "", "off"), Batch(_WARM_UP, 0))]
    for number in range(BATCHES):
        for load in LOADS:
            runs += [(arm, Batch(load, number)) for arm in arms[:: 1 if number % 2 == 0 else -1]]
    return runs


def _name(arm: Arm, batch: Batch) -> str:
    return f"{arm.name}-{batch.name}".replace(" ", "-")


def list_overrides(router_mode: str, model: Path, directory: Path) -> list[tuple[str, Any]]:
    """List overrides of verl's config. Ray only counts the GPUs."""
    rollout = "actor_rollout_ref.rollout"
    dynamo = f"+{rollout}.engine_kwargs.dynamo"
    multi_turn = f"{rollout}.multi_turn"
    return [
        ("actor_rollout_ref.model.path", model),
        ("data.max_prompt_length", LONGEST_PROMPT),
        ("data.max_response_length", LONGEST_RESPONSE),
        (f"{rollout}.name", "dynamo"),
        (f"{rollout}.nnodes", 1),
        (f"{rollout}.n_gpus_per_node", WORKERS),
        (f"{rollout}.tensor_model_parallel_size", 1),
        (f"{rollout}.dtype", "float32"),
        (f"{rollout}.max_num_seqs", 64),
        (f"{rollout}.free_cache_engine", False),
        (f"{rollout}.calculate_log_probs", True),
        (f"{rollout}.agent.num_workers", 1),
        (f"{multi_turn}.enable", True),
        (f"{multi_turn}.format", TOOL),
        (f"{multi_turn}.function_tool_path", Path(__file__).with_name("verl_tool.py")),
        (f"{multi_turn}.max_assistant_turns", TURNS),
        (f"{dynamo}.python", sys.executable),
        (f"{dynamo}.log_dir", directory / "logs"),
        (f"{dynamo}.request_log", directory / "answers.jsonl"),
        (f"{dynamo}.engine_args.num-gpu-blocks-override", CACHE_BLOCKS),
        (f"{dynamo}.router_mode", router_mode),
    ]


def _run_driver(python: Path, directory: Path) -> None:
    output = directory / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [str(python), "-m", "rollway.bench.verl_driver", str(directory / "job.json")],
            env={
                **os.environ,
                "VERL_USE_EXTERNAL_MODULES": "rollway.integrations.verl.register",
                "RAY_raylet_start_wait_time_s": "200",
                "RAY_DEDUP_LOGS": "0",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        returncode = process.wait(_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Ray's processes are in its session
        process.wait()
    if returncode:
        last = "\n".join(output.read_text(errors="replace").splitlines()[-30:])
        raise RollwayError(f"verl's agent loops ended with {returncode}:\n{last}")


def _read_batch(arm: Arm, batch: Batch, results: Path) -> BatchFigures:
    name = _name(arm, batch)
    records = read_log(results / f"{name}.jsonl")
    return BatchFigures.compute(records, float((results / f"{name}.seconds").read_text()))
