"""`rollway doctor`: check this machine, or list where running stacks listen."""

from __future__ import annotations

import argparse

from rich.table import Table
from rich.text import Text

from rollway.cli.output import print_json, print_rich, print_table
from rollway.stack import local
from rollway.stack.doctor import Finding, examine
from rollway.stack.listeners import Listener, list_listeners
from rollway.stack.state import list_stacks

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def doctor(options: argparse.Namespace) -> int:
    if options.ports is not None:
        return _show_ports(options)
    findings = examine()
    if options.json:
        print_json({"findings": [finding.as_json() for finding in findings]})
    else:
        _print_findings(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


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
    if options.json:
        print_json({"listeners": [listener.as_json() for listener in listeners]})
    elif not states:
        print("no stack is running")
    else:
        _print_listeners(listeners)
    return 0


def _print_listeners(listeners: list[Listener]) -> None:
    """Print one row for all listeners that differ only in their port or socket."""
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
