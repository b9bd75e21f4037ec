"""`rollway bench nemo-rl`: what a trainer of NeMo-RL gets, against what it would have otherwise.

    refit      three vLLM workers, 500 MB: `Synchronizer.sync_weights` by the fastest transport
               against `files`, and its pause against Dynamo's own update from disk
    bytes      planned bytes by those that engines need, for several layouts of trainer and engine
    fanout     128 receivers that pass a version on to each other, and all at the trainer at once
    gym        NeMo-Gym's requests through the run's gateway, and straight at Dynamo's frontend
    sampler    rollouts while the workers' metrics are sampled, and while they are not

Arms alternate, and a ratio is the median of the rounds' ratios: a machine that slows down affects
both. Every part keeps its figures up to date, so a run that is interrupted has those of the rounds
that it finished.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.bench import Say, round_floats
from rollway.bench.plan import QWEN3_30B_A3B, measure
from rollway.weights.megatron.geometry import Topology

PARTS = ("refit", "bytes", "fanout", "gym", "sampler")
LIMITS = {
    "refit": ("at most", 0.5),
    "pause": ("at most", 0.2),
    "bytes": ("exactly", 1.0),
    "fanout": ("at most", 2.0),
    "gym": ("at least", 0.9),
    "sampler": ("at least", 0.99),
}
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
_LAYOUTS = {
    "TP1 to TP2": (QWEN3_8B, Topology(tp=1), 2),
    "TP2 to TP1": (QWEN3_8B, Topology(tp=2), 1),
    "TP2 to TP4": (QWEN3_8B, Topology(tp=2), 4),
    "EP2 to TP2": (QWEN3_30B_A3B, Topology(ep=2), 2),
}
Figures = dict[str, Any]


@dataclass(slots=True)
class NemoRlBench:
    """A run, and what it has measured so far."""

    build_model: Callable[[], Path]
    """Returns the demo's model, for traffic."""
    say: Say
    workers: int = 2
    """The number of workers, for traffic."""
    tokens: int = 32
    """The length of each answer, for traffic."""
    figures: Figures = field(default_factory=dict)

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Measure these parts, in the order of `PARTS`."""
        with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
            if "bytes" in parts:
                self.figures["bytes"] = plan_bytes()
            if "fanout" in parts:
                from rollway.bench.nemo_rl_fanout import measure_fanout

                measure_fanout(self.say, self.figures.setdefault("fanout", {}))
            if "refit" in parts:
                from rollway.bench.nemo_rl_refit import measure_refits

                measure_refits(Path(scratch), self.say, self.figures.setdefault("refit", {}))
            if "gym" in parts or "sampler" in parts:
                from rollway.bench.nemo_rl_traffic import measure_traffic

                traffic = [part for part in parts if part in ("gym", "sampler")]
                measure_traffic(
                    self.build_model(), self.say, self.figures, traffic,
                    workers=self.workers, tokens=self.tokens,
                )  # fmt: skip

    def as_json(self) -> Figures:
        limits = {name: f"{word} {limit:g}" for name, (word, limit) in LIMITS.items()}
        return {"limits": limits, **round_floats(self.figures, ".4g")}


def plan_bytes() -> Figures:
    """Return the bytes of a plan by those that are needed, for each layout."""
    rows = {}
    for title, (config, topology, tp) in _LAYOUTS.items():
        row = measure(config, topology, tp, repeats=1)
        moved = sum(row.bytes_by_method.values())
        rows[title] = {"needed": row.bytes_needed, "moved": moved, "ratio": row.bytes_ratio}
    return {"layouts": rows, "ratio": max(row["ratio"] for row in rows.values())}


def format_figures(figures: Figures) -> str:
    """Write the figures as a table in Markdown."""
    lines = ["| | without | with | ratio | limit |", "|---|---:|---:|---:|---:|"]
    for title, without, with_it, ratio, name in _list_rows(figures):
        limit = figures["limits"][name]
        lines.append(f"| {title} | {without} | {with_it} | {ratio:.3g} | {limit} |")
    if figures.get("is_interrupted"):
        lines += ["", "The run was interrupted; these are the rounds that it finished."]
    return "\n".join(lines)


def _list_rows(figures: Figures) -> Iterator[tuple[str, str, str, float, str]]:
    """Yield title, the figure of the other way, ours, the ratio and the name of its limit."""
    refit = figures.get("refit") or {}
    if "refit_ratio" in refit:
        rows, best = refit["transports"], refit["fastest"]
        title = f"refit of {refit['workers']} workers, `files` and `{best}`, s"
        seconds = [f"{rows[name]['seconds']:g}" for name in ("files", best)]
        yield title, *seconds, refit["refit_ratio"], "refit"
        pauses = [f"{rows[name]['pause']:g}" for name in ("stock", best)]
        yield f"pause, Dynamo's update and `{best}`, s", *pauses, refit["pause_ratio"], "pause"
    for title, row in (figures.get("bytes") or {}).get("layouts", {}).items():
        counts = [f"{row[name] / 1e9:.4g}" for name in ("needed", "moved")]
        yield f"GB needed and moved, {title}", *counts, row["ratio"], "bytes"
    fanout = figures.get("fanout") or {}
    if "ratio" in fanout:
        title = f"versions that leave the trainer for {fanout['receivers']} receivers"
        versions = [f"{fanout['trainer_versions'][arm]:g}" for arm in ("at_once", "in_waves")]
        yield title, *versions, fanout["ratio"], "fanout"
    for name, other, arm, what in (
        ("gym", "frontend", "gateway", "of Gym, straight and through the gateway"),
        ("sampler", "without", "with", "of rollouts, without and with the sampler"),
    ):
        if "ratio" in (part := figures.get(name) or {}):
            rates = [f"{part['tokens_per_second'][each]:g}" for each in (other, arm)]
            yield f"tokens/s {what}", *rates, part["ratio"], name
