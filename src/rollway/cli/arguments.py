"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

Parser = argparse.ArgumentParser
Command = Callable[[argparse.Namespace], int]
Add = Callable[[str, Command, str], Parser]
"""Adds a command to a group: its name, the function that runs it, and its help."""

SET = "override a field of the stack; repeatable"
NAME = "a running stack, or the address of a frontend; optional when one stack runs"
ON = "where to look: local, ray, or ray=HOST:PORT (default: here, then the cluster of this node)"


def set_command(parser: Parser, run: Command) -> Parser:
    """Make a parser that of a command; every command has `--json`."""
    add_flag(parser, "--json", "print JSON on stdout")
    parser.set_defaults(run_command=run)
    return parser


def make_group(parser: Parser) -> Add:
    """Return the function that adds commands below a command."""
    group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    return lambda name, run, text: set_command(
        group.add_parser(name, help=text, description=text), run
    )


def add_flag(parser: Parser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def add_spec(parser: Parser, text: str) -> None:
    parser.add_argument("stack", nargs="?", type=Path, metavar="FILE", help=text)
    add_set(parser)
    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help="the same as FILE")


def add_set(parser: Parser, text: str = SET) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=text)


def add_name(parser: Parser, text: str = NAME) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)


def add_on(parser: Parser, text: str = ON) -> None:
    parser.add_argument("--on", metavar="WHERE", help=text)


def port(text: str) -> int:
    """Return a port that a command is to listen on."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give 0 to 65535.")
    return int(text)


def add_listening(parser: Parser, number: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: loopback)")
    text = f"0 for a free one (default {number})"
    parser.add_argument("--port", type=port, default=number, help=text)


def add_quiet(parser: Parser) -> None:
    add_flag(parser, "--quiet", "show no progress")


def pick_fields(kind: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a dataclass that have the names of its fields."""
    names = [each.name for each in fields(kind)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
