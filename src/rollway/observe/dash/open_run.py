"""Find what `rollway dash` and `rollway top` are asked for: a stack, an address, a recorded run."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import rollway
from rollway import private_files
from rollway.errors import RollwayError, UsageError
from rollway.observe.dash.view import Phase, RunSource
from rollway.observe.read import Run, list_runs, remove_run
from rollway.observe.record import Recorder
from rollway.observe.sample import MetricsTarget, Sampler
from rollway.private_files import is_plain_name
from rollway.stack import local
from rollway.stack.ray import launcher
from rollway.stack.ray.head_client import copy_records
from rollway.stack.state import StackDir, StackState, find_record_dir, home, make_home


@contextmanager
def open_source(name: str | None, directory: Path | None) -> Iterator[RunSource]:
    """Yield the source of a stack, of a frontend's address, or of a run directory."""
    if directory is not None:
        yield open_directory(directory)
    elif name is not None and "://" in name:
        with record_attached(name) as recorded:
            yield RunSource(name, Run(recorded), lambda: "live", settle_seconds=LISTING_SECONDS)
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
    Run(directory).check()
    return directory.resolve()


def open_directory(directory: Path) -> RunSource:
    """Return the source of a recorded run."""
    run = Run(directory)
    run.check()
    return RunSource(str(directory), run)


def open_stack(name: str) -> RunSource:
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
    run = Run(directory)
    run.check_schema()
    source = RunSource(name, run)
    source.log_dir = Path(state.log_dir)
    source.store = home() / "gateway" / f"{state.name}.sqlite"  # where `rollway gateway` puts it
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
        with copy_records(directory, partial(running.access.call, "ask_keepers", "read_record")):
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


# --- a stack that Rollway did not start ----------------------------------------------------------
#
#    frontend /metrics ── every 2 s ──► sample entries ──┐
#    versions of the workers ── every 5 s ──► workers ───┴──► <home>/runs/attached-…, until it ends
#
# Each listing makes the frontend probe every worker, so it is asked seldom.

LISTING_SECONDS = 5.0


@contextmanager
def record_attached(url: str) -> Iterator[Path]:
    """Record what a frontend tells, and yield the directory of the record."""
    runs = private_files.make_directory(make_home() / "runs")
    name = f"attached-{secrets.token_hex(6)}"
    recorder = Recorder(private_files.make_directory(runs / name), "driver", stack=url, run=name)
    stop = threading.Event()
    with rollway.attach(url, watch=False, record=False) as stack:  # raises if nobody answers there
        recorder.event("attached", f"serves {', '.join(stack.models)}")
        recorder.flush()
        target = MetricsTarget("frontend", f"{stack.frontend_url}/metrics", "frontend")
        sampler = Sampler(recorder, lambda: [target])
        lister = threading.Thread(target=_list_forever, args=(stack, recorder, stop), daemon=True)
        sampler.start()
        lister.start()
        try:
            yield runs / name
        finally:
            stop.set()
            sampler.close()
            lister.join(LISTING_SECONDS)
            recorder.close()
            remove_run(runs / name)


def _list_forever(stack: Any, recorder: Recorder, stop: threading.Event) -> None:
    """Record the workers and their versions until the dashboard ends."""
    last: object = None
    trouble = ""
    while not stop.is_set():
        rows = []
        try:
            for model in stack.models:
                versions = stack.fleet_of(model).read_versions()
                rows += [_describe(model, *pair) for pair in versions.items()]
        except RollwayError as error:
            # A frontend without RL routes has no such list; one that is gone may come back.
            if trouble != error.message:
                trouble = error.message
                recorder.event("workers not listed", trouble)
        else:
            trouble = ""
            if rows != last:
                last = rows
                recorder.write("workers", workers=rows)
        stop.wait(LISTING_SECONDS)


def _describe(model: str, instance: int, version: int | None) -> dict[str, Any]:
    state = "serving" if version is not None else "joining"
    row = {"name": str(instance), "instance": str(instance), "state": state, "version": version}
    return {**row, "model": model}
