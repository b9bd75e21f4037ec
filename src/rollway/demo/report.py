"""The demo's output: a table, a summary, report.json and reward.png."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollway.demo.run import DemoStep

_COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "train s": ("train_seconds", ".2f"),
    "refit s": ("refit_seconds", ".3f"),
    "pause s": ("pause_seconds", ".3f"),
    "prefix hits": ("prefix_hit_rate", ".2f"),
    "mismatch KL": ("mismatch_kl", ".1e"),
    "version": ("weight_version", "d"),
    "weights by": ("weights_by", "s"),
}
"""The columns of the table: a field of the step, and its format."""
HEADER = "  ".join(f"{name:>11}" for name in _COLUMNS)


def format_step(step: DemoStep) -> str:
    values = [(getattr(step, field), form) for field, form in _COLUMNS.values()]
    cells = ["-" if value is None else format(value, form) for value, form in values]
    return "  ".join(f"{cell:>11}" for cell in cells)


def summarize(report: dict[str, Any]) -> str:
    """Return the result of a run in a few lines."""
    lines = [
        f"reward {report['reward_first']:.3f} (first 3 steps) -> {report['reward_last']:.3f} "
        f"(last 5) in {len(report['steps'])} steps, {report['seconds']:.0f} s of which the stack's "
        f"start took {report['stack_start_seconds']:.0f} s"
    ]
    if report["mismatch_kl_max"] is not None:
        lines.append(f"largest mismatch KL {report['mismatch_kl_max']:.2e}")
    if report["refit_seconds_median"] is not None:
        lines.append(
            f"median refit {report['refit_seconds_median']:.3f} s, of which generation paused "
            f"{report['pause_seconds_median']:.3f} s"
        )
    elif not report["refit"]:
        lines.append("control run: the workers never received the new weights")
    lines.append(f"reports, plot and logs: {report['directory']}")
    # After `make demo` the shell knows no `rollway`; in an activated environment it does.
    script, known = Path(sys.executable).with_name("rollway"), shutil.which("rollway")
    is_known = known is not None and Path(known).resolve() == script.resolve()
    lines.append(f"more: {'rollway' if is_known else os.path.relpath(script)} --help")
    return "\n".join(lines)


def save_plot(path: Path, report: dict[str, Any]) -> None:
    """Plot reward (above) and mismatch (below) over the steps."""
    from matplotlib.figure import Figure

    steps = report["steps"]
    numbers = [step["step"] for step in steps]
    figure = Figure(figsize=(7, 6))
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(numbers, [step["reward"] for step in steps], color="tab:green")
    upper.set_ylabel("mean reward")
    upper.set_ylim(0, 1.02)
    upper.set_title("with refit" if report["refit"] else "control: without refit")
    mismatch = [(step["step"], step["mismatch_kl"]) for step in steps if step["mismatch_kl"]]
    if mismatch:
        lower.semilogy(*zip(*mismatch, strict=True), color="tab:red")
    lower.set_ylabel("mismatch KL, trainer against engine")
    lower.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
