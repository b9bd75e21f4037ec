"""`rollway logs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollway.cli.output import print_json
from rollway.errors import RollwayError, UsageError
from rollway.private import is_plain_name
from rollway.stack import local, logs
from rollway.stack.state import StackDir, known_stacks, stack_names


def show_logs(options: argparse.Namespace) -> int:

    name, process = _read_log_words(options)
    directory = _find_log_directory(name)
    path = directory / f"{process}.log" if is_plain_name(process or "") else None
    if path is None or not path.is_file():
        return _list_logs(directory, process, options)

    def has_ended() -> bool:
        state = StackDir(name).read()
        return state is None or not state.supervised

    if options.json:
        print_json({"log": str(path), "lines": logs.tail(path, options.lines)})
    elif options.follow:
        for line in logs.follow(path, lines=options.lines, ended=has_ended):
            print(line, flush=True)
    else:
        print("\n".join(logs.tail(path, options.lines)))
    return 0


def _read_log_words(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the stack and the process that the words name."""

    words = [*([options.name] if options.name else []), *options.words]
    if len(words) > 2:
        raise UsageError(
            f"`rollway logs {' '.join(words)}` has too many words.", "Give a stack and a process."
        )
    if len(words) == 2:
        return words[0], words[1]
    # A single word is a stack if there is one of that name, otherwise a process of the only stack.
    if words and (options.name or words[0] in stack_names()):
        return words[0], None
    return _find_only_stack(), words[0] if words else None


def _find_only_stack() -> str:
    """Return the running stack; `default` when nothing runs, whose last logs may remain."""

    try:
        return local.resolve_name(None)
    except RollwayError:
        if len(known_stacks()) > 1:
            raise
        return "default"


def _find_log_directory(name: str) -> Path:

    state = StackDir(name).read()
    return Path(state.log_dir) if state else StackDir(name).logs


def _list_logs(directory: Path, process: str | None, options: argparse.Namespace) -> int:
    names = [path.stem for path in sorted(directory.glob("*.log"))]
    if process is not None:
        known = f"There are: {', '.join(names)}." if names else "Nothing has run there yet."
        raise UsageError(f"There is no log of `{process}` in {directory}.", known)
    if options.json:
        print_json({"directory": str(directory), "logs": names})
    else:
        print("\n".join(names) if names else f"no logs in {directory}")
    return 0
