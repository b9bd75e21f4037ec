"""`rollway bench observe`: what recording, sampling, a dashboard and traces cost.

    mockers    rollouts at the client's limit: all of it on, against all of it off
    vllm       the same with vLLM workers

Arms alternate, and a ratio is the median of the rounds' ratios. A part that cannot run here says
why, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import Say, round_floats
from benchmarks.observe_traffic import Load, measure_throughput
from rollway.demo.placement import choose_shared_gpu
from rollway.errors import RollwayError, require

PARTS = ("mockers", "vllm")
LIMITS = dict.fromkeys(("mockers", "vllm", "mockers_client", "vllm_client"), "at least 0.98")
_SHARE = 0.05
"""Of a GPU's memory for each of the workers, of two stacks, that share it."""
Figures = dict[str, Any]


@dataclass(slots=True)
class ObserveBench:
    """A run, and what it has measured so far."""

    build_model: Callable[[], Path]
    """Returns the demo's model."""
    say: Say
    rounds: int = 20
    workers: int = 2
    """The number of vLLM workers of each stack."""
    tokens: int = 32
    """The length of vLLM's answers."""
    has_traces: bool = True
    figures: Figures = field(default_factory=dict)

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Measure these parts, in the order of `PARTS`."""
        for part in PARTS:
            if part in parts:
                figures = self.figures.setdefault(part, {})
                try:
                    getattr(self, f"_measure_{part}")(figures)
                except RollwayError as error:
                    figures["not_measured"] = str(error)
                    self.say(f"{part}: not measured: {error}")

    def _measure_mockers(self, figures: Figures) -> None:
        require("dynamo")
        # They answer as fast as they can, so that the client is the limit.
        args = {"max-model-len": 4096, "speedup-ratio": 1000.0}
        load = Load(4.0, at_once=64, prompt_tokens=128, max_tokens=16, has_logprobs=False)
        self._measure_throughput("mocker", {"replicas": 1, "args": args}, load, figures)

    def _measure_vllm(self, figures: Figures) -> None:
        require("dynamo", "vllm")
        from rollway.stack.preset import list_gpus

        args: dict[str, Any] = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 128}
        model: dict[str, Any] = {"replicas": self.workers}
        if gpus := list_gpus():
            # Two stacks: so many workers at once.
            model["env"] = choose_shared_gpu(gpus, 2 * self.workers)
            # Eager: four workers start one stack after the other.
            args |= {"gpu-memory-utilization": _SHARE, "enforce-eager": True}
        load = Load(8.0, at_once=64, prompt_tokens=64, max_tokens=self.tokens)
        self._measure_throughput("vllm", {**model, "args": args}, load, figures)

    def _measure_throughput(
        self, engine: str, model: dict[str, Any], load: Load, figures: Figures
    ) -> None:
        model = {"path": str(self.build_model()), "name": "tiny", "engine": engine, **model}
        spec = {"models": [model]}
        asyncio.run(
            measure_throughput(
                spec, load, self.rounds, self.say, figures, has_traces=self.has_traces
            )
        )

    def as_json(self) -> Figures:
        return {"limits": LIMITS, **round_floats(self.figures, ".4g")}
