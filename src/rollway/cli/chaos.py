"""`rollway chaos`: refit (or record sessions) while things break, and check every token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rollway.cli.grammar import get_spec_file
from rollway.cli.output import print_json, print_table
from rollway.errors import UsageError
from rollway.extras import require


def chaos(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    if options.gateway:
        return _break_gateway(options)
    if options.old_journal:
        raise UsageError("--old-journal is a control of --gateway.", "Pass both options.")
    from rollway.chaos.command import run_command

    report = run_command(
        get_spec_file(options),
        rounds=options.rounds,
        seed=options.seed,
        faults=options.fault,
        unprotected=options.unprotected,
        overrides=options.set,
        quiet=options.quiet,
        device=options.device,
    )
    if options.json:
        print_json(report.as_json())
    else:
        _print_report(report.as_json())
    # If the control finds nothing, the check cannot fail and means nothing.
    passed = report.stale_tokens > 0 if options.unprotected else report.is_clean
    return 0 if passed else 1


def _break_gateway(options: argparse.Namespace) -> int:
    if options.unprotected:
        raise UsageError("--unprotected is a control of refits.", "Use --old-journal here.")
    from rollway.chaos.command import run_gateway_command

    report = run_gateway_command(
        get_spec_file(options),
        rounds=options.rounds,
        agents=options.agents,
        seed=options.seed,
        faults=options.fault,
        old_journal=options.old_journal,
        overrides=options.set,
        quiet=options.quiet,
        device=options.device,
    )
    if options.json:
        print_json(report.as_json())
    else:
        _print_gateway_report(report.as_json())
    return 0 if report.is_clean else 1


def _print_report(report: dict[str, Any]) -> None:
    columns = ("round", "fault", "step", "mode", "outcome", "seconds", "healed in")
    keys = ("number", "fault", "step", "mode", "outcome", "seconds", "heal_seconds")
    _print_rounds(columns, keys, report)
    names = ("rounds", "rollouts", "tokens_checked", "stale_tokens", "wrong_logprobs")
    for name in (*names, "largest_difference", "lost_rollouts", "hangs", "orphans", "seconds"):
        print(f"{name.replace('_', ' ')}: {report[name]}")
    for line in report["examples"][:5]:
        print(f"  {line}")


def _print_gateway_report(report: dict[str, Any]) -> None:
    keys = ("number", "fault", "struck", "turns", "sessions", "lost_turns", "seconds")
    _print_rounds([key.replace("_", " ") for key in keys], keys, report)
    for name, value in report.items():
        if name not in ("detail", "examples"):
            print(f"{name.replace('_', ' ')}: {value}")
    for line in [*(entry["error"] for entry in report["detail"]), *report["examples"]]:
        if line:
            print(f"  {line}")


def _print_rounds(columns: Sequence[str], keys: Sequence[str], report: dict[str, Any]) -> None:
    print_table(columns, ((str(entry[key]) for key in keys) for entry in report["detail"]))
