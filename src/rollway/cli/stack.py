"""`rollway up`, `status` and `down`."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rollway
from rollway.api import make_spec
from rollway.cli.grammar import get_spec_file
from rollway.cli.output import print_json, print_rich
from rollway.config import StackSpec
from rollway.errors import NoWorkers, RollwayError, Unreachable
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.observe.progress import StackProgress, make_process_table
from rollway.stack import local
from rollway.stack.lease import Lease
from rollway.stack.local import RunningStack
from rollway.stack.plan import plan_stack
from rollway.stack.state import StackDir, StackState, list_stacks, list_unreadable_stacks


def up(options: argparse.Namespace) -> int:
    spec = make_spec(
        get_spec_file(options),
        model=options.model,
        workers=options.workers,
        overrides=options.set,
        **({"name": options.name} if options.name else {}),
    )
    if options.dry_run:
        return _dry_run(spec, options)
    with StackProgress(quiet=options.quiet) as progress:
        stack = local.start(spec, progress)
    if options.foreground:
        return _stay_in_foreground(stack, options)
    stack.detach()
    _print_ready(stack.state, options)
    return 0


def _dry_run(spec: StackSpec, options: argparse.Namespace) -> int:
    ports = Lease()
    try:
        plan = plan_stack(
            spec,
            run_id="0" * 16,
            run_dir=Path("/tmp/rollway-dry-run"),
            log_dir=spec.log_dir or StackDir(spec.name).logs,
            ports=ports,
        )
    finally:
        ports.release()
    if options.json:
        fields = spec.model_dump(mode="json", exclude={"join": {"secret"}})
        print_json({"spec": fields, **plan.as_json()})
        return 0
    for process in plan.processes:
        print(f"# {process.name}")
        for name, value in sorted(process.env.items()):
            print(f"{name}={value} \\")
        print(f"  {shlex.join(process.argv)}\n")
    return 0


def _stay_in_foreground(stack: RunningStack, options: argparse.Namespace) -> int:
    _print_ready(stack.state, options)
    interrupted = False
    try:
        for _ in local.watch_state(stack.directory):
            pass
    except KeyboardInterrupt:
        interrupted = True
    finally:
        with StackProgress(quiet=options.quiet) as progress:
            stack.stop(progress)
    return 0 if interrupted else 1  # without Ctrl-C, the stack ended unexpectedly


def _print_ready(state: StackState, options: argparse.Namespace) -> None:
    if options.json:
        print_json(_describe(state))
        return
    print(f"{state.name} is ready: {state.frontend}/v1 serves {', '.join(state.models)}")
    print(f"  Python:  rollway.attach({state.name!r})")
    print(f"  stop:    rollway down {state.name}", flush=True)


def down(options: argparse.Namespace) -> int:
    names = local.list_names() if options.all else [local.resolve_name(options.name, dead_too=True)]
    began = time.monotonic()
    with StackProgress(quiet=options.quiet) as progress:
        local.stop_all(names, progress)
    if options.json:
        print_json({"stopped": names, "seconds": round(time.monotonic() - began, 3)})
    else:
        print("\n".join(f"stopped {name}" for name in names) or "no stack is running")
    return 0


def status(options: argparse.Namespace) -> int:
    if options.name is not None and "://" in options.name:
        return _show_remote_status(options)
    states, unreadable = list_stacks(), list_unreadable_stacks()
    if options.name is not None:
        states = [state for state in states if state.name == options.name]
        unreadable = {name: why for name, why in unreadable.items() if name == options.name}
        if not states and not unreadable:
            raise local.make_not_running_error(options.name)
    reports = [_describe(state) for state in states]
    if options.json:
        damaged = [
            {"name": name, "phase": "unreadable", "error": f"state unreadable: {why}"}
            for name, why in unreadable.items()
        ]
        print_json({"stacks": reports + damaged})
        return 0
    if not states and not unreadable:
        print("no stack is running")
    for state, report in zip(states, reports, strict=True):
        _print_status(state, report)
    for name, why in unreadable.items():
        print(f"{name}: state unreadable: {why}; `rollway down {name}` clears it")
    return 0


def _describe(state: StackState) -> dict[str, Any]:
    """Return a stack as JSON; for a ready stack, ask its workers for their versions."""
    report: dict[str, Any] = {
        "name": state.name,
        "phase": state.phase if state.is_supervised else "dead",
        "frontend": state.frontend,
        "rl": state.rl,
        "models": state.models,
        "supervisor": state.supervisor_pid,
        "started_at": state.started_at,
        "log_dir": state.log_dir,
        "invitation": state.join_spec,
        "processes": [asdict(process) for process in state.processes],
        "weight_versions": {},
    }
    if state.is_supervised and state.phase == "ready":
        report["weight_versions"] = asyncio.run(_read_versions(state))
    return report


async def _read_versions(state: StackState) -> dict[str, int | None]:
    """Return the version of each worker; empty if the workers do not answer in time."""
    async with Http() as http:
        try:
            async with asyncio.timeout(6.0):
                versions = await Fleet(http, state.rl).read_versions()
        except (RollwayError, TimeoutError):
            return {}
    return _as_text(versions)


def _as_text(versions: dict[int, int | None]) -> dict[str, int | None]:
    """Return the same with ids as text: JSON readers that use doubles would round the numbers."""
    return {str(instance): version for instance, version in versions.items()}


def _show_remote_status(options: argparse.Namespace) -> int:
    """Show a stack by the address of its frontend; Rollway need not have started it."""
    versions: dict[str, dict[str, int | None]] = {}
    with rollway.attach(options.name, watch=False) as stack:
        for model in stack.models:
            try:
                versions[model] = _as_text(stack.fleet_of(model).read_versions())
            except (Unreachable, NoWorkers):
                continue  # a frontend without RL workers is a stack too
    if options.json:
        report = {"frontend": stack.frontend_url, "models": stack.models, "versions": versions}
        print_json(report)
        return 0
    print(f"{stack.frontend_url} serves {', '.join(stack.models)}")
    for model, by_worker in versions.items():
        for instance, version in by_worker.items():
            print(f"{model}: worker {instance}: weight version {version}")
    return 0


def _print_status(state: StackState, report: dict[str, Any]) -> None:
    if not state.is_supervised:
        print(f"{state.name}: its supervisor is gone; `rollway down {state.name}` clears it")
        return
    print_rich(make_process_table(state))
    print(f"frontend {state.frontend}/v1, RL listing {state.rl}, logs {state.log_dir}")
    for instance, version in report["weight_versions"].items():
        print(f"worker {instance}: weight version {version}")
