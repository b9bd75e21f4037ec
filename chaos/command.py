"""`rollway chaos`: check its options, run it, print its report."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rollway.api import make_spec
from rollway.cli.output import get_spec_file, print_progress, print_result, print_table
from rollway.errors import UsageError, require
from rollway.spec import StackSpec

_CHAOS_MODEL = {
    "name": "tiny",
    "replicas": 2,
    "args": {
        "max-model-len": 512,
        "max-num-seqs": 64,
        "kv-cache-memory-bytes": 64 * 2**20,
    },
}
# Workers are killed on purpose: the supervisor must not give up on them.
_CHAOS_RESTART = {"backoff_seconds": 0.1, "max_backoff_seconds": 0.5, "max_failures": 1000}


def chaos(options: argparse.Namespace) -> int:
    """Refit, or record sessions, while things break, and check every token."""
    require("cpu", "torch", "transformers")
    if options.seconds is not None and not options.seconds > 0:
        raise UsageError(f"--seconds is {options.seconds:g}.", "Use a positive number.")
    if options.gateway:
        return _break_gateway(options)
    from chaos.faults import WHERE
    from chaos.run import Chaos, ChaosOptions

    if options.old_journal:
        raise UsageError("--old-journal is a control of --gateway.", "Pass both options.")
    if options.rounds < 1:
        raise UsageError(f"--rounds is {options.rounds}.", "Use at least 1.")
    faults = _choose_faults(options, "fault", WHERE)
    if options.through and options.unprotected:
        raise UsageError("--unprotected has its own refits.", "Leave --through.")
    chaos_options = ChaosOptions(
        options.rounds,
        options.seed,
        faults,
        unprotected=options.unprotected,
        through_prime_rl=options.through == "prime-rl",
        seconds=options.seconds,
    )
    report = _run(options, "chaos", Chaos, chaos_options)
    print_result(options, report.as_json(), _print_report)
    # If the control finds nothing, the check cannot fail and means nothing.
    passed = report.stale_tokens > 0 if options.unprotected else report.is_clean
    return 0 if passed else 1


def _break_gateway(options: argparse.Namespace) -> int:
    from chaos.gateway import FAULTS, GatewayChaos, GatewayChaosOptions

    if options.unprotected:
        raise UsageError("--unprotected is a control of refits.", "Use --old-journal here.")
    rounds, agents = options.rounds, options.agents
    if rounds < 1 or agents < 1:
        raise UsageError(f"{rounds} rounds with {agents} agents.", "Use at least one of each.")
    faults = _choose_faults(options, "gateway fault", FAULTS)
    chaos_options = GatewayChaosOptions(
        rounds, agents, options.seed, faults, options.old_journal, seconds=options.seconds
    )
    report = _run(options, "chaos-gateway", GatewayChaos, chaos_options)
    print_result(options, report.as_json(), _print_gateway_report)
    return 0 if report.is_clean else 1


def _choose_faults(
    options: argparse.Namespace, what: str, known: Collection[str]
) -> tuple[str, ...]:
    for fault in options.fault:
        if fault not in known:
            raise UsageError(f"There is no {what} `{fault}`.", f"Use one of {', '.join(known)}.")
    return tuple(options.fault or known)


def _make_chaos_spec(options: argparse.Namespace, name: str) -> StackSpec:
    from chaos.target import demo_path, place_workers
    from rollway.stack.preset import list_gpus

    file = get_spec_file(options)
    if file is not None and options.device is not None:
        raise UsageError(
            f"A stack file and --device {options.device} are given together.",
            "The file says where its workers run; leave --device.",
        )
    models = [{"path": "demo", **place_workers(_CHAOS_MODEL, options.device, list_gpus())}]
    workers = {"name": name, "models": models, "restart": _CHAOS_RESTART}
    return make_spec(file or workers, overrides=[*demo_path(file), *options.set])


def _run(options: argparse.Namespace, name: str, kind: Any, chaos_options: Any) -> Any:
    """Run all rounds on a stack of this name; return the report."""
    progress = (lambda _: None) if options.quiet else print_progress
    spec = _make_chaos_spec(options, name)
    with tempfile.TemporaryDirectory(prefix=f"rollway-{name}-") as scratch:
        return asyncio.run(kind(spec, chaos_options, Path(scratch), progress).run())


def _print_report(report: dict[str, Any]) -> None:
    columns = ("round", "fault", "step", "mode", "outcome", "seconds", "healed in")
    keys = ("number", "fault", "step", "mode", "outcome", "seconds", "heal_seconds")
    print_table(columns, ((str(entry[key]) for key in keys) for entry in report["detail"]))
    names = ("rounds", "rollouts", "tokens_checked", "stale_tokens", "wrong_logprobs")
    for name in (*names, "largest_difference", "lost_rollouts", "hangs", "orphans", "seconds"):
        print(f"{name.replace('_', ' ')}: {report[name]}")
    if report["ended_early"]:
        print(f"ended early: {report['ended_early']}")
    for line in report["examples"][:5]:
        print(f"  {line}")


def _print_gateway_report(report: dict[str, Any]) -> None:
    keys = ("number", "fault", "struck", "turns", "sessions", "lost_turns", "seconds")
    columns = [key.replace("_", " ") for key in keys]
    print_table(columns, ((str(entry[key]) for key in keys) for entry in report["detail"]))
    for name, value in report.items():
        if name not in ("detail", "examples"):
            print(f"{name.replace('_', ' ')}: {value}")
    for line in [*(entry["error"] for entry in report["detail"]), *report["examples"]]:
        if line:
            print(f"  {line}")
