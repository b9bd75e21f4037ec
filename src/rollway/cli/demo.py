"""`rollway demo`: train a tiny policy on a real stack."""

from __future__ import annotations

import argparse

from rollway.cli.output import print_json
from rollway.extras import require


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
