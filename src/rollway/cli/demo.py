"""`rollway demo`: train a tiny policy on a real stack."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollway.cli.arguments import set_command
from rollway.cli.output import print_json
from rollway.extras import require


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=None, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", choices=["vllm", "mocker"], default="vllm")
    parser.add_argument(
        "--no-refit", action="store_true", help="the control: train, but never update the workers"
    )
    parser.add_argument("--name", default="demo", help="name of its stack, to run several at once")
    parser.add_argument("--out", type=Path, default=None, help="directory for the report and plot")
    set_command(parser, demo)


def demo(options: argparse.Namespace) -> int:
    require("torch", "transformers", "matplotlib")
    from rollway.demo.run import DemoOptions, run_demo

    report = run_demo(
        DemoOptions(
            steps=options.steps,
            seed=options.seed,
            workers=options.workers,
            engine=options.engine,
            refit=not options.no_refit,
            name=options.name,
            directory=options.out,
            quiet=options.json,
        )
    )
    if options.json:
        print_json(report)
    return 0
