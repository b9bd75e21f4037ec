"""Find what `rollway dash` is asked for: a stack that is up, an address, a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollway.errors import RollwayError, UsageError
from rollway.observe.dash.source import Phase, Source
from rollway.observe.read import Run
from rollway.stack import local
from rollway.stack.state import StackDir, StackState, home


@contextmanager
def open_source(name: str | None, directory: Path | None) -> Iterator[Source]:
    """Yield the source of a stack, of a frontend's address, or of a run directory."""
    if directory is not None:
        yield open_directory(directory)
    elif name is not None and "://" in name:
        raise UsageError(
            "A stack that was attached by its address is not recorded yet.",
            "Use the name of a stack of this machine, or --run DIR.",
        )
    else:
        yield open_stack(local.resolve_name(name))


def open_directory(directory: Path) -> Source:
    """Return the source of a recorded run."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory.", "Give the directory of a run.")
    if not any(directory.glob("*.jsonl")):
        raise UsageError(
            f"{directory} has no record of a run.", f"Runs are recorded in {home() / 'runs'}."
        )
    return _make_source(str(directory), Run(directory))


def open_stack(name: str) -> Source:
    """Return the source of a stack that is up, or of its last run."""
    state = StackDir(name).read()
    if state is None:
        raise local.make_not_running_error(name)
    directory = home() / "runs" / state.run_id
    if not directory.is_dir():
        raise RollwayError(
            f"`{name}` is not recorded: there is no {directory}.",
            "Start it with `observe: on`.",
        )
    source = _make_source(name, Run(directory))
    source.log_dir = Path(state.log_dir)
    source.get_phase = lambda: get_phase(name, state)
    return source


def get_phase(name: str, started: StackState) -> Phase:
    """Return whether the same run of a stack is still up."""
    try:
        state = StackDir(name).read()
    except RollwayError:
        return "ended"
    if state is None or state.run_id != started.run_id or not state.is_supervised:
        return "ended"
    return "live"


def _make_source(label: str, run: Run) -> Source:
    return Source(
        label,
        poll=run.follower().poll,
        read=lambda: Run(run.directory).read(),
        count_problems=lambda: dict(run.problems),
    )
