"""`rollway bench refit`: refit one real vLLM worker over every transport, in one run.

    stock       save a checkpoint, pause, Dynamo's update_weights_from_disk, resume
    files …     publish and refit: staged while the worker generates, swapped during a pause

    round 1     stock  files  shm  delta      two refits each, of which the second counts
    round 2     files  shm  delta  stock      ratios are taken within a round, then their median
    …

Two policies alternate, so that every refit changes every parameter; deltas change one element in a
hundred. After each refit, the worker's greedy answer is compared with its answer after a stock
update to the same policy.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import round_floats
from benchmarks.real_model import (
    CHANGED,
    SHAPES,
    Weights,
    change_all,
    draw_weights,
    update_by_stock,
    write_model,
)
from rollway.aio import Stack, up
from rollway.api import make_spec
from rollway.cli.output import print_progress as say
from rollway.errors import RolloutError
from rollway.rollout.sampling import Sampling
from rollway.stack.state import StackDir
from rollway.weights.digest.checksums import raw_bytes
from rollway.weights.offer import Offer
from rollway.weights.transports.collective import CollectivePublisher
from rollway.weights.transports.delta import DeltaPublisher
from rollway.weights.transports.delta.versions import DELTA
from rollway.weights.transports.files import FilesPublisher
from rollway.weights.transports.nixl import NixlPublisher
from rollway.weights.transports.shm import ShmPublisher

ROUNDS = 5
_NO_WEIGHTS = shutil.ignore_patterns("*.safetensors")
# The line that a worker logs after a swap (rollway.engine.staging).
_SERVED = re.compile(r"is served \((.*)\)")
_PARTS = ("load", "prove", "prepare", "swap")
"""The parts of a refit whose seconds the worker logs."""
STOCK = "stock"
Row = dict[str, float]


_FIGURES = {
    # Publishing and receiving, until the verified bytes are in the worker's memory. Dynamo's own
    # update reads, loads and packs in one step, during the pause, so this covers all of that.
    "seconds": 0.0,
    "gb_per_s": 0.0,
    "pause_seconds": 0.0,
    # The whole refit, from the trainer's tensors to serving.
    "refit_seconds": 0.0,
    "pause_fraction": 0.0,
    # Bytes moved per byte that the worker needed, and per byte of the model.
    "bytes_ratio": 1.0,
    "bytes_fraction": 1.0,
    "ratio_to_memcpy": 0.0,
    # Ratio of `seconds`; `refit_over_stock` compares whole refits.
    "speedup_over_stock": 0.0,
    "refit_over_stock": 0.0,
    "pause_over_stock": 0.0,
    "publish_seconds": 0.0,
    "load_seconds": 0.0,
    "prove_seconds": 0.0,
    "prepare_seconds": 0.0,
    "swap_seconds": 0.0,
}
"""The figures of a transport: medians over several refits. Stock has not all of them."""


@dataclass(slots=True)
class _Case:
    """A transport to measure."""

    publish: Callable[[int, Weights], Offer]
    before: Callable[[Weights], None] = lambda _: None
    """The trainer's work before publishing, which is not timed."""
    turns: tuple[int, ...] = (0, 1)
    get_share: Callable[[Offer], float] = lambda _: 1.0
    """Returns the bytes moved, as a share of the model's."""


