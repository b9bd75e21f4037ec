"""The arguments and the output of `rollway bench verl`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollway.bench.verl import ARMS, LOADS, ArmFigures, VerlReport, bench_verl
from rollway.errors import UsageError

COLUMNS = (
    *("load", "affinity", "prefix hits", "first turns", "later turns", "with its group"),
    *("ms per token", "against off"),
)
_NAMES = tuple(arm.name for arm in ARMS)
BEGIN, END = "<!-- rollway bench verl -->", "<!-- end -->"
"""Lines around the table in the docs."""


def add_grammar(child: argparse.ArgumentParser) -> None:
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument(
        "--verl-python",
        type=Path,
        default=Path(".venv-verl/bin/python"),
        metavar="PATH",
        help="interpreter of the environment with verl (.venv-verl/bin/python)",
    )
    child.add_argument(
        "--arms", default=",".join(_NAMES), metavar="A,B", help="measure only these arms"
    )
    child.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep logs and results there; existing results are not measured again",
    )
    child.add_argument("--write", type=Path, metavar="FILE", help=f"write the table after {BEGIN}")


def run_command(options: argparse.Namespace) -> int:
    names = [name.strip() for name in options.arms.split(",")]
    for name in names:
        if name not in _NAMES:
            raise UsageError(f"There is no arm `{name}`.", f"Arms are: {', '.join(_NAMES)}.")
    arms = [arm for arm in ARMS if arm.name in names]
    if options.write is not None:
        replace_table(options.write.read_text(), "")  # raises before the long measurement

    from rollway.demo.model import build_base, copy_bare
    from rollway.stack.preset import cache_dir

    with ExitStack() as cleanup:
        scratch = options.keep or Path(
            cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rollway-bench-"))
        )
        scratch = scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        model = scratch / "model"
        if not model.is_dir():
            copy_bare(build_base(cache_dir() / "demo"), model)
        report = bench_verl(options.verl_python.absolute(), model, scratch, arms, _report)
    if options.write is not None:
        options.write.write_text(replace_table(options.write.read_text(), format_markdown(report)))
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print_table(report)
    return 0


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def format_markdown(report: VerlReport) -> str:
    lines = ["|" + "|".join(f" {name} " for name in COLUMNS) + "|"]
    lines.append("|---|---|" + "---:|" * (len(COLUMNS) - 2))
    lines += ["| " + " | ".join(_format_cells(report, row)) + " |" for row in report.rows]
    return "\n".join(lines)


def replace_table(text: str, table: str) -> str:
    """Replace the table between the marker lines of a document."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(
            "The document has no place for the table.", f"Add the lines {BEGIN} and {END}."
        )
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _print_table(report: VerlReport) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in report.rows:
        table.add_row(*_format_cells(report, row))
    out.print(table)


def _format_cells(report: VerlReport, row: ArmFigures) -> tuple[str, ...]:
    prompts = next(load.prompts for load in LOADS if load.name == row.load)
    low, high = row.spread("hit_rate")
    fast, slow = row.spread("ms_per_token")
    ratio = report.time_ratio(row)
    return (
        f"{prompts} prompts, {row.load}",
        row.arm,
        f"{row.mean('hit_rate'):.3f} ({low:.3f} to {high:.3f})",
        f"{row.mean('first_turns'):.3f}",
        f"{row.mean('later_turns'):.3f}",
        f"{row.mean('together'):.2f}",
        f"{row.mean('ms_per_token'):.2f} ({fast:.2f} to {slow:.2f})",
        "" if ratio is None else f"{ratio:.2f}",
    )
