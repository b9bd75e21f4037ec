"""`rollway weights plan`: which bytes a refit over NIXL would move."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from rollway.cli.arguments import Parser, make_group
from rollway.cli.output import print_result, print_table
from rollway.weights.planning.scenario import Total, plan_scenario

_WIRE = 50.0  # A NIC of 400 Gb/s
_READ_SECONDS = 2.6e-6  # One operation on the wire


def plan(options: argparse.Namespace) -> int:
    totals = plan_scenario(options.model, options.source, options.target)
    receivers = {name: _measure(total, options.wire) for name, total in totals.items()}
    print_result(options, {"receivers": receivers}, lambda _: _print_plan(receivers))
    return 0


def _measure(total: Total, wire: float) -> dict[str, Any]:
    return {
        "bytes_needed": total.needed,
        "bytes_moved": total.moved,
        "bytes_by_source": dict(total.sources),
        "descriptors": total.reads,
        "estimated_seconds": total.moved / (wire * 1e9) + total.reads * _READ_SECONDS,
    }


def _print_plan(receivers: dict[str, dict[str, Any]]) -> None:
    rows = (
        (
            name,
            decimal(part["bytes_needed"]),
            decimal(part["bytes_moved"]),
            str(part["descriptors"]),
            str(len(part["bytes_by_source"])),
            f"{part['estimated_seconds']:.3g} s",
        )
        for name, part in receivers.items()
    )
    print_table(("receiver", "needed", "moved", "descriptors", "sources", "about"), rows)


def _speed(text: str) -> float:
    speed = float(text)
    if not speed > 0:
        raise argparse.ArgumentTypeError(f"{text} is no speed: give GB/s above 0.")
    return speed


def add_weights(parser: Parser) -> None:
    add = make_group(parser)
    parser = add("plan", plan, "show which bytes a refit over NIXL would move, and from where")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint, or a config.json")
    parser.add_argument("--source", required=True, help="fsdp:8, or megatron:tp=2,pp=1,ep=8")
    parser.add_argument("--target", required=True, help="vllm:tp=2,ep=1")
    text = f"GB/s of a receiver's network (default {_WIRE:g})"
    parser.add_argument("--wire", type=_speed, default=_WIRE, metavar="N", help=text)
