"""The demo's output: a live table, a summary, report.json and reward.png."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rollway.stack.progress import StackProgress

if TYPE_CHECKING:
    from rollway.demo.run import DemoStep

_COLUMNS = (
    "step", "reward", "tokens/s", "train s", "refit s", "pause s", "prefix hits", "mismatch KL",
    "version", "weights by",
)  # fmt: skip
_VISIBLE_ROWS = 15


class DemoDisplay:
    """Prints to stderr; with `quiet` only the report, as JSON on stdout."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._rows: list[tuple[str, ...]] = []
        self._live: Live | None = None

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def show_start(self) -> StackProgress:
        return StackProgress(quiet=self._quiet)

    @contextmanager
    def table(self) -> Iterator[None]:
        if not self._console.is_terminal:
            self._console.print("  ".join(f"{name:>11}" for name in _COLUMNS))
            yield
            return
        with Live(console=self._console, refresh_per_second=4) as self._live:
            yield

    def row(self, step: DemoStep) -> None:
        cells = _cells(step)
        self._rows.append(cells)
        if self._live is not None:
            self._live.update(self._as_table())
        else:
            self._console.print("  ".join(f"{cell:>11}" for cell in cells), markup=False)

    def summary(self, report: dict[str, Any], directory: Path) -> None:
        if self._quiet:
            print(json.dumps(report), flush=True)
        first, last = report["reward_first"], report["reward_last"]
        lines = [
            f"reward {first:.3f} (first 3 steps) -> {last:.3f} (last 5) in "
            f"{len(report['steps'])} steps, {report['seconds']:.0f} s of which the stack's start "
            f"took {report['stack_start_seconds']:.0f} s"
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
        lines.append(f"reports, plot and logs: {directory}")
        lines.append(f"more: {name_command()} --help")
        for line in lines:
            self.note(line)

    def _as_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for cells in self._rows[-_VISIBLE_ROWS:]:
            table.add_row(*cells)
        return table


def name_command() -> str:
    """Return how this shell can call `rollway`: by its name, or by the path of its script."""
    script, known = Path(sys.executable).with_name("rollway"), shutil.which("rollway")
    if known is not None and Path(known).resolve() == script.resolve():
        return "rollway"
    return os.path.relpath(script)


def _cells(step: DemoStep) -> tuple[str, ...]:
    return (
        str(step.step),
        f"{step.reward:.3f}",
        f"{step.tokens_per_second:.0f}",
        f"{step.train_seconds:.2f}",
        _optional(step.refit_seconds, ".3f"),
        _optional(step.pause_seconds, ".3f"),
        f"{step.prefix_hit_rate:.2f}",
        _optional(step.mismatch_kl, ".1e"),
        _optional(step.weight_version, "d"),
        step.weights_by or "-",
    )


def _optional(value: float | int | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


def save_plot(path: Path, report: dict[str, Any]) -> None:
    """Plot reward (above) and mismatch (below) over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = report["steps"]
    numbers = [step["step"] for step in steps]
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    upper.plot(numbers, [step["reward"] for step in steps], color="tab:green")
    upper.set_ylabel("mean reward")
    upper.set_ylim(0, 1.02)
    upper.axhline(0.8, color="grey", linewidth=0.8, linestyle="--")
    upper.set_title("with refit" if report["refit"] else "control: without refit")
    mismatch = [(step["step"], step["mismatch_kl"]) for step in steps if step["mismatch_kl"]]
    if mismatch:
        lower.semilogy(*zip(*mismatch, strict=True), color="tab:red")
    lower.axhline(1e-3, color="grey", linewidth=0.8, linestyle="--")
    lower.set_ylabel("mismatch KL, trainer against engine")
    lower.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
