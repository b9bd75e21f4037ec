"""Run `rollway bench gpu-engine`: read its options, and format the figures."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from rollway.bench import Say
from rollway.bench.gpu_engine import GpuEngineBench
from rollway.bench.gpu_options import PARTS, Options
from rollway.errors import UsageError


def run_command(options: argparse.Namespace, say: Say) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; return the exit code and the figures, also after Ctrl-C."""
    if min(options.rollouts, options.tokens, options.repeat) < 1:
        raise UsageError(
            "--rollouts, --tokens and --repeat must be positive.", "Give at least 1 for each."
        )
    unknown = [name for name in options.only if name not in PARTS]
    if unknown:
        raise UsageError(f"There is no part `{unknown[0]}`.", f"Use some of {', '.join(PARTS)}.")
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
        if name in PARTS:
            shown = {key: value for key, value in part.items() if key not in ("first", "refits")}
            pauses = [row["paused_seconds"] for row in part.get("refits", [])]
            lines.append(f"{name}: {json.dumps(shown)}{f', paused {pauses} s' if pauses else ''}")
    for kind in ("skipped", "failed"):
        lines += [f"{name}: {kind}: {reason}" for name, reason in figures[kind].items()]
    return "\n".join(lines)
