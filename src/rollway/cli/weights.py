"""`rollway weights …`: look into weights, compare them, and see how they would move."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollway.weights.compare import Comparison, compare
from rollway.weights.inventory import Inventory, inventories
from rollway.weights.planning.costs import Costs
from rollway.weights.planning.scenario import plan_scenario
from rollway.weights.planning.transfers import Plan, Total

_SHOWN = 40
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def add_grammar(child: argparse.ArgumentParser) -> None:
    commands = child.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("--json", action="store_true", help="one JSON object on stdout")
        one.set_defaults(command=command)
        return one

    one = add("inspect", inspect, "show the tensors of a checkpoint, or of a trainer's ranks")
    one.add_argument("path", type=Path, metavar="PATH", help="a directory")
    one = add("diff", diff, "compare two checkpoints; exit code 1 when they differ")
    one.add_argument("first", type=Path, metavar="A", help="a checkpoint directory")
    one.add_argument("second", type=Path, metavar="B", help="another one")
    one = add("plan", plan, "show which bytes would move, from whom to whom, and how")
    one.add_argument(
        "--model", type=Path, required=True, help="a checkpoint directory, or a config.json"
    )
    one.add_argument("--source", required=True, help="hf, fsdp:8, or megatron:tp=2,pp=1,ep=8,etp=1")
    one.add_argument("--target", required=True, help="hf, or vllm:tp=2,ep=1,replicas=4")
    costs = Costs()
    one.add_argument("--wire", type=float, default=costs.wire_gb_per_s, help="GB/s of a receiver")
    one.add_argument(
        "--pack",
        type=float,
        default=costs.pack_gb_per_s,
        help="GB/s of copying at a source; 0: sources can only be read",
    )
    one.add_argument(
        "--unpack", type=float, default=costs.unpack_gb_per_s, help="GB/s of copying at a receiver"
    )
    one.add_argument(
        "--block", type=float, default=costs.block_seconds, help="seconds of one block on the wire"
    )
    one.add_argument(
        "--arity", type=int, default=2, help="replicas that one of them serves (default 2)"
    )


def inspect(options: argparse.Namespace) -> int:
    found = inventories(options.path)
    if options.json:
        print(json.dumps({"path": str(options.path), "parts": [one.as_json() for one in found]}))
        return 0
    for one in found:
        _print_inventory(one)
    return 0


def diff(options: argparse.Namespace) -> int:
    found = compare(options.first, options.second)
    if options.json:
        print(json.dumps(found.as_json()))
    else:
        _print_comparison(found)
    return 0 if found.equal else 1


def plan(options: argparse.Namespace) -> int:
    costs = Costs(options.wire, options.block, options.pack, options.unpack)
    made = plan_scenario(options.model, options.source, options.target, costs, arity=options.arity)
    if options.json:
        print(json.dumps(made.as_json()))
    else:
        _print_plan(made)
    return 0


def _print_inventory(one: Inventory) -> None:
    where = " ".join(f"{name}={rank}" for name, rank in one.position.items())
    out.print(f"{one.title}{f' ({where})' if where else ''}", markup=False)
    table = _table("tensors", "dtype", "shape", "bytes", "name")
    for group in one.groups():
        shape = " x ".join(map(str, group.shape))
        table.add_row(str(group.tensors), group.dtype, shape, size(group.bytes), group.name)
    out.print(table)
    out.print(f"{len(one.tensors)} tensors, {size(one.bytes)}\n")


def _print_comparison(found: Comparison) -> None:
    for words, names in (("only in the first", found.missing), ("only in the second", found.extra)):
        for name in names[:_SHOWN]:
            out.print(f"{words}: {name}", markup=False)
        _print_rest(len(names))
    for name, (mine, theirs) in list(found.reshaped.items())[:_SHOWN]:
        out.print(f"{name} is {mine}, then {theirs}", markup=False)
    _print_rest(len(found.reshaped))
    if found.different:
        table = _table("different", "of", "largest", "name")
        for one in found.different[:_SHOWN]:
            largest = "" if one.max_abs is None else f"{one.max_abs:.6g}"
            table.add_row(str(one.elements), str(one.of), largest, one.name)
        out.print(table)
        _print_rest(len(found.different))
    same = found.tensors - len(found.different)
    verdict = "equal" if found.equal else "different"
    out.print(f"{verdict}: {same} of {found.tensors} common tensors are the same, byte for byte")


def _print_rest(count: int) -> None:
    if count > _SHOWN:
        out.print(f"and {count - _SHOWN} more")


def _print_plan(made: Plan) -> None:
    table = _table("receiver", "needed", "moved", "ratio", "descriptors", "methods", "sources")
    for name, total in [*made.totals.items(), ("all", made.total)]:
        table.add_row(
            name,
            size(total.needed),
            size(total.moved),
            f"{total.ratio:.3f}",
            str(total.descriptors),
            ", ".join(f"{method} {size(count)}" for method, count in total.methods.items()),
            _sources(total),
        )
    out.print(table)
    total = made.total
    out.print(
        f"about {total.seconds:.3g} s for the slowest receiver; {len(made.recipes)} recipes for "
        f"{sum(len(recipe.units) for recipe in made.recipes)} units"
    )
    for reason, count in total.reasons.items():
        out.print(f"{size(count)} more than needed: {reason}", markup=False)
    for depth, level in enumerate(made.fanout.levels if made.fanout else ()):
        edges = ", ".join(f"{edge.source or 'trainer'} -> {edge.receiver}" for edge in level)
        out.print(f"fan-out, level {depth}: {edges}", markup=False)


def _sources(total: Total) -> str:
    """Their number, and how evenly they are used."""
    if not total.sources:
        return "none"
    low, high = min(total.sources.values()), max(total.sources.values())
    each = size(high) if low == high else f"{size(low)} to {size(high)}"
    return f"{len(total.sources)}, each {each}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def size(count: int) -> str:
    """Bytes for people: 1.53 GB."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