@dataclass(slots=True)
class _Bench:
    stack: Stack
    model: Path
    scratch: Path
    policies: list[Weights]
    """Two that differ in nearly every element, and one that differs from the first in few."""
    answers: dict[int, list[int]] = field(default_factory=dict)
    version: int = 0

    async def remember_answers(self) -> None:
        """Update the worker to each policy by stock, and remember what it answers."""
        for index in range(len(self.policies)):
            await self.update_by_stock(index)
            self.answers[index] = await self._answer()

    async def update_by_stock(self, index: int) -> Row:
        """Update the worker as Dynamo's guide describes."""
        from safetensors.torch import save_file

        self.version += 1
        directory = self.scratch / f"stock-{self.version}"
        shutil.copytree(self.model, directory, ignore=_NO_WEIGHTS)
        began = time.perf_counter()
        save_file(self.policies[index], directory / "model.safetensors", {"format": "pt"})
        saved = time.perf_counter() - began
        paused = await update_by_stock(self.stack, directory, self.version)
        shutil.rmtree(directory)
        return {
            "publish_seconds": saved,
            "pause_seconds": paused,
            "refit_seconds": saved + paused,
            "seconds": saved + paused,
        }

    async def refit(self, case: _Case, index: int) -> Row:
        """Publish a policy and refit to it; return how long each part took."""
        self.version += 1
        case.before(self.policies[index])
        began = time.perf_counter()
        offer = case.publish(self.version, self.policies[index])
        published = time.perf_counter() - began
        report = await self.stack.refit(self.version, offer)
        ended = time.perf_counter() - began
        if self.answers[index] != await self._answer():
            raise RolloutError("The worker answers differently than after a stock update.")
        parts = self._read_parts()
        return {
            "publish_seconds": published,
            "refit_seconds": ended,
            "pause_seconds": report.paused_seconds,
            "bytes_fraction": case.get_share(offer),
            "seconds": published + parts["load_seconds"],
        } | parts

    async def _answer(self) -> list[int]:
        greedy = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
        (rollout,) = await self.stack.rollouts().generate(list(range(10, 40)), greedy)
        return rollout.token_ids

    def _read_parts(self) -> dict[str, float]:
        """Read the seconds of each part of the last refit from the worker's log."""
        lines = _SERVED.findall(self._read_log())
        parts = [part.split() for part in lines[-1].split(", ")] if lines else []
        seconds = {part[0]: float(part[1]) for part in parts}
        return {f"{name}_seconds": seconds.get(name, 0.0) for name in _PARTS}

    def _read_log(self) -> str:
        state = StackDir(self.stack.name).read()
        assert state is not None
        (log,) = [process.log for process in state.processes if process.role == "worker"]
        return Path(log).read_text(errors="replace")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        bench = _bench_refit(Path(scratch), options.megabytes, options.transports)
        return 0, round_floats(asyncio.run(bench), ".4f")


