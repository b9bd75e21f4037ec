"""The `rollway` command: `grammar.py` has the arguments; each group of commands has a module.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 something failed, 2 the
input was wrong, 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from rollway.cli.grammar import make_parser
from rollway.errors import RollwayError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if "command" not in options:
        parser.print_help()
        return 2
    try:
        module, _, function = options.command.partition(":")
        command: Callable[..., int] = getattr(import_module(f"rollway.cli.{module}"), function)
        with _leave_reports() if module == "bench" else nullcontext():
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
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Free some space." if is_full else "Check the path and its permissions."
        return _fail(RollwayError(f"The system refused: {cause}.", hint), as_json=options.json)


def _leave_reports() -> AbstractContextManager[None]:
    """Write a report of every run that a bench records."""
    from rollway.cli.output import print_progress
    from rollway.observe.report import leave_reports

    return leave_reports(print_progress)


def _fail(error: RollwayError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_json()))
    print(f"rollway: {error}", file=sys.stderr)
    return error.exit_code
