"""`rollway bench` and `rollway chaos`: programs of the repository, which the package has not."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import rollway
from rollway.cli.arguments import Parser
from rollway.errors import UsageError

REPOSITORY = "https://github.com/rollway/rollway"


def add_bench(parser: Parser) -> None:
    _add_program(parser, "benchmarks")


def add_chaos(parser: Parser) -> None:
    _add_program(parser, "chaos")


def _add_program(parser: Parser, package: str) -> None:
    """Leave all arguments to the program, also `-h`: no character begins an option here."""
    parser.prefix_chars = "\0"
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run_command=run, package=package)


def run(options: argparse.Namespace) -> int:
    """Give the arguments to the program in the checkout that this package is installed from."""
    package, root = options.package, Path(rollway.__file__).parents[2]
    options.json = "--json" in options.arguments
    if not (root / package / "__main__.py").is_file():
        raise UsageError(
            f"The program `{package}` is in the repository, not in the installed package.",
            f"Clone {REPOSITORY}, run `pip install -e .` there, then the same command.",
        )
    sys.path.insert(0, str(root))
    code: int = import_module(f"{package}.__main__").main(options.arguments)
    return code
