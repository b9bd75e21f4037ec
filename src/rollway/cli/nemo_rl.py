"""`rollway nemo-rl`: run NeMo-RL's scripts on Rollway, and check its recipes."""

from __future__ import annotations

import argparse
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

from rollway.cli.output import print_json
from rollway.errors import UsageError


def run(options: argparse.Namespace) -> int:
    """Run a script of NeMo-RL as `python SCRIPT.py` would, with Rollway plugged in first."""
    from rollway.integrations.nemo_rl.plug import install

    script: Path = options.script
    if not script.is_file():
        raise UsageError(f"There is no file {script}.", "Name an entry script of NeMo-RL.")
    install()
    sys.argv = [str(script), *options.arguments]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def check(options: argparse.Namespace) -> int:
    """Print what in a recipe will not work; exit with 1 if there is anything."""
    from rollway.integrations.nemo_rl.check import find_problems, read_recipe

    recipe = read_recipe(options.file, options.overrides)
    problems = [*recipe.unresolved, *find_problems(recipe.values)]
    if options.json:
        print_json({"problems": [asdict(problem) for problem in problems]})
        return 1 if problems else 0
    for problem in problems:
        print(f"{problem.key}: {problem.cause} {problem.fix}")
    if not problems:
        print("no problem found")
    return 1 if problems else 0
