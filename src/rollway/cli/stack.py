"""`rollway up`, `status`, `down` and `logs`, for stacks of this machine and on Ray."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rollway
from rollway.api import make_spec, parse_launcher
from rollway.cli.arguments import (
    Parser,
    add_flag,
    add_name,
    add_on,
    add_quiet,
    add_spec,
    set_command,
)
from rollway.cli.output import (
    get_spec_file,
    print_json,
    print_result,
    print_rich,
    print_table,
)
from rollway.errors import NoWorkers, RollwayError, Unreachable, UsageError
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.private_files import is_plain_name
from rollway.spec import StackSpec
from rollway.stack import local, logs
from rollway.stack.local import RunningStack
from rollway.stack.locks import Lease
from rollway.stack.plan import plan_stack
from rollway.stack.progress import StackProgress, make_process_table
from rollway.stack.ray import launcher
from rollway.stack.ray.cluster import find_address
from rollway.stack.ray.parts import plan_processes
from rollway.stack.state import (
    StackDir,
    StackState,
    is_ray_part,
    list_stack_names,
    list_stacks,
    list_unreadable_stacks,
)


def get_address(options: argparse.Namespace) -> str | None:
    """Return the address of `--on ray=ADDRESS`, or the one that `--on ray` means."""
    return parse_launcher(options.on)[1] or find_address() if options.on else None


def may_be_on_ray(options: argparse.Namespace) -> bool:
    """Return whether stacks of a Ray cluster are to be looked for."""
    if options.on is not None:
        return parse_launcher(options.on)[0] == "ray"
    return launcher.may_reach_cluster()


def is_on_ray(options: argparse.Namespace, name: str | None) -> bool:
    """Return whether a command is about a stack on Ray and not about one of this machine."""
    has_namespace = (name or "").find("/") > 0  # `/etc` names a stack nowhere
    if options.on is not None or has_namespace:
        return has_namespace or may_be_on_ray(options)
    if getattr(options, "all", False) or not launcher.may_reach_cluster():
        return False
    names = local.list_names()  # also one that is still starting
    return name not in names if name else not names


# --- up and down ---------------------------------------------------------------------------------


def up(options: argparse.Namespace) -> int:
    spec = make_spec(
        get_spec_file(options),
        model=options.model,
        workers=options.workers,
        on=options.on,
        overrides=options.set,
        **({"name": options.name} if options.name else {}),
    )
    is_ray = spec.launcher == "ray"
    if options.dry_run:
        return _plan_on_ray(spec, options) if is_ray else _plan_here(spec, options)
    with StackProgress(quiet=options.quiet) as progress:
        stack = launcher.start(spec, progress) if is_ray else local.start(spec, progress)
    if options.foreground:
        return _stay_in_foreground(stack, options)
    stack.detach()
    print_ready(stack.state, options)
    return 0


def _plan_here(spec: StackSpec, options: argparse.Namespace) -> int:
    """Print the commands of a stack, and start nothing."""
    ports = Lease()
    log_dir = spec.log_dir or StackDir(spec.name).logs
    run_dir = Path("/tmp/rollway-dry-run")
    try:
        plan = plan_stack(spec, run_id="0" * 16, run_dir=run_dir, log_dir=log_dir, ports=ports)
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


def _plan_on_ray(spec: StackSpec, options: argparse.Namespace) -> int:
    """Print where each process would run, and with which command; start nothing."""
    rows = plan_processes(spec, *launcher.plan(spec))
    columns = ("process", "replica", "rank", "address", "gpus", "argv")
    table = ([_show_cell(row[column]) for column in columns] for row in rows)
    header = ("process", "replica", "rank", "node", "GPUs", "command")
    print_result(options, {"processes": rows}, lambda _: print_table(header, table))
    return 0


def _show_cell(value: object) -> str:
    if isinstance(value, list):
        return shlex.join(value)
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _stay_in_foreground(stack: RunningStack | launcher.RayStack, options: Any) -> int:
    """Stay until Ctrl-C, or until the stack ends by itself, which is a failure."""
    print_ready(stack.state, options)
    try:
        if isinstance(stack, launcher.RayStack):
            raise asyncio.run(stack.access.wait_until_over())
        for _ in local.watch_state(stack.directory):
            pass
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        with StackProgress(quiet=options.quiet) as progress:
            stack.stop(progress)


def print_ready(state: StackState, options: argparse.Namespace) -> None:
    if options.json:
        print_json(describe(state))
        return
    print(f"{state.name} is ready: {state.frontend}/v1 serves {', '.join(state.models)}")
    print(f"  Python:  rollway.attach({state.name!r})")
    print(f"  stop:    rollway down {state.name}", flush=True)


def down(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if is_on_ray(options, options.name):
        names = _stop_on_ray(options)
    else:
        names = local.list_names()
        if not options.all:
            names = [local.resolve_name(options.name, dead_too=True)]
        with StackProgress(quiet=options.quiet) as progress:
            local.stop_all(names, progress)
    result = {"stopped": names, "seconds": round(time.monotonic() - began, 3)}
    text = "\n".join(f"stopped {name}" for name in names) or "no stack is running"
    print_result(options, result, lambda _: print(text))
    return 0


def _stop_on_ray(options: argparse.Namespace) -> list[str]:
    address = get_address(options)
    if options.all:
        names = [f"{s.ray_namespace}/{s.name}" for s in launcher.list_stacks(address)]
    else:
        names = [options.name or launcher.resolve_on_cluster(address)]
    with StackProgress(quiet=options.quiet) as progress:
        for name in names:
            running = launcher.find(name, address)
            if running is not None:
                running.stop(progress)
            elif not options.all:
                launcher.clear_leftovers(address)
                raise local.make_not_running_error(name)
    launcher.clear_leftovers(address)
    return names


# --- status --------------------------------------------------------------------------------------


def status(options: argparse.Namespace) -> int:
    if options.name is not None and "://" in options.name:
        return _show_remote_status(options)
    states, unreadable = list_stacks(), list_unreadable_stacks()
    if may_be_on_ray(options):
        states = [state for state in states if not is_ray_part(state.name)]
        states += launcher.list_stacks(get_address(options))
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
    if len(options.names) > 2:
        raise UsageError(
            f"`rollway logs {' '.join(options.names)}` has too many words.",
            "Give a stack and a process.",
        )
    if is_on_ray(options, (options.names or [None])[0]):
        return _show_ray_logs(options)
    name, process = _read_log_names(options.names)
    state = StackDir(name).read()
    directory = Path(state.log_dir) if state else StackDir(name).logs
    path = directory / f"{process}.log" if is_plain_name(process or "") else None
    if path is None or not path.is_file():
        known = [path.stem for path in sorted(directory.glob("*.log"))]
        return _list_logs(options, process, known, {"directory": str(directory)})

    def has_ended() -> bool:
        state = StackDir(name).read()
        return state is None or not state.is_supervised

    if options.json:
        print_json({"log": str(path), "lines": logs.tail(path, options.lines)})
    elif options.follow:
        _print_lines(logs.follow(path, lines=options.lines, ended=has_ended))
    else:
        _print_lines(logs.tail(path, options.lines))
    return 0


def _show_ray_logs(options: argparse.Namespace) -> int:
    address, (name, process) = get_address(options), [*options.names, None, None][:2]
    running = launcher.find(name or launcher.resolve_on_cluster(address), address)
    if running is None:
        raise local.make_not_running_error(name)
    known = [process.name for process in running.state.processes]
    if process not in known:
        return _list_logs(options, process, known, {})
    if options.follow and not options.json:
        _print_lines(launcher.follow_log(running, process, options.lines))
        return 0
    lines = running.access.read_log(process, options.lines)
    print_result(options, {"lines": lines}, lambda _: _print_lines(lines))
    return 0


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _read_log_names(names: list[str]) -> tuple[str, str | None]:
    """Return the stack and the process that were named."""
    if len(names) == 2:
        return names[0], names[1]
    # A single name is a stack if there is one of that name, otherwise a process of the only stack.
    if names and names[0] in list_stack_names():
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


def _list_logs(
    options: argparse.Namespace, process: str | None, known: list[str], place: dict[str, str]
) -> int:
    if process is not None:
        hint = f"There are: {', '.join(known)}." if known else "Nothing has run there yet."
        raise UsageError(f"There is no log of `{process}`.", hint)
    text = "\n".join(known) or "there are no logs"
    print_result(options, {**place, "logs": known}, lambda _: print(text))
    return 0


# --- arguments ---------------------------------------------------------------------------------


def add_up(parser: Parser) -> None:
    set_command(parser, up)
    add_spec(parser, "a stack file (YAML), see docs/stack.md")
    parser.add_argument("--model", help="serve this checkpoint, without a stack file")
    parser.add_argument("--workers", type=int, help="replicas of the first model")
    parser.add_argument("--name", help="name of the stack (default: default)")
    add_on(parser, "where to run it: local (default), ray, or ray=HOST:PORT")
    add_flag(parser, "--foreground", "stay, and stop it on Ctrl-C")
    add_flag(parser, "--dry-run", "print the commands, start nothing")
    add_quiet(parser)


def add_status(parser: Parser) -> None:
    set_command(parser, status)
    add_name(parser, "one stack, or the address of any frontend; all stacks without it")
    add_on(parser)


def add_logs(parser: Parser) -> None:
    set_command(parser, show_logs)
    parser.usage = "rollway logs [-h] [-f] [-n LINES] [--json] [NAME] [PROCESS]"
    parser.add_argument(
        "names",
        nargs="*",
        metavar="[NAME] [PROCESS]",
        help="a stack (optional when there is one) and a process (the list of logs without it)",
    )
    add_on(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="wait for new lines")
    parser.add_argument("-n", "--lines", type=int, default=50, help="how many (default 50)")


def add_down(parser: Parser) -> None:
    set_command(parser, down)
    add_name(parser, "a stack; optional when there is one")
    add_on(parser)
    add_flag(parser, "--all", "every stack of this user")
    add_quiet(parser)
