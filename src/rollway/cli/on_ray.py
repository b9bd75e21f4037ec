"""`rollway up`, `down` and `logs` for stacks on a Ray cluster; `stack.py` decides when."""

from __future__ import annotations

import argparse
import asyncio
import time

from rollway.api import parse_launcher
from rollway.cli import stack
from rollway.cli.output import print_json, print_result, print_table
from rollway.config import StackSpec
from rollway.errors import UsageError
from rollway.stack import local
from rollway.stack.progress import StackProgress
from rollway.stack.ray import launcher
from rollway.stack.ray.connection import find_address
from rollway.stack.ray.dry_run import COLUMNS, plan_processes


def get_address(options: argparse.Namespace) -> str | None:
    """Return the address of `--on ray=ADDRESS`, or the one that `--on ray` means."""
    return parse_launcher(options.on)[1] or find_address() if options.on else None


def may_be_meant(options: argparse.Namespace) -> bool:
    """Return whether stacks of a Ray cluster are to be looked for."""
    if options.on is not None:
        return parse_launcher(options.on)[0] == "ray"
    return launcher.may_reach_cluster()


def is_meant(options: argparse.Namespace, name: str | None = None) -> bool:
    """Return whether a command is about a stack on Ray and not about one of this machine."""
    name = name or options.name
    has_namespace = (name or "").find("/") > 0  # `/etc` names a stack nowhere
    if options.on is not None or has_namespace:
        return has_namespace or may_be_meant(options)
    if getattr(options, "all", False) or not launcher.may_reach_cluster():
        return False
    names = local.list_names()  # also one that is still starting
    return name not in names if name else not names


def up(spec: StackSpec, options: argparse.Namespace, progress: StackProgress) -> int:
    running = launcher.start(spec, progress)
    if options.foreground:
        stack.print_ready(running.state, options)
        try:
            raise asyncio.run(running.access.wait_until_over())
        except KeyboardInterrupt:
            running.stop(progress)
            return 0
    running.detach()
    stack.print_ready(running.state, options)
    return 0


def dry_run(spec: StackSpec, options: argparse.Namespace) -> int:
    """Print where each process would run, and with which command; start nothing."""
    rows = plan_processes(spec, *launcher.plan(spec))
    result = {"processes": [row.as_json() for row in rows]}
    print_result(options, result, lambda _: print_table(COLUMNS, (row.as_row() for row in rows)))
    return 0


def down(options: argparse.Namespace) -> int:
    address, began = get_address(options), time.monotonic()
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
    result = {"stopped": names, "seconds": round(time.monotonic() - began, 3)}
    text = "\n".join(f"stopped {name}" for name in names) or "no stack is running"
    print_result(options, result, lambda _: print(text))
    return 0


def show_logs(options: argparse.Namespace) -> int:
    names = [*([options.name] if options.name else []), *options.names]
    address = get_address(options)
    running = launcher.find(names[0] if names else launcher.resolve_on_cluster(address), address)
    if running is None:
        raise local.make_not_running_error(names[0])
    known = [process.name for process in running.state.processes]
    if len(names) < 2:
        print_result(options, {"logs": known}, lambda _: print("\n".join(known)))
        return 0
    if names[1] not in known:
        raise UsageError(
            f"There is no log of `{names[1]}` in the stack.", f"There are: {', '.join(known)}."
        )
    if options.follow and not options.json:
        for line in launcher.follow_log(running, names[1], options.lines):
            print(line, flush=True)
        return 0
    lines = running.access.call("read_log", names[1], options.lines) or []
    if options.json:
        print_json({"lines": lines})
    else:
        print("\n".join(lines))
    return 0
