"""Run `rollway bench gpu-engine`: read its options, and format the figures."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from rollway.bench import Say
from rollway.bench.gpu_engine import GpuEngineBench
from rollway.bench.gpu_options import ON_REQUEST, PARTS, Options
from rollway.errors import UsageError


def run_command(options: argparse.Namespace, say: Say) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; return the exit code and the figures, also after Ctrl-C."""
    if min(options.rollouts, options.tokens, options.repeat, options.steps) < 1:
        raise UsageError(
            "--rollouts, --tokens, --repeat and --steps must be positive.",
            "Give at least 1 for each.",
        )
    if options.filler_gib < 0:
        raise UsageError("--filler-gib must not be negative.", "0 fills nothing.")
    known = (*PARTS, *ON_REQUEST)
    unknown = [name for name in options.only if name not in known]
    if unknown:
        raise UsageError(f"There is no part `{unknown[0]}`.", f"Use some of {', '.join(known)}.")
    values = {name: getattr(options, name) for name in Options.__slots__ if hasattr(options, name)}
    values |= {"only": tuple(options.only), "overrides": tuple(options.set)}
    bench = GpuEngineBench(Options(**values), say)
    code = 0
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        bench.figures["is_interrupted"], code = True, 130
    return (code or (1 if bench.failed else 0)), bench.as_json()


def format_figures(figures: dict[str, Any]) -> str:
    """Format the figures as text, a line for each part."""
    lines = [f"{figures.get('device', '?')}, model {figures.get('model', '?')}"]
    for name, part in figures.items():
        if name == "colocated":
            lines += _format_colocated(part)
        elif name in PARTS:
            shown = {key: value for key, value in part.items() if key not in ("first", "refits")}
            pauses = [row["paused_seconds"] for row in part.get("refits", [])]
            lines.append(f"{name}: {json.dumps(shown)}{f', paused {pauses} s' if pauses else ''}")
    for kind in ("skipped", "failed"):
        lines += [f"{name}: {kind}: {reason}" for name, reason in figures[kind].items()]
    return "\n".join(lines)


def _format_colocated(part: dict[str, Any]) -> list[str]:
    lines = [f"colocated: {note}" for note in part["notes"]]
    for level in ("level_1", "level_2"):
        shown = dict(part[level])
        steps = shown.pop("steps")
        lines.append(f"colocated, {level.replace('_', ' ')}: {json.dumps(shown)}")
        for number, step in enumerate(steps, 1):
            used = ", ".join(f"{name} {gib:.2f}" for name, gib in step["used_gib"].items())
            lines.append(f"  step {number}: {used} GiB used, {json.dumps(step['seconds'])} s")
    return lines
