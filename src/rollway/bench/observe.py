"""`rollway bench observe`: what recording, sampling, a dashboard and traces cost.

    mockers    rollouts at the client's limit: all of it on, against all of it off
    vllm       the same with vLLM workers
    off        the client's own time per rollout, against the same code without a line for observing
    observer   CPU of the sampling process with all workers of a stack file, against 4 of them
    memory     the sampling process and a dashboard over a day of samples
    page       a page in Chromium: 128 workers and a day, against 4 workers and an hour
    report     `rollway report` of that day

Arms alternate, and a ratio is the median of the rounds' ratios. A part that cannot run here says
why, and the others go on.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.bench import Say, round_floats
from rollway.bench.observe_cost import measure_memory, measure_observer, measure_off
from rollway.bench.observe_page import measure_page, measure_report
from rollway.bench.observe_traffic import Load, measure_throughput
from rollway.config import StackSpec
from rollway.demo.placement import choose_shared_gpu
from rollway.errors import RollwayError, UsageError, require

PARTS = ("mockers", "vllm", "off", "observer", "memory", "page", "report")
LIMITS = {
    "mockers": ("at least", 0.98),
    "vllm": ("at least", 0.98),
    "mockers_client": ("at least", 0.98),
    "vllm_client": ("at least", 0.98),
    "off": ("at least", 0.995),
    "observer": ("at most", 20.0),
    "core": ("at most", 0.05),
    "memory": ("at most", 1.05),
    "click": ("at most", 3.0),
    "shown": ("at most", 5.0),
    "load_kb": ("at most", 250.0),
    "live_kb": ("at most", 50.0),
    "report_seconds": ("at most", 30.0),
    "report_mb": ("at most", 300.0),
}
_SHARE = 0.05
"""Of a GPU's memory for each of the workers, of two stacks, that share it."""
Figures = dict[str, Any]


@dataclass(slots=True)
class ObserveBench:
    """A run, and what it has measured so far."""

    build_model: Callable[[], Path]
    """Returns the demo's model."""
    say: Say
    spec: StackSpec | None = None
    """The stack of many workers, for the part `observer`."""
    rounds: int = 20
    workers: int = 2
    """The number of vLLM workers of each stack."""
    tokens: int = 32
    """The length of vLLM's answers."""
    has_traces: bool = True
    figures: Figures = field(default_factory=dict)
    _scratch: Path = Path()

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Measure these parts, in the order of `PARTS`."""
        with tempfile.TemporaryDirectory(prefix="rollway-bench-") as directory:
            self._scratch = Path(directory)
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

    def _measure_off(self, figures: Figures) -> None:
        asyncio.run(measure_off(self.say, figures))

    def _measure_observer(self, figures: Figures) -> None:
        if self.spec is None:
            raise UsageError(
                "No stack of many workers is named.",
                "Give its file: rollway bench observe tests/light/fleet128.yaml.",
            )
        asyncio.run(measure_observer(self.spec, self._scratch, self.say, figures))

    def _measure_memory(self, figures: Figures) -> None:
        asyncio.run(measure_memory(self._scratch / "memory", self.say, figures))

    def _measure_page(self, figures: Figures) -> None:
        asyncio.run(measure_page(self._scratch, self.say, figures))

    def _measure_report(self, figures: Figures) -> None:
        measure_report(self._scratch, self.say, figures)

    def as_json(self) -> Figures:
        limits = {name: f"{word} {limit:g}" for name, (word, limit) in LIMITS.items()}
        return {"limits": limits, **round_floats(self.figures, ".4g")}


def format_figures(figures: Figures) -> str:
    """Write the figures as a table in Markdown."""
    lines = ["| | without | with | figure | limit |", "|---|---:|---:|---:|---:|"]
    for title, without, with_it, figure, name in _list_rows(figures):
        lines.append(
            f"| {title} | {without} | {with_it} | {figure:.4g} | {figures['limits'][name]} |"
        )
    for part in PARTS:
        if "not_measured" in (figures.get(part) or {}):
            lines.append(f"\n{part}: not measured. {figures[part]['not_measured']}")
    if figures.get("is_interrupted"):
        lines += ["", "The run was interrupted; these are the rounds that it finished."]
    return "\n".join(lines)


def _list_rows(figures: Figures) -> Iterator[tuple[str, str, str, float, str]]:
    """Yield title, the figure of the other way, ours, the judged figure and its limit's name."""
    for part, title in (("mockers", "mockers"), ("vllm", "vLLM workers")):
        if "ratio" in (row := figures.get(part) or {}):
            rates = row["rollouts_per_second"]
            low, high = row["middle_half"]
            text = f"rollouts/s of {title} ({row['rounds']} rounds, half of them {low} to {high})"
            yield text, f"{rates['off']:g}", f"{rates['on']:g}", row["ratio"], part
            client = row["client"]
            micro, (low, high) = client["microseconds_per_rollout"], client["middle_half"]
            text = f"the client's µs of CPU per rollout of {title} (half {low} to {high})"
            yield text, f"{micro['off']:g}", f"{micro['on']:g}", client["ratio"], f"{part}_client"
    if "ratio" in (off := figures.get("off") or {}):
        micro = off["microseconds_per_rollout"]
        times = [f"{micro[arm]:g}" for arm in ("without", "with")]
        yield "the client's own µs per rollout, all off", *times, off["ratio"], "off"
    if "ratio" in (observer := figures.get("observer") or {}):
        few, many = (observer["workers"][arm] for arm in ("few", "all"))
        shares = [f"{100 * observer['core'][arm]:.2f}" for arm in ("few", "all")]
        title = f"% of a core to sample {few} and {many} workers every 2 s"
        yield title, *shares, observer["ratio"], "observer"
        yield f"of a core to sample {many} workers", "", "", observer["core"]["all"], "core"
    if "ratio" in (memory := figures.get("memory") or {}):
        sizes = [f"{memory['mib'][place]:.0f}" for place in (4, -1)]
        yield "MiB in the middle of a day, and at its end", *sizes, memory["ratio"], "memory"
    if "click_ratio" in (page := figures.get("page") or {}):
        times = [f"{page['click_ms'][arm]:g}" for arm in ("few", "many")]
        title = "ms to answer a click: 4 workers and an hour, 128 and a day"
        yield title, *times, page["click_ratio"], "click"
        shown = [f"{page['shown_seconds'][arm]:g}" for arm in ("few", "many")]
        title = (
            f"s until such a run is shown (all of the day after {page['whole_seconds']['many']})"
        )
        yield title, *shown, page["shown_seconds"]["many"], "shown"
        yield "kB to load the page of 128 workers", "", "", page["load_kb"], "load_kb"
        yield "kB/s of that page, live", "", "", page["live_kb_per_second"], "live_kb"
    if "seconds" in (report := figures.get("report") or {}):
        yield "s for a report of that day", "", "", report["seconds"], "report_seconds"
        yield "MB for a report of that day", "", "", report["mb"], "report_mb"
