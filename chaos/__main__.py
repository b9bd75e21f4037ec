"""The arguments of `rollway chaos`, also `python -m chaos`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rollway.cli import run_command
from rollway.cli.arguments import add_quiet, add_spec, set_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Refit, or record sessions, while things break; return 0 if every token was right."""
    text = "refit while things break, and check every token"
    parser = argparse.ArgumentParser(prog="rollway chaos", description=text)
    set_command(parser, _run)
    add_spec(parser, "a stack file; two vLLM workers without it")
    text = "where those two run (default: on a GPU if vLLM has one)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=text)
    parser.add_argument("--rounds", type=int, default=20, help="how many refits (default 20)")
    text = "end with the report after the round in progress, as SIGTERM and Ctrl-C do"
    parser.add_argument("--seconds", type=float, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of faults, steps, modes and prompts")
    parser.add_argument("--fault", action="append", default=[], help="only this one; repeatable")
    text = "refit and sample by the calls of this trainer"
    parser.add_argument("--through", choices=["prime-rl"], help=text)
    text = "the control: it must find stale tokens"
    parser.add_argument("--unprotected", action="store_true", help=text)
    text = "break the gateway instead, and check every turn"
    parser.add_argument("--gateway", action="store_true", help=text)
    parser.add_argument("--agents", type=int, default=64, help="with --gateway: how many at once")
    text = "the control of --gateway: it must lose turns"
    parser.add_argument("--old-journal", action="store_true", help=text)
    add_quiet(parser)
    return run_command(parser, arguments)


def _run(options: argparse.Namespace) -> int:
    from chaos.command import chaos  # not for `--help`

    return chaos(options)


if __name__ == "__main__":
    sys.exit(main())
