"""The `rollway` command. Results on stdout, progress and errors on stderr.

Exit codes: 0 done, 1 something failed, 2 the input was wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rollway
from rollway.api import make_spec
from rollway.cli import bench as bench_command
from rollway.cli import fleet as fleet_command
from rollway.cli import gateway as gateway_command
from rollway.cli import weights as weights_command
from rollway.errors import NoWorkers, RollwayError, StartError, Unreachable, UsageError
from rollway.extras import require
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.observe.progress import StackProgress, process_table
from rollway.private import is_plain_name
from rollway.stack import doctor, local, logs
from rollway.stack.lease import Lease
from rollway.stack.listeners import listeners_of
from rollway.stack.plan import plan_stack
from rollway.stack.state import StackDir, StackState, known_stacks, unreadable_stacks
from rollway.sync import SyncFleet

Command = Callable[[argparse.Namespace], int]
# Elsewhere than on a terminal nothing is folded to 80 columns.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    command: Command | None = getattr(options, "command", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        return command(options)
    except RollwayError as error:
        return _fail(error, as_json=getattr(options, "json", False))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        trouble = RollwayError(
            f"The system refused: {what}.", "Check the path and its permissions."
        )
        return _fail(trouble, as_json=getattr(options, "json", False))


def up(options: argparse.Namespace) -> int:
    spec = make_spec(
        options.stack,
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
        return _foreground(stack, options)
    stack.detach()
    _print_ready(stack.state, options)
    return 0


def down(options: argparse.Namespace) -> int:
    everything = options.all
    names = local.all_names() if everything else [local.resolve_name(options.name, dead_too=True)]
    began = time.monotonic()
    with StackProgress(quiet=options.quiet) as progress:
        local.stop_all(names, progress)
    if options.json:
        print(json.dumps({"stopped": names, "seconds": round(time.monotonic() - began, 3)}))
    else:
        print("\n".join(f"stopped {name}" for name in names) or "no stack is running")
    return 0


def status(options: argparse.Namespace) -> int:
    if options.name is not None and "://" in options.name:
        return _status_elsewhere(options)
    states, unreadable = known_stacks(), unreadable_stacks()
    if options.name is not None:
        states = [state for state in states if state.name == options.name]
        unreadable = {name: why for name, why in unreadable.items() if name == options.name}
        if not states and not unreadable:
            raise local.not_running(options.name)
    reports = [_status_of(state) for state in states]
    if options.json:
        damaged = [
            {"name": name, "phase": "unreadable", "error": f"state unreadable: {why}"}
            for name, why in unreadable.items()
        ]
        print(json.dumps({"stacks": reports + damaged}))
        return 0
    if not states and not unreadable:
        print("no stack is running")
    for state, report in zip(states, reports, strict=True):
        _print_status(state, report)
    for name, why in unreadable.items():
        print(f"{name}: state unreadable: {why}; `rollway down {name}` clears it")
    return 0


def show_logs(options: argparse.Namespace) -> int:
    directory, name = _log_directory(options)
    plain = is_plain_name(options.process or "")
    path = directory / f"{options.process}.log" if plain else None
    if path is None or not path.is_file():
        return _list_logs(directory, options)
    directory_of = StackDir(name)

    def ended() -> bool:
        state = directory_of.read()
        return state is None or not state.supervised

    if options.json:
        print(json.dumps({"log": str(path), "lines": logs.tail(path, options.lines)}))
    elif options.follow:
        for line in logs.follow(path, lines=options.lines, ended=ended):
            print(line, flush=True)
    else:
        print("\n".join(logs.tail(path, options.lines)))
    return 0


def examine(options: argparse.Namespace) -> int:
    if options.ports is not None:
        return _show_ports(options)
    findings = doctor.examine()
    if options.json:
        print(json.dumps({"findings": [finding.as_json() for finding in findings]}))
    else:
        _print_findings(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def demo(options: argparse.Namespace) -> int:
    require("torch", "transformers", "matplotlib")
    from rollway.demo.run import DemoOptions, run_demo

    chosen = DemoOptions(
        steps=options.steps,
        seed=options.seed,
        workers=options.workers,
        engine=options.engine,
        refit=not options.no_refit,
        name=options.name,
        directory=options.out,
        quiet=options.json,
    )
    report = run_demo(chosen)
    if options.json:
        print(json.dumps(report))
    return 0


def chaos(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    if options.gateway:
        return _chaos_of_gateway(options)
    if options.old_journal:
        raise UsageError("--old-journal is a control of --gateway.", "Give both.")
    from rollway.chaos.command import run_command

    report = run_command(
        options.stack,
        rounds=options.rounds,
        seed=options.seed,
        faults=options.fault,
        unprotected=options.unprotected,
        overrides=options.set,
        quiet=options.quiet,
    )
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print_chaos(report.as_json())
    # A control that finds nothing has shown that the check cannot fail.
    good = report.stale_tokens > 0 if options.unprotected else report.clean
    return 0 if good else 1


def _chaos_of_gateway(options: argparse.Namespace) -> int:
    if options.unprotected:
        raise UsageError("--unprotected is a control of refits.", "Use --old-journal here.")
    from rollway.chaos.command import run_gateway_command

    report = run_gateway_command(
        options.stack,
        rounds=options.rounds,
        agents=options.agents,
        seed=options.seed,
        faults=options.fault,
        old_journal=options.old_journal,
        overrides=options.set,
        quiet=options.quiet,
    )
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print_gateway_chaos(report.as_json())
    return 0 if report.clean else 1


# --- what the commands print ---------------------------------------------------------------


def _dry_run(spec: rollway.StackSpec, options: argparse.Namespace) -> int:
    ports = Lease()
    try:
        directory = StackDir(spec.name)
        plan = plan_stack(
            spec,
            run_id="0" * 16,
            run_dir=Path("/tmp/rollway-dry-run"),
            log_dir=spec.log_dir or directory.logs,
            ports=ports,
        )
    finally:
        ports.release()
    if options.json:
        shown = spec.model_dump(mode="json", exclude={"join": {"secret"}})
        print(json.dumps({"spec": shown, **plan.as_json()}))
        return 0
    for process in plan.processes:
        print(f"# {process.name}")
        for name, value in sorted(process.env.items()):
            print(f"{name}={value} \\")
        print("  " + " ".join(_quoted(word) for word in process.argv) + "\n")
    return 0


def _foreground(stack: local.RunningStack, options: argparse.Namespace) -> int:
    _print_ready(stack.state, options)
    interrupted = False
    try:
        for _ in local.each_state(stack.directory):
            pass
    except KeyboardInterrupt:
        interrupted = True
    finally:
        with StackProgress(quiet=options.quiet) as progress:
            stack.stop(progress)
    return 0 if interrupted else 1  # it ended without being asked to from here


def _print_ready(state: StackState, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({**_status_of(state), "name": state.name}), flush=True)
        return
    print(f"{state.name} is ready: {state.frontend}/v1 serves {', '.join(state.models)}")
    print(f"  Python:  rollway.attach({state.name!r})")
    print(f"  stop:    rollway down {state.name}", flush=True)


def _status_of(state: StackState) -> dict[str, Any]:
    report: dict[str, Any] = {
        "name": state.name,
        "phase": state.phase if state.supervised else "dead",
        "frontend": state.frontend,
        "rl": state.rl,
        "models": state.models,
        "supervisor": state.supervisor_pid,
        "started_at": state.started_at,
        "log_dir": state.log_dir,
        "invitation": state.invitation,
        "processes": [asdict(process) for process in state.processes],
        "weight_versions": {},
    }
    if state.supervised and state.phase == "ready":
        report["weight_versions"] = asyncio.run(_weight_versions(state))
    return report


async def _weight_versions(state: StackState) -> dict[str, int | str | None]:
    """By instance id as text: JSON readers with doubles would round the number."""
    async with Http() as http:
        try:
            async with asyncio.timeout(6.0):
                versions = await Fleet(http, state.rl).read_versions()
        except (RollwayError, TimeoutError):
            return {}
        return {str(instance): version for instance, version in versions.items()}


def _status_elsewhere(options: argparse.Namespace) -> int:
    """A stack that Rollway did not start, by its frontend's address."""
    with rollway.attach(options.name, watch=False) as stack:
        versions = {
            model: {str(i): v for i, v in fleet_versions.items()}
            for model in stack.models
            if (fleet_versions := _versions_if_any(stack.fleet_of(model))) is not None
        }
        report = {"frontend": stack.frontend_url, "models": stack.models, "versions": versions}
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{stack.frontend_url} serves {', '.join(stack.models)}")
    for model, by_worker in versions.items():
        for instance, version in by_worker.items():
            print(f"{model}: worker {instance}: weight version {version}")
    return 0


