"""`rollway doctor`: check this machine or a stack that runs, and list where stacks listen."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from rollway.cli.arguments import Parser, set_command
from rollway.cli.output import print_json, print_problems, print_progress, print_result, print_table
from rollway.errors import Problem
from rollway.stack import local
from rollway.stack.machine_check import ListeningSocket, examine, is_in_this_network, list_listeners
from rollway.stack.ray import launcher
from rollway.stack.state import list_stacks


def doctor(options: argparse.Namespace) -> int:
    if options.ports is not None:
        return _show_ports(options)
    if options.stack is not None:
        return _examine_stack(options)
    return _report_findings(options, examine(), {}, "")


def _examine_stack(options: argparse.Namespace) -> int:
    """Check a stack that runs, with a few short requests."""
    from rollway.observe.doctor import examine_stack  # loads the whole API

    name = options.stack
    if "://" not in name:
        name = launcher.resolve_name(name or None)
    done = asyncio.run(examine_stack(name, options.rl_url))
    text = f"{done.stack} was sent {done.requests} requests, which took {done.tokens} tokens."
    facts = {"stack": done.stack, "requests": done.requests, "tokens": done.tokens}
    return _report_findings(options, done.findings, facts, text)


def _report_findings(
    options: argparse.Namespace, findings: list[Problem], facts: dict[str, Any], text: str
) -> int:
    names = ("check", "level", "found", "advice")
    if options.json:
        print_json({**facts, "findings": [finding.as_json(*names) for finding in findings]})
    else:
        print_problems(findings)
        print(text, end="\n" if text else "")
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _show_ports(options: argparse.Namespace) -> int:
    """List the listeners of running stacks, and warn about those that the network can reach."""
    states = [state for state in list_stacks() if state.is_supervised]
    if options.ports:
        states = [state for state in states if state.name == options.ports]
        if not states:
            raise local.make_not_running_error(options.ports)
    if not states and not options.json:
        print("no stack is running")
    for state in states:
        if not is_in_this_network(state):
            there = f"nsenter --target {state.supervisor_pid} --net"
            print_progress(
                f"warning: {state.name} is in another network namespace, whose ports are not seen "
                f"from here. Run this there: {there} rollway doctor --ports {state.name}"
            )
    listeners = [listener for state in states for listener in list_listeners(state)]
    result = {"listeners": [listener.as_json() for listener in listeners]}
    print_result(options, result, lambda _: _print_listeners(listeners))
    return 0


def _print_listeners(listeners: list[ListeningSocket]) -> None:
    columns = ("stack", "process", "protocol", "address", "port", "reach", "purpose")
    rows = ([str(getattr(entry, name) or "") for name in columns] for entry in listeners)
    print_table(("stack", "process", "", "address", "port", "reached by", "for"), rows)
    for advice in dict.fromkeys(entry.advice for entry in listeners if entry.advice):
        ports = sorted(str(entry.port) for entry in listeners if entry.advice == advice)
        print(f"warning: the network can reach {', '.join(ports)}. {advice}")


def add_doctor(parser: Parser) -> None:
    set_command(parser, doctor)
    text = "check a stack that runs (NAME, or a frontend's address) with a few short requests"
    parser.add_argument("--stack", nargs="?", const="", metavar="NAME", help=text)
    parser.add_argument("--rl-url", help="with --stack: the RL worker listing, if it is elsewhere")
    text = "list where running stacks (or one) listen, and who can reach them"
    parser.add_argument("--ports", nargs="?", const="", metavar="NAME", help=text)
