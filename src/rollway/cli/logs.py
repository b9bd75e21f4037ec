"""`rollway logs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollway.cli.output import print_json
from rollway.errors import RollwayError, UsageError
from rollway.private import is_plain_name
from rollway.stack import local, logs
from rollway.stack.state import StackDir, list_stack_names, list_stacks


def show_logs(options: argparse.Namespace) -> int:
    name, process = _read_log_names(options)
    directory = _find_log_directory(name)
    path = directory / f"{process}.log" if is_plain_name(process or "") else None
    if path is None or not path.is_file():
        return _list_logs(directory, process, options)

    def has_ended() -> bool:
        state = StackDir(name).read()
        return state is None or not state.is_supervised

    if options.json:
        print_json({"log": str(path), "lines": logs.tail(path, options.lines)})
    elif options.follow:
        for line in logs.follow(path, lines=options.lines, ended=has_ended):
            print(line, flush=True)
    else:
        print("\n".join(logs.tail(path, options.lines)))
    return 0


def _read_log_names(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the stack and the process that were named."""
    names = [*([options.name] if options.name else []), *options.names]
    if len(names) > 2:
        raise UsageError(
            f"`rollway logs {' '.join(names)}` has too many words.", "Give a stack and a process."
        )
    if len(names) == 2:
        return names[0], names[1]
    # A single name is a stack if there is one of that name, otherwise a process of the only stack.
    if names and (options.name or names[0] in list_stack_names()):
        return names[0], None
    return _find_only_stack(), names[0] if names else None


def _find_only_stack() -> str:
    """Return the running stack; `default` when nothing runs, whose last logs may remain."""
    try:
        return local.resolve_name(None)
    except RollwayError:
        if len(list_stacks()) > 1:
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
