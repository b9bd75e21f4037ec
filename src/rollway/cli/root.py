"""List the commands, run one of them, and turn errors into exit codes.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 something failed, 2 the
input was wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import rollway
from rollway.cli.arguments import Command, add_command, add_group, load_from
from rollway.errors import RollwayError, StartError

# Name, module in this package, help. Each module has `add_<name>`, which adds the arguments.
_COMMANDS = (
    ("up", "stack", "start a stack and return when it is ready"),
    ("status", "stack", "show running stacks, their processes and weight versions"),
    ("logs", "stack", "show the log of a process"),
    ("down", "stack", "stop a stack, and clear what killed stacks left"),
    ("doctor", "doctor", "check this machine: versions, programs, ports, memory, GPUs"),
    ("fleet", "fleet", "list, pause, refit, watch the workers of a stack"),
    ("gateway", "gateway", "serve an OpenAI endpoint that records sessions as tokens"),
    ("weights", "weights", "inspect weights, compare them, plan their transfer"),
    ("chaos", "chaos", "refit while things break, and check every token"),
    ("bench", "bench", "measure, as ratios within one run"),
    ("demo", "demo", "train a tiny policy with GRPO on a real stack"),
)


def run_command(arguments: Sequence[str] | None = None) -> int:
    parser = _make_parser()
    options = parser.parse_args(arguments)
    command: Command | None = getattr(options, "command", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        return command(options)
    except RollwayError as error:
        return _fail(error, as_json=options.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) closed the pipe. Python flushes stdout at exit and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        cause = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        refusal = RollwayError(
            f"The system refused: {cause}.", "Check the path and its permissions."
        )
        return _fail(refusal, as_json=options.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollway", description="NVIDIA Dynamo as the rollout backend of any RL trainer."
    )
    parser.add_argument("--version", action="version", version=f"rollway {rollway.__version__}")
    group = add_group(parser, required=False)
    for name, module, text in _COMMANDS:
        add_command(group, name, text, load_from(module, f"add_{name}"))
    return parser


def _fail(error: RollwayError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_json()))
    if isinstance(error, StartError) and error.log_tail:
        print(f"{error.log_tail}\n", file=sys.stderr)
    print(f"rollway: {error}", file=sys.stderr)
    return error.exit_code
