"""The arguments and the output of `rollway bench router`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollway.api import make_spec
from rollway.bench.router import RouterReport, bench_live, bench_replay
from rollway.errors import UsageError

_WORKERS = "4,8,16,32"


def add_grammar(child: argparse.ArgumentParser) -> None:
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument(
        "stack", nargs="?", type=Path, help="a stack file (without: only the replay)"
    )
    child.add_argument("--workers", default=_WORKERS, metavar="N,M", help=f"default {_WORKERS}")
    child.add_argument("--groups", type=int, help="prompts, of 8 rollouts each (2 per worker)")
    child.add_argument("--no-live", action="store_true", help="do not start stacks")
    child.add_argument("--no-replay", action="store_true", help="skip the offline replay")
    child.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override")
    child.add_argument("--quiet", action="store_true", help="no progress display")


def run_command(options: argparse.Namespace) -> int:
    counts = parse_counts(options.workers)
    if options.groups is not None and options.groups < 1:
        raise UsageError(f"--groups is {options.groups}.", "Give at least 1.")
    live = options.stack is not None and not options.no_live
    if not live and options.no_replay:
        raise UsageError("There is nothing to measure.", "Give a stack file, or drop --no-replay.")

    def say(message: str) -> None:
        if not options.quiet:
            print(message, file=sys.stderr, flush=True)

    report = RouterReport()
    if live:
        from rollway.demo.model import demo_path

        spec = make_spec(options.stack, overrides=[*demo_path(options.stack), *options.set])
        report.live = asyncio.run(bench_live(spec, counts, options.groups, say))
    if not options.no_replay:
        report.replay = bench_replay(counts, options.groups, say)
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print_table(report)
    return 0


def parse_counts(text: str) -> list[int]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise UsageError(
            f"`--workers {text}` is not a list of numbers.", "Give, for example, 4,32."
        )
    return [int(number) for number in numbers]


def _print_table(report: RouterReport) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, pad_edge=False)
    for column in ("", "workers", "routing"):
        table.add_column(column)
    for column in ("hits", "first token, mean", "makespan", "requests"):
        table.add_column(column, justify="right")
    for part, rows in (("live", report.live), ("replay", report.replay)):
        for figures in rows:
            table.add_row(
                part,
                str(figures.workers),
                figures.routing,
                f"{figures.hit_rate:.3f}",
                f"{figures.ttft_mean_seconds:.3f} s",
                f"{figures.makespan_seconds:.2f} s",
                str(figures.requests),
            )
    out.print(table)
    conclusions = report.as_json()
    for name in ("preset_hit_rate_at_32", "preset_worst_ratio", "preset_never_slower"):
        out.print(f"{name.replace('_', ' ')}: {conclusions[name]}")
