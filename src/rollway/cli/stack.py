"""`rollway up`, `status`, `down`, `logs` and `doctor`."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

import rollway
from rollway.api import make_spec
from rollway.cli import on_ray
from rollway.cli.output import get_spec_file, print_json, print_result, print_rich, print_table
from rollway.config import StackSpec
from rollway.errors import NoWorkers, RollwayError, Unreachable, UsageError
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.private import is_plain_name
from rollway.stack import local, logs
from rollway.stack.doctor import Finding, Listener, examine, list_listeners
from rollway.stack.local import RunningStack
from rollway.stack.locks import Lease
from rollway.stack.plan import plan_stack
from rollway.stack.progress import StackProgress, make_process_table
from rollway.stack.ray import launcher
from rollway.stack.state import (
    StackDir,
    StackState,
    is_ray_part,
    list_stack_names,
    list_stacks,
    list_unreadable_stacks,
)


def up(options: argparse.Namespace) -> int:
    spec = make_spec(
        get_spec_file(options),
        model=options.model,
        workers=options.workers,
        on=options.on,
        overrides=options.set,
        **({"name": options.name} if options.name else {}),
    )
    if options.dry_run:
        return on_ray.dry_run(spec, options) if spec.launcher == "ray" else _dry_run(spec, options)
    with StackProgress(quiet=options.quiet) as progress:
        if spec.launcher == "ray":
            return on_ray.up(spec, options, progress)
        stack = local.start(spec, progress)
    if options.foreground:
        return _stay_in_foreground(stack, options)
    stack.detach()
    print_ready(stack.state, options)
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
    print_ready(stack.state, options)
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


def print_ready(state: StackState, options: argparse.Namespace) -> None:
    if options.json:
        print_json(describe(state))
        return
    print(f"{state.name} is ready: {state.frontend}/v1 serves {', '.join(state.models)}")
    print(f"  Python:  rollway.attach({state.name!r})")
    print(f"  stop:    rollway down {state.name}", flush=True)


def down(options: argparse.Namespace) -> int:
    if on_ray.is_meant(options):
        return on_ray.down(options)
    names = local.list_names() if options.all else [local.resolve_name(options.name, dead_too=True)]
    began = time.monotonic()
    with StackProgress(quiet=options.quiet) as progress:
        local.stop_all(names, progress)
    result = {"stopped": names, "seconds": round(time.monotonic() - began, 3)}
    text = "\n".join(f"stopped {name}" for name in names) or "no stack is running"
    print_result(options, result, lambda _: print(text))
    return 0


def status(options: argparse.Namespace) -> int:
    if options.name is not None and "://" in options.name:
        return _show_remote_status(options)
    states, unreadable = list_stacks(), list_unreadable_stacks()
    if on_ray.may_be_meant(options):
        states = [state for state in states if not is_ray_part(state.name)]
        states += launcher.list_stacks(on_ray.get_address(options))
    if options.name is not None:
        states = [state for state in states if state.name == options.name]
        unreadable = {name: why for name, why in unreadable.items() if name == options.name}
        if not states and not unreadable:
            raise local.make_not_running_error(options.name)
    reports = [describe(state) for state in states]
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


def describe(state: StackState) -> dict[str, Any]:
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
        # Ids as text: JSON readers that use doubles would round the numbers.
        "processes": [
            {**asdict(each), "instance": each.instance and str(each.instance)}
            for each in state.processes
        ],
        "weight_versions": {},
        "refused_calls": _read_refusals(state),
    }
    if state.is_supervised and state.phase == "ready":
        report["weight_versions"] = asyncio.run(_read_versions(state))
    return report


def _read_refusals(state: StackState) -> list[str]:
    """Return what the servers of prime-rl refused last, which prime-rl itself does not tell."""
    from rollway.integrations.prime_rl.memory import Memory, find_file

    files = [find_file(state.name, model) for model in state.models]
    refusals = [Memory(file, state.run_id).record.refusal for file in files if file.exists()]
    return [refusal for refusal in refusals if refusal]


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
    for reason in state.waiting:
        print(f"waiting: {reason}")
    print(f"frontend {state.frontend}/v1, RL listing {state.rl}, logs {state.log_dir}")
    for instance, version in report["weight_versions"].items():
        print(f"worker {instance}: weight version {version}")
    for refusal in report["refused_calls"]:
        print(f"prime-rl: {refusal}")


# --- logs ----------------------------------------------------------------------------------------


def show_logs(options: argparse.Namespace) -> int:
    if on_ray.is_meant(options, (options.name or (options.names or [None])[0])):
        return on_ray.show_logs(options)
    name, process = _read_log_names(options)
    directory = _find_log_directory(name)
    path = directory / f"{process}.log" if is_plain_name(process or "") else None
    if path is None or not path.is_file():
        return _list_logs(directory, process, options)

    def has_ended() -> bool:
        state = StackDir(name).read()
        return state is None or not state.is_supervised

    if options.json:
        print_json({"log": str(path), "lines": logs.tail(path, options.lines)})
    elif options.follow:
        for line in logs.follow(path, lines=options.lines, ended=has_ended):
            print(line, flush=True)
    else:
        print("\n".join(logs.tail(path, options.lines)))
    return 0


def _read_log_names(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the stack and the process that were named."""
    names = [*([options.name] if options.name else []), *options.names]
    if len(names) > 2:
        raise UsageError(
            f"`rollway logs {' '.join(names)}` has too many words.", "Give a stack and a process."
        )
    if len(names) == 2:
        return names[0], names[1]
    # A single name is a stack if there is one of that name, otherwise a process of the only stack.
    if names and (options.name or names[0] in list_stack_names()):
        return names[0], None
    return _find_only_stack(), names[0] if names else None


