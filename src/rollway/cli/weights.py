"""`rollway weights …`: inspect weights, compare them, and plan their transfer."""

from __future__ import annotations

import argparse

from rollway.cli.output import format_size, print_result, print_table
from rollway.weights.inspect import Comparison, Inventory, compare, list_inventories
from rollway.weights.planning.recipe import Costs
from rollway.weights.planning.scenario import plan_scenario
from rollway.weights.planning.transfers import Plan, Total

_MAX_LINES = 40


def inspect(options: argparse.Namespace) -> int:
    parts = list_inventories(options.path)
    result = {"path": str(options.path), "parts": [part.as_json() for part in parts]}
    print_result(options, result, lambda _: _print_inventories(parts))
    return 0


def diff(options: argparse.Namespace) -> int:
    comparison = compare(options.first, options.second)
    print_result(options, comparison.as_json(), lambda _: _print_comparison(comparison))
    return 0 if comparison.equal else 1


def plan(options: argparse.Namespace) -> int:
    requested = {
        "wire_gb_per_s": options.wire,
        "block_seconds": options.block,
        "pack_gb_per_s": options.pack,
        "unpack_gb_per_s": options.unpack,
    }
    costs = Costs(**{name: value for name, value in requested.items() if value is not None})
    scenario = plan_scenario(
        options.model, options.source, options.target, costs, arity=options.arity
    )
    print_result(options, scenario.as_json(), lambda _: _print_plan(scenario))
    return 0


def _print_inventories(parts: list[Inventory]) -> None:
    for part in parts:
        position = " ".join(f"{name}={rank}" for name, rank in part.position.items())
        print(f"{part.title}{f' ({position})' if position else ''}")
        rows = (
            (str(group.tensors), group.dtype, " x ".join(map(str, group.shape)),
             format_size(group.bytes), group.name)
            for group in part.groups()
        )  # fmt: skip
        print_table(("tensors", "dtype", "shape", "bytes", "name"), rows)
        print(f"{len(part.tensors)} tensors, {format_size(part.bytes)}\n")


def _print_comparison(comparison: Comparison) -> None:
    _print_lines([f"only in the first: {name}" for name in comparison.missing])
    _print_lines([f"only in the second: {name}" for name in comparison.extra])
    reshaped = comparison.reshaped.items()
    _print_lines([f"{name} is {first}, then {second}" for name, (first, second) in reshaped])
    if comparison.different:
        rows = (
            (
                str(tensor.elements),
                str(tensor.of),
                "" if tensor.max_abs is None else f"{tensor.max_abs:.6g}",
                tensor.name,
            )
            for tensor in comparison.different[:_MAX_LINES]
        )
        print_table(("different", "of", "largest", "name"), rows)
        _print_rest(len(comparison.different))
    same = comparison.tensors - len(comparison.different)
    verdict = "equal" if comparison.equal else "different"
    print(f"{verdict}: {same} of {comparison.tensors} common tensors are the same, byte for byte")


def _print_lines(lines: list[str]) -> None:
    for line in lines[:_MAX_LINES]:
        print(line)
    _print_rest(len(lines))


def _print_rest(count: int) -> None:
    if count > _MAX_LINES:
        print(f"and {count - _MAX_LINES} more")


def _print_plan(scenario: Plan) -> None:
    total = scenario.total
    rows = (
        (
            name,
            format_size(part.needed),
            format_size(part.moved),
            f"{part.ratio:.3f}",
            str(part.descriptors),
            ", ".join(f"{method} {format_size(count)}" for method, count in part.methods.items()),
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
        print(f"{format_size(count)} more than needed: {reason}")
    for depth, level in enumerate(scenario.fanout):
        edges = ", ".join(f"{edge.source or 'trainer'} -> {edge.receiver}" for edge in level)
        print(f"fan-out, level {depth}: {edges}")


def _describe_sources(total: Total) -> str:
    """Return how many sources there are, and how many bytes each sends."""
    if not total.sources:
        return "none"
    low, high = min(total.sources.values()), max(total.sources.values())
    size = format_size(high) if low == high else f"{format_size(low)} to {format_size(high)}"
    return f"{len(total.sources)}, each {size}"
