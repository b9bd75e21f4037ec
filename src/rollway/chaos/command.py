"""Runs `rollway chaos`: prepares the spec, and prints progress."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rollway.api import make_spec
from rollway.chaos.faults import WHERE
from rollway.chaos.gateway import FAULTS, GatewayChaosOptions, GatewayReport, run_gateway_chaos
from rollway.chaos.run import ChaosOptions, Report, run_chaos
from rollway.demo.model import DEMO_PATH, demo_path
from rollway.errors import UsageError

_REAL_WORKERS = {
    "name": "chaos",
    "models": [
        {
            "path": DEMO_PATH,
            "name": "tiny",
            "replicas": 2,
            "args": {
                "dtype": "float32",
                "max-model-len": 512,
                "max-num-seqs": 64,
                "kv-cache-memory-bytes": 64 * 2**20,
            },
        }
    ],
    # Workers are killed on purpose: the supervisor must not give up on them.
    "restart": {"backoff_seconds": 0.1, "max_backoff_seconds": 0.5, "max_failures": 1000},
}


def run_command(
    stack: Path | None,
    *,
    rounds: int,
    seed: int,
    faults: Sequence[str],
    unprotected: bool,
    overrides: Sequence[str],
    quiet: bool,
) -> Report:
    """Run `rollway chaos`."""
    unknown = [fault for fault in faults if fault not in WHERE]
    if unknown:
        raise UsageError(f"There is no fault `{unknown[0]}`.", f"Use one of {', '.join(WHERE)}.")
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}.", "Use at least 1.")
    options = ChaosOptions(rounds, seed, tuple(faults) or tuple(WHERE), unprotected=unprotected)
    spec = make_spec(stack or _REAL_WORKERS, overrides=[*demo_path(stack), *overrides])

    def progress(message: str) -> None:
        if not quiet:
            print(message, file=sys.stderr, flush=True)

    return asyncio.run(run_chaos(spec, options, progress))


def run_gateway_command(
    stack: Path | None,
    *,
    rounds: int,
    agents: int,
    seed: int,
    faults: Sequence[str],
    old_journal: bool,
    overrides: Sequence[str],
    quiet: bool,
) -> GatewayReport:
    """Run `rollway chaos --gateway`."""
    unknown = [fault for fault in faults if fault not in FAULTS]
    if unknown:
        raise UsageError(
            f"There is no gateway fault `{unknown[0]}`.", f"Use one of {', '.join(FAULTS)}."
        )
    if rounds < 1 or agents < 1:
        raise UsageError(f"{rounds} rounds with {agents} agents.", "Use at least one of each.")
    options = GatewayChaosOptions(rounds, agents, seed, tuple(faults) or FAULTS, old_journal)
    workers = {**_REAL_WORKERS, "name": "chaos-gateway"}
    spec = make_spec(stack or workers, overrides=[*demo_path(stack), *overrides])

    def progress(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    return asyncio.run(run_gateway_chaos(spec, options, progress))
