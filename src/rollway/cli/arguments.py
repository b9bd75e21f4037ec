"""Build parsers: commands that load lazily, and arguments that several commands share."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollway.errors import UsageError

Command = Callable[[argparse.Namespace], int]
AddArguments = Callable[[argparse.ArgumentParser], None]

_NAME_HELP = "a running stack, or the address of a frontend; optional when one stack runs"


class LazyParser(argparse.ArgumentParser):
    """A parser that adds its arguments when it first parses.

    The help of the parent needs only its name, so modules of other commands are never imported."""

    add_lazily: AddArguments | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        add_arguments, self.add_lazily = self.add_lazily, None
        if add_arguments is not None:
            add_arguments(self)
        return super().parse_known_args(args, namespace)


def add_group(parser: argparse.ArgumentParser, *, required: bool = True) -> Any:
    """Return the group that commands of a parser are added to."""
    return parser.add_subparsers(
        title="commands", metavar="COMMAND", required=required, parser_class=LazyParser
    )


def add_command(group: Any, name: str, text: str, add_arguments: AddArguments) -> None:
    """Add a command whose arguments are added when it is chosen."""
    child = group.add_parser(name, help=text, description=text)
    child.add_lazily = add_arguments


def load_from(module: str, function: str) -> AddArguments:
    """Return a function that imports a module of this package and calls its function."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        getattr(importlib.import_module(f"rollway.cli.{module}"), function)(parser)

    return add_arguments


def set_command(parser: argparse.ArgumentParser, command: Command) -> None:
    """Set what a command runs; every such command has `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(command=command)


def add_name(parser: argparse.ArgumentParser, text: str = _NAME_HELP) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_spec(parser: argparse.ArgumentParser, text: str, *, positional: bool = True) -> None:
    """Add `-f FILE`, the same as a positional argument, and `--set`."""
    if positional:
        parser.add_argument("stack", nargs="?", type=Path, metavar="FILE", help=text)
        parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=_SET_HELP)
    parser.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="the same as the positional FILE"
    )


_SET_HELP = "override a field of the stack; repeatable"


def get_spec_file(options: argparse.Namespace) -> Path | None:
    """Return the stack file, however it was given."""
    positional: Path | None = options.stack
    if positional is not None and options.file is not None:
        raise UsageError(
            f"Two stack files are given: {positional} and {options.file}.", "Give one of them."
        )
    return positional or options.file
