"""`rollway demo`: train a tiny policy on a real stack."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollway.cli.arguments import Parser, pick_fields, set_command
from rollway.errors import require


def demo(options: argparse.Namespace) -> int:
    require("torch", "transformers", "matplotlib")
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