def _versions_if_any(fleet: SyncFleet) -> dict[int, int | None] | None:
    try:
        return fleet.read_versions()
    except (Unreachable, NoWorkers):
        return None


def _print_status(state: StackState, report: dict[str, Any]) -> None:
    if not state.supervised:
        out.print(f"{state.name}: its supervisor is gone; `rollway down {state.name}` clears it")
        return
    out.print(process_table(state))
    out.print(f"frontend {state.frontend}/v1, RL listing {state.rl}, logs {state.log_dir}")
    for instance, version in report["weight_versions"].items():
        out.print(f"worker {instance}: weight version {version}")


def _log_directory(options: argparse.Namespace) -> tuple[Path, str]:
    """Of the running stack, or of the last run of the named one."""
    try:
        name = local.resolve_name(options.name)
    except RollwayError:
        if options.name is None and len(known_stacks()) > 1:
            raise
        name = options.name or "default"
    state = StackDir(name).read()
    return (Path(state.log_dir) if state else StackDir(name).logs), name


def _list_logs(directory: Path, options: argparse.Namespace) -> int:
    names = [path.stem for path in sorted(directory.glob("*.log"))]
    if options.process is not None:
        known = f"There are: {', '.join(names)}." if names else "Nothing has run there yet."
        raise UsageError(f"There is no log of `{options.process}` in {directory}.", known)
    if options.json:
        print(json.dumps({"directory": str(directory), "logs": names}))
    else:
        print("\n".join(names) if names else f"no logs in {directory}")
    return 0


