"""The `rollway` command. Each module here adds the arguments of its commands, and runs them.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 something failed, 2 the
input was wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import rollway
from rollway.errors import RollwayError

# The module of each command, which has `add_<command>`, and its help. Only the module of the chosen
# command is imported: `rollway --help` loads neither HTTP nor torch.
_COMMANDS = {
    "up": ("stack", "start a stack and return when it is ready"),
    "status": ("stack", "show running stacks, processes and weight versions"),
    "logs": ("stack", "show the log of a process"),
    "down": ("stack", "stop a stack, and clear what killed stacks left"),
    "doctor": ("doctor", "check this machine: versions, ports, memory, GPUs"),
    "fleet": ("fleet", "list, pause, refit, sleep, watch the workers of a stack"),
    "weights": ("weights", "plan the transfer of weights"),
    "observe": ("observe", "give a stack to Prometheus"),
    "prime-rl": ("prime_rl", "serve prime-rl's orchestrator and trainer"),
    "nemo-rl": ("nemo_rl", "run NeMo-RL's trainers on a stack"),
    "k8s": ("k8s", "run inference and training on Kubernetes"),
    "gateway": ("gateway", "serve an OpenAI endpoint that records tokens"),
    "dash": ("dash", "show a stack, or a recorded run, as a page in the browser"),
    "top": ("dash", "show a stack, or a recorded run, in the terminal"),
    "report": ("dash", "tell what happened in a recorded run, as one HTML file, or compare two"),
    "chaos": ("programs", "refit while things break, and check every token"),
    "bench": ("programs", "measure, as ratios within one run"),
    "demo": ("programs", "train a tiny policy with GRPO on a real stack"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return run_command(make_parser(words), words)


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line, with the arguments of its command alone."""
    parser = argparse.ArgumentParser(
        prog="rollway", description="NVIDIA Dynamo as the rollout backend of any RL trainer."
    )
    parser.add_argument("--version", action="version", version=f"rollway {rollway.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in words[:1]:
            imported = import_module(f"rollway.cli.{module}")
            getattr(imported, f"add_{name.replace('-', '_')}")(command)
    return parser


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run the command that `parser` finds."""
    options = parser.parse_args(arguments)
    if "run_command" not in options:
        parser.print_help()
        return 2
    try:
        code: int = options.run_command(options)
        return code
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
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Free some space." if is_full else "Check the path and its permissions."
        return _fail(RollwayError(f"The system refused: {cause}.", hint), as_json=options.json)


def _fail(error: RollwayError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_json()))
    print(f"rollway: {error}", file=sys.stderr)
    return error.exit_code
