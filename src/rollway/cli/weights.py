"""`rollway weights plan`: which bytes a transfer of weights would move."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.filesize import decimal

from rollway.cli.arguments import Parser, make_group
from rollway.cli.output import print_result, print_table
from rollway.weights.planning.plan import Costs, Total
from rollway.weights.planning.scenario import plan_scenario


def plan(options: argparse.Namespace) -> int:
    costs = Costs(wire_gb_per_s=options.wire)
    total, totals = plan_scenario(options.model, options.source, options.target, costs)
    receivers = {name: each.as_json() for name, each in totals.items()}
    result = {"total": total.as_json(), "receivers": receivers}
    print_result(options, result, lambda _: _print_plan({**totals, "all": total}))
    return 0


def _print_plan(totals: dict[str, Total]) -> None:
    rows = (
        (
            name,
            decimal(total.needed),
            decimal(total.moved),
            str(total.reads),
            ", ".join(f"{method} {decimal(count)}" for method, count in total.methods.items()),
            _describe_sources(total),
        )
        for name, total in totals.items()
    )
    print_table(("receiver", "needed", "moved", "descriptors", "methods", "sources"), rows)
    print(f"about {totals['all'].seconds:.3g} s for the slowest receiver")


def _describe_sources(total: Total) -> str:
    """Return how many sources there are, and how many bytes each sends."""
    low, high = min(total.sources.values()), max(total.sources.values())
    size = decimal(high) if low == high else f"{decimal(low)} to {decimal(high)}"
    return f"{len(total.sources)}, each {size}"


def _speed(text: str) -> float:
    speed = float(text)
    if not speed > 0:
        raise argparse.ArgumentTypeError(f"{text} is no speed: give GB/s above 0.")
    return speed


def add_weights(parser: Parser) -> None:
    add = make_group(parser)
    parser = add("plan", plan, "show which bytes would move, from where to where, and how")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint, or a config.json")
    parser.add_argument("--source", required=True, help="hf, fsdp:8, or megatron:tp=2,pp=1,ep=8")
    parser.add_argument("--target", required=True, help="hf, or vllm:tp=2,ep=1")
    speed = Costs().wire_gb_per_s
    text = f"GB/s of a receiver's network (default {speed:g})"
    parser.add_argument("--wire", type=_speed, default=speed, metavar="N", help=text)