def _print_findings(findings: list[doctor.Finding]) -> None:
    styles = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    for finding in findings:
        style = styles[finding.level]
        table.add_row(
            f"[{style}]{finding.level}[/{style}]", finding.check, finding.found, finding.advice
        )
    out.print(table)


def _show_ports(options: argparse.Namespace) -> int:
    """List the listeners of running stacks, and warn about those that the network can reach."""
    states = [state for state in known_stacks() if state.supervised]
    if options.ports:
        states = [state for state in states if state.name == options.ports]
    if not states and options.ports:
        raise local.not_running(options.ports)
    listed = [listener for state in states for listener in listeners_of(state)]
    if options.json:
        print(json.dumps({"listeners": [listener.as_json() for listener in listed]}))
        return 0
    if not states:
        print("no stack is running")
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("stack", "process", "where", "reached by", "for"):
        table.add_column(column, overflow="fold")
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in listed:
        directory, slash, name = entry.address.rpartition("/")
        host, place = (entry.address, str(entry.port)) if entry.port else (directory + slash, name)
        key = (entry.stack, entry.process, f"{entry.protocol} {host}", entry.reach, entry.purpose)
        rows.setdefault(key, []).append(place)
    for (stack, process, host, reach, purpose), places in rows.items():
        shown = ", ".join(places) if len(places) < 4 else f"{len(places)} of them"
        table.add_row(stack, process, f"{host} {shown}", reach, purpose)
    out.print(table, markup=False)
    for advice in dict.fromkeys(entry.advice for entry in listed if entry.advice):
        ports = sorted(str(entry.port) for entry in listed if entry.advice == advice)
        print(f"warning: the network can reach {', '.join(ports)}. {advice}")
    return 0


def _print_chaos(report: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("round", "fault", "step", "mode", "outcome", "seconds", "healed in"):
        table.add_column(column)
    for entry in report["detail"]:
        keys = ("number", "fault", "step", "mode", "outcome", "seconds", "heal_seconds")
        table.add_row(*(str(entry[key]) for key in keys))
    out.print(table)
    names = ("rounds", "rollouts", "tokens_checked", "stale_tokens", "wrong_logprobs")
    for name in (*names, "lost_rollouts", "hangs", "orphans", "seconds"):
        out.print(f"{name.replace('_', ' ')}: {report[name]}")
    for line in report["examples"][:5]:
        out.print(f"  {line}", markup=False)


def _print_gateway_chaos(report: dict[str, Any]) -> None:
    keys = ("number", "fault", "struck", "turns", "sessions", "lost_turns", "seconds")
    table = Table(*(key.replace("_", " ") for key in keys), box=None, pad_edge=False)
    for entry in report["detail"]:
        table.add_row(*(str(entry[key]) for key in keys))
    out.print(table)
    for name, value in report.items():
        if name not in ("detail", "examples"):
            out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    for line in [*(entry["error"] for entry in report["detail"]), *report["examples"]]:
        if line:
            out.print(f"  {line}", markup=False)


def _fail(error: RollwayError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_json()))
    if isinstance(error, StartError) and error.log_tail:
        print(error.log_tail, file=sys.stderr)
        print(file=sys.stderr)
    print(f"rollway: {error}", file=sys.stderr)
    return error.exit_code


