"""`rollway nemo-rl`: run NeMo-RL's scripts on Rollway, and check its recipes."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from rollway.cli.arguments import Parser, make_group
from rollway.cli.output import report_problems
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
    return report_problems(options, [*recipe.unresolved, *find_problems(recipe.values)])


def add_nemo_rl(parser: Parser) -> None:
    add = make_group(parser)
    parser = add("run", run, "run an entry script of NeMo-RL with Rollway as its backend `dynamo`")
    parser.add_argument("script", type=Path, metavar="SCRIPT.py", help="for example run_grpo.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")
    parser = add("check", check, "say what in a recipe of NeMo-RL will not work, and why")
    parser.add_argument("file", type=Path, metavar="CONFIG.yaml", help="a recipe")
    text = "NeMo-RL's: a.b=c, +a.b=c, ~a.b"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=text)