async def _bench_refit(scratch: Path, megabytes: int, wanted: Sequence[str]) -> dict[str, Any]:
    """Measure the transports that `wanted` names; without names, all of them."""
    say(f"building a model of about {megabytes} MB")
    # The 1.7B's layers, of 100 MB each.
    layers = max(1, -(-(megabytes - 33) // 100))
    shape = {**SHAPES["2b"], "num_hidden_layers": layers, "vocab_size": 4096}
    model, first = scratch / "model", draw_weights(shape, torch.device("cpu"))
    write_model(model, shape, first)
    second = {name: tensor.clone() for name, tensor in first.items()}
    change_all(second, 1)
    policies = [first, second, _change_some(first)]
    say("starting the stack")
    args = {"dtype": "bfloat16", "max-model-len": 512, "max-num-seqs": 16}
    served = {"path": str(model), "name": "bench", "args": args}

    async with up(make_spec({"name": "bench-refit", "models": [served]})) as stack:
        bench = _Bench(stack, model, scratch, policies)
        with ExitStack() as cleanup:
            cases = _make_cases(bench, cleanup)
            chosen = {name: case for name, case in cases.items() if not wanted or name in wanted}
            await bench.remember_answers()
            rounds = [await _run_round(bench, chosen, number) for number in range(ROUNDS + 1)]
    model_bytes = sum(tensor.nbytes for tensor in first.values())
    return _compute_figures(model_bytes, rounds[1:])  # the first round opens and maps memory


async def _run_round(bench: _Bench, cases: dict[str, _Case], number: int) -> dict[str, Row]:
    """Refit by each transport and by stock, each round in another order."""
    names = [STOCK, *cases]
    first = number % len(names)
    rows: dict[str, Row] = {}
    for name in names[first:] + names[:first]:
        speed, read = _measure_memcpy(bench.policies[0])
        if name == STOCK:
            rows[name] = await bench.update_by_stock(number % 2)
        else:
            # The first refit follows one of another transport, which no training run has.
            indices = cases[name].turns if number % 2 else cases[name].turns[::-1]
            for index in indices:
                rows[name] = await bench.refit(cases[name], index)
        rows[name] |= {"memcpy": speed, "read": read}
        row = rows[name]
        say(f"{name}: {row['refit_seconds']:.3f} s, of which paused {row['pause_seconds']:.3f} s")
    return rows


def _make_cases(bench: _Bench, cleanup: ExitStack) -> dict[str, _Case]:
    files = FilesPublisher(bench.scratch / "files", bench.model, keep_recent=2)
    # No second snapshot: every measured version is a delta.
    deltas = DeltaPublisher(bench.scratch / "deltas", snapshot_every=1000)
    shm = cleanup.enter_context(ShmPublisher())
    collective = cleanup.enter_context(CollectivePublisher())
    adopted = cleanup.enter_context(ShmPublisher(keep=1))
    trainer = {
        name: torch.nn.Parameter(tensor.clone(), requires_grad=False)
        for name, tensor in bench.policies[0].items()
    }
    adopted.adopt(trainer.items())

    def step(state: Weights) -> None:
        for name, parameter in trainer.items():
            parameter.data.copy_(state[name])

    def get_delta_share(offer: Offer) -> float:
        written = deltas.versions.path(offer.version) / DELTA
        return written.stat().st_size / offer.nbytes if written.exists() else 1.0

    cases = {
        "files": _Case(lambda version, state: files.publish(version, state.items())),
        "shm": _Case(lambda version, _: adopted.publish(version), before=step),
        "shm_copied": _Case(lambda version, state: shm.publish(version, state.items())),
        "collective": _Case(lambda version, state: collective.publish(version, state.items())),
        "delta": _Case(
            lambda version, state: deltas.publish(version, state.items()),
            turns=(0, 2),
            get_share=get_delta_share,
        ),
    }
    if find_spec("nixl_cu12") is not None:
        nixl = cleanup.enter_context(NixlPublisher(secret=bench.stack.weights_secret))
        cases["nixl"] = _Case(lambda version, state: nixl.publish(version, state.items()))
    return cases


def _compute_figures(model_bytes: int, rounds: list[dict[str, Row]]) -> dict[str, Any]:
    """Take medians; ratios are taken within a round, because the load of a machine changes."""
    for rows in rounds:
        stock = rows[STOCK]
        for row in rows.values():
            row["pause_fraction"] = row["pause_seconds"] / row["refit_seconds"]
            row["gb_per_s"] = model_bytes / row["seconds"] / 1e9
            row["ratio_to_memcpy"] = row["gb_per_s"] / row["memcpy"]
            row["speedup_over_stock"] = stock["seconds"] / row["seconds"]
            row["refit_over_stock"] = row["refit_seconds"] / stock["refit_seconds"]
            row["pause_over_stock"] = row["pause_seconds"] / stock["pause_seconds"]
    all_rows = [row for rows in rounds for row in rows.values()]
    limits = [row["read"] / (row["read"] + row["memcpy"]) for row in all_rows]
    return {
        "model_bytes": model_bytes,
        # The median over all rounds; each ratio is to the memcpy beside it.
        "memcpy_gb_per_s": median(row.pop("memcpy") for row in all_rows),
        # The speed of one thread that only reads and sums.
        "read_gb_per_s": median(row.pop("read") for row in all_rows),
        # What `ratio_to_memcpy` can be with one thread: a checksum reads all bytes before the copy.
        "memcpy_ratio_limit": median(limits),
        "transports": {
            name: _FIGURES | {key: median(rows[name][key] for rows in rounds) for key in row}
            for name, row in rounds[0].items()
        },
    }


def _measure_memcpy(state: Weights) -> tuple[float, float]:
    """Return the GB/s of a memcpy of these tensors, and of a sum, on one thread; best of three."""
    sources = [raw_bytes(tensor).numpy() for tensor in state.values()]
    copies = [np.zeros_like(source) for source in sources]
    nbytes = sum(source.nbytes for source in sources)
    best = [float("inf")] * 2
    for _ in range(3):
        began = time.perf_counter()
        for copy, source in zip(copies, sources, strict=True):
            copy[:] = source
        copied = time.perf_counter()
        for source in sources:
            source[: len(source) // 8 * 8].view(np.int64).sum()
        seconds = copied - began, time.perf_counter() - copied
        best = [min(pair) for pair in zip(best, seconds, strict=True)]
    return nbytes / best[0] / 1e9, nbytes / best[1] / 1e9


def _change_some(state: Weights) -> Weights:
    """Change a share of the elements (`CHANGED`) by so much that the worker's answer changes."""
    generator = torch.Generator().manual_seed(2)
    changed = {}
    for name, tensor in state.items():
        chosen = torch.rand(tensor.shape, generator=generator) < CHANGED
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        changed[name] = torch.where(chosen, tensor + 0.1 * noise, tensor)
    return changed