def _quoted(word: str) -> str:
    return f"'{word}'" if any(sign in word for sign in ' "{}*$&|;<>()') else word


# --- the grammar ---------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollway", description="NVIDIA Dynamo as the rollout backend of any RL trainer."
    )
    parser.add_argument("--version", action="version", version=f"rollway {rollway.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        child = commands.add_parser(name, help=text, description=text)
        child.add_argument("--json", action="store_true", help="one JSON object on stdout")
        child.set_defaults(command=command)
        return child

    _up_grammar(add("up", up, "start a stack and return when it is ready"))
    child = add("status", status, "show running stacks, their processes and weight versions")
    child.add_argument("name", nargs="?", help="one stack, or the address of any frontend")
    child = add("logs", show_logs, "show the log of a process")
    child.add_argument("process", nargs="?", help="for example frontend; none: list them")
    child.add_argument("-f", "--follow", action="store_true", help="go on as the log grows")
    child.add_argument("-n", "--lines", type=int, default=50, help="how many (default 50)")
    child.add_argument("--name", help="the stack, when several run")
    child = add("down", down, "stop a stack, and clear what killed ones left")
    child.add_argument("name", nargs="?", help="the stack; none: the only one that runs")
    child.add_argument("--all", action="store_true", help="every stack of this user")
    child.add_argument("--quiet", action="store_true", help="no progress display")
    child = add("doctor", examine, "check this machine: versions, programs, ports, memory, GPUs")
    child.add_argument(
        "--ports",
        nargs="?",
        const="",
        metavar="STACK",
        help="list where running stacks (or one) listen, and who can reach it",
    )
    fleet_command.add_grammar(
        commands.add_parser("fleet", help="list, pause, refit, watch the workers of a stack")
    )
    gateway_command.add_grammar(
        commands.add_parser("gateway", help="an OpenAI endpoint that records sessions as tokens")
    )
    weights_command.add_grammar(
        commands.add_parser("weights", help="look into weights, compare them, plan their moves")
    )
    child = add("chaos", chaos, "refit while things break, and check every token")
    _chaos_grammar(child)
    bench = commands.add_parser("bench", help="measure, as ratios within one run")
    bench_command.add_grammar(bench)
    _demo_grammar(add("demo", demo, "train a tiny policy with GRPO on a real stack"))
    return parser


def _up_grammar(child: argparse.ArgumentParser) -> None:
    child.add_argument("stack", nargs="?", type=Path, help="a stack file (YAML), see docs/stack.md")
    child.add_argument("--model", help="serve this checkpoint, without a stack file")
    child.add_argument("--workers", type=int, help="replicas of the first model")
    child.add_argument("--name", help="name of the stack (default: default)")
    child.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override a field; repeatable"
    )
    child.add_argument("--foreground", action="store_true", help="stay, and stop it on Ctrl-C")
    child.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    child.add_argument("--quiet", action="store_true", help="no progress display")


def _chaos_grammar(child: argparse.ArgumentParser) -> None:
    child.add_argument("stack", nargs="?", type=Path, help="a stack file; none: 2 vLLM workers")
    child.add_argument("--rounds", type=int, default=20, help="how many refits (default 20)")
    child.add_argument("--seed", type=int, default=0, help="of faults, steps, modes and prompts")
    child.add_argument(
        "--gateway", action="store_true", help="break the gateway instead, and check every turn"
    )
    child.add_argument("--agents", type=int, default=64, help="with --gateway: how many at once")
    child.add_argument(
        "--old-journal", action="store_true", help="the control of --gateway: it must lose turns"
    )
    child.add_argument("--fault", action="append", default=[], help="only this one; repeatable")
    child.add_argument(
        "--unprotected", action="store_true", help="the control: it must find stale tokens"
    )
    child.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override a field; repeatable"
    )
    child.add_argument("--quiet", action="store_true", help="no progress display")


def _demo_grammar(child: argparse.ArgumentParser) -> None:
    child.add_argument("--steps", type=int, default=None, help="training steps")
    child.add_argument("--seed", type=int, default=0)
    child.add_argument("--workers", type=int, default=2)
    child.add_argument("--engine", choices=["vllm", "mocker"], default="vllm")
    child.add_argument(
        "--no-refit", action="store_true", help="the control: train, but never update the workers"
    )
    child.add_argument("--name", default="demo", help="name of its stack, to run several at once")
    child.add_argument("--out", type=Path, default=None, help="directory for the report and plot")


if __name__ == "__main__":
    sys.exit(main())
