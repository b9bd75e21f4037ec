"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command to a group: its name, its "module:function", and its help."""

SET = "override a field of the stack; repeatable"
NAME = "a running stack, or the address of a frontend; optional when one stack runs"
ON = "where to look: local, ray, or ray=HOST:PORT (default: here, then the cluster of this node)"


def add_spec(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("stack", nargs="?", type=Path, metavar="FILE", help=text)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=SET)
    text = "the same as the positional FILE"
    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help=text)


def add_name(parser: argparse.ArgumentParser, text: str = NAME) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)


def add_on(parser: argparse.ArgumentParser, text: str = ON) -> None:
    parser.add_argument("--on", metavar="WHERE", help=text)


def port(text: str) -> int:
    """Return a port that a command is to listen on."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give 0 to 65535.")
    return int(text)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these parts")