def _find_only_stack() -> str:
    """Return the running stack; `default` when nothing runs, whose last logs may remain."""
    try:
        return local.resolve_name(None)
    except RollwayError:
        if len(list_stacks()) > 1:
            raise
        return "default"


def _find_log_directory(name: str) -> Path:
    state = StackDir(name).read()
    return Path(state.log_dir) if state else StackDir(name).logs


def _list_logs(directory: Path, process: str | None, options: argparse.Namespace) -> int:
    names = [path.stem for path in sorted(directory.glob("*.log"))]
    if process is not None:
        known = f"There are: {', '.join(names)}." if names else "Nothing has run there yet."
        raise UsageError(f"There is no log of `{process}` in {directory}.", known)
    text = "\n".join(names) if names else f"no logs in {directory}"
    print_result(options, {"directory": str(directory), "logs": names}, lambda _: print(text))
    return 0


# --- doctor --------------------------------------------------------------------------------------


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def doctor(options: argparse.Namespace) -> int:
    if options.ports is not None:
        return _show_ports(options)
    if options.stack is not None:
        return _examine_stack(options)
    findings = examine()
    result = {"findings": [finding.as_json() for finding in findings]}
    print_result(options, result, lambda _: _print_findings(findings))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _examine_stack(options: argparse.Namespace) -> int:
    """Check a stack that runs, with a few short requests."""
    from rollway.observe.doctor import examine_stack  # loads the whole API

    name = options.stack
    if "://" not in name:
        name = launcher.resolve_name(name or None)
    done = asyncio.run(examine_stack(name, options.rl_url))
    result = {
        "stack": done.stack,
        "findings": [finding.as_json() for finding in done.findings],
        "requests": done.requests,
        "tokens": done.tokens,
    }

    def show(_: dict[str, Any]) -> None:
        _print_findings(done.findings)
        print(f"{done.stack} was sent {done.requests} requests, which took {done.tokens} tokens.")

    print_result(options, result, show)
    return 1 if any(finding.level == "error" for finding in done.findings) else 0


def _print_findings(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, *map(Text, (finding.check, finding.found, finding.advice)))
    print_rich(table)


def _show_ports(options: argparse.Namespace) -> int:
    """List the listeners of running stacks, and warn about those that the network can reach."""
    states = [state for state in list_stacks() if state.is_supervised]
    if options.ports:
        states = [state for state in states if state.name == options.ports]
        if not states:
            raise local.make_not_running_error(options.ports)
    listeners = [listener for state in states for listener in list_listeners(state)]
    result = {"listeners": [listener.as_json() for listener in listeners]}
    print_result(options, result, lambda _: _print_listeners(listeners))
    return 0


def _print_listeners(listeners: list[Listener]) -> None:
    """Print one row for all listeners that differ only in their port or socket."""
    if not listeners:  # a running stack has some
        print("no stack is running")
        return
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in listeners:
        directory, slash, name = entry.address.rpartition("/")
        host, place = (entry.address, str(entry.port)) if entry.port else (directory + slash, name)
        key = (entry.stack, entry.process, f"{entry.protocol} {host}", entry.reach, entry.purpose)
        rows.setdefault(key, []).append(place)
    print_table(
        ("stack", "process", "where", "reached by", "for"),
        (
            (stack, process, f"{host} {_join_places(places)}", reach, purpose)
            for (stack, process, host, reach, purpose), places in rows.items()
        ),
    )
    for advice in dict.fromkeys(entry.advice for entry in listeners if entry.advice):
        ports = sorted(str(entry.port) for entry in listeners if entry.advice == advice)
        print(f"warning: the network can reach {', '.join(ports)}. {advice}")


def _join_places(places: list[str]) -> str:
    return ", ".join(places) if len(places) < 4 else f"{len(places)} of them"
