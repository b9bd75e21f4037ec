"""Find what `rollway dash` and `rollway top` are asked for: a stack, an address, a recorded run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rollway.errors import RollwayError, UsageError
from rollway.observe.dash.attached import LISTING_SECONDS, record_attached
from rollway.observe.dash.source import Phase, Source
from rollway.observe.dash.timeline import KEPT
from rollway.observe.read import Run
from rollway.observe.runs import list_runs
from rollway.private import is_plain_name
from rollway.stack import local
from rollway.stack.ray import launcher
from rollway.stack.ray.mirror import Mirror
from rollway.stack.state import StackDir, StackState, find_record_dir, home


@contextmanager
def open_source(name: str | None, directory: Path | None) -> Iterator[Source]:
    """Yield the source of a stack, of a frontend's address, or of a run directory."""
    if directory is not None:
        yield open_directory(directory)
    elif name is not None and "://" in name:
        with record_attached(name) as recorded:
            source = _make_source(name, Run(recorded))
            source.get_phase = lambda: "live"
            source.settle_seconds = LISTING_SECONDS
            yield source
    else:
        name = launcher.resolve_name(name)
        with _bring_nodes_together(name):
            yield open_stack(name)


def find_run(text: str | None) -> Path:
    """Return the directory of a recorded run: a path, a name below the home, or the newest."""
    runs = home() / "runs"
    if text is None:
        newest = next((run for run in list_runs(runs) if any(run.glob("*.jsonl"))), None)
        if newest is None:
            raise UsageError(f"No run is recorded in {runs}.", "Give the directory of a run.")
        return newest
    directory = Path(text)
    if not directory.is_dir() and is_plain_name(text) and (runs / text).is_dir():
        directory = runs / text
    check_directory(directory)
    return directory.resolve()


def check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory.", "Give the directory of a run.")
    if not any(directory.glob("*.jsonl")):
        raise UsageError(
            f"{directory} has no record of a run.", f"Runs are recorded in {home() / 'runs'}."
        )


def open_directory(directory: Path) -> Source:
    """Return the source of a recorded run."""
    check_directory(directory)
    return _make_source(str(directory), Run(directory))


def open_stack(name: str) -> Source:
    """Return the source of a stack that is up, here or on a Ray cluster, or left behind here."""
    state = find_state(name)
    if state is None:
        raise local.make_not_running_error(name)
    directory = find_record_dir(state)
    if directory is None:
        raise UsageError(
            f"`{name}` records nothing.", "Remove `observe: off` from its spec, and start it again."
        )
    if not directory.is_dir():
        raise RollwayError(
            f"The record of `{name}` is not on this machine: there is no {directory}.",
            "Run this on the machine of its head, or with the same ROLLWAY_HOME.",
        )
    source = _make_source(name, Run(directory))
    source.log_dir = Path(state.log_dir)
    source.journal = home() / "gateway" / f"{state.name}.jsonl"  # where `rollway gateway` puts it
    if state.ray_namespace:
        source.get_phase = lambda: "live"  # its record says when it ends
    else:
        source.get_phase = lambda: get_phase(name, state)
    return source


@contextmanager
def _bring_nodes_together(name: str) -> Iterator[None]:
    """Have the record of all nodes of a stack on Ray in its directory here."""
    is_local = "/" not in name and StackDir(name).read() is not None
    running = None if is_local else launcher.find(name)
    directory = None if running is None else find_record_dir(running.state)
    if running is None or directory is None:
        yield
        return
    try:
        with Mirror(directory, partial(running.access.call, "read_record")).follow():
            yield
    finally:
        running.close()


def find_state(name: str) -> StackState | None:
    """Return the state of a stack by its name, or by NAMESPACE/NAME on a Ray cluster; None if there
    is none."""
    state = None if "/" in name else StackDir(name).read()
    if state is None:
        with contextlib.suppress(RollwayError):
            state = find_on_ray(name)
    return state


def find_on_ray(name: str) -> StackState | None:
    """Return the state of a stack of the Ray cluster; None if there is none. Raise if the cluster
    does not answer."""
    names = {f"{s.ray_namespace}/{s.name}": s for s in launcher.list_stacks()}
    return names.get(name) or next((s for s in names.values() if s.name == name), None)


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
    follower = run.follower()
    return Source(
        label,
        poll=follower.poll,
        read=lambda: Run(run.directory).read(),
        # A day has a million steps, and the page has the bars of a few refits.
        load=lambda: follower.read(without={"step"}, until=run.find_end_of_refit(KEPT)),
        read_end=lambda: Run(run.directory).read_end(),
        get_progress=lambda: (follower.bytes_read, run.nbytes),
        count_problems=lambda: dict(run.problems),
    )
