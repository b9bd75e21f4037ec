"""`rollway weights plan`: which bytes a transfer of weights would move."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.filesize import decimal

from rollway.cli.arguments import Parser, make_group
from rollway.cli.output import print_result, print_table
from rollway.weights.planning.recipe import Costs
from rollway.weights.planning.scenario import plan_scenario
from rollway.weights.planning.transfers import Plan, Total


def plan(options: argparse.Namespace) -> int:
    costs = Costs(wire_gb_per_s=options.wire)
    scenario = plan_scenario(options.model, options.source, options.target, costs)
    print_result(options, scenario.as_json(), lambda _: _print_plan(scenario))
    return 0


def _print_plan(scenario: Plan) -> None:
    total = scenario.total
    rows = (
        (
            name,
            decimal(part.needed),
            decimal(part.moved),
            f"{part.ratio:.3f}",
            str(part.descriptors),
            ", ".join(f"{method} {decimal(count)}" for method, count in part.methods.items()),
            _describe_sources(part),
        )
        for name, part in [*scenario.totals.items(), ("all", total)]
    )
    print_table(("receiver", "needed", "moved", "ratio", "descriptors", "methods", "sources"), rows)
    units = sum(len(recipe.units) for recipe in scenario.recipes)
    print(
        f"about {total.seconds:.3g} s for the slowest receiver; {len(scenario.recipes)} recipes "
        f"for {units} units"
    )
    for reason, count in total.reasons.items():
        print(f"{decimal(count)} more than needed: {reason}")


def _describe_sources(total: Total) -> str:
    """Return how many sources there are, and how many bytes each sends."""
    if not total.sources:
        return "none"
    low, high = min(total.sources.values()), max(total.sources.values())
    size = decimal(high) if low == high else f"{decimal(low)} to {decimal(high)}"
    return f"{len(total.sources)}, each {size}"


def add_weights(parser: Parser) -> None:
    add = make_group(parser)
    parser = add("plan", plan, "show which bytes would move, from where to where, and how")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint, or a config.json")
    parser.add_argument("--source", required=True, help="hf, fsdp:8, or megatron:tp=2,pp=1,ep=8")
    parser.add_argument("--target", required=True, help="hf, or vllm:tp=2,ep=1")
    speed = Costs().wire_gb_per_s
    text = f"GB/s of a receiver's network (default {speed:g})"
    parser.add_argument("--wire", type=float, default=speed, metavar="N", help=text)
