"""`rollway demo`, and `bench` and `chaos`, which are in the repository and not in the package."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import rollway
from rollway.cli.arguments import Parser, pick_fields, set_command
from rollway.errors import REPOSITORY, UsageError, require


def _add_program(package: str, parser: Parser) -> None:
    """Leave all arguments to the program, also `-h`: no character begins an option here."""
    parser.prefix_chars = "\0"
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run_command=run_from_checkout, package=package)


add_bench, add_chaos = partial(_add_program, "benchmarks"), partial(_add_program, "chaos")


def run_from_checkout(options: argparse.Namespace) -> int:
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


def demo(options: argparse.Namespace) -> int:
    require("cpu,demo", "torch", "transformers", "matplotlib")
    from rollway.demo.run import DemoOptions, run_demo

    run_demo(DemoOptions(**pick_fields(DemoOptions, options), quiet=options.json))
    return 0


def add_demo(parser: Parser) -> None:
    set_command(parser, demo)
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", choices=["vllm", "mocker"], default="vllm")
    text = "of trainer and workers (default auto: a GPU if vLLM has one)"
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=text)
    text = "of new weights (default: cuda_ipc, in place, on a GPU; else checkpoint)"
    parser.add_argument("--transport", choices=["checkpoint", "cuda_ipc"], help=text)
    text = "the control: train only"
    parser.add_argument("--no-refit", dest="refit", action="store_false", help=text)
    parser.add_argument("--name", default="demo", help="name of its stack, to run several at once")
    parser.add_argument(
        "--out", dest="directory", type=Path, metavar="DIR", help="for the report and plot"
    )
