"""Record a stack that Rollway did not start, for as long as a dashboard shows it.

    frontend /metrics ── every 2 s ──► sample entries ──┐
    versions of the workers ── every 5 s ──► workers ───┴──► <home>/runs/attached-…, until it ends

Each listing makes the frontend probe every worker, so it is asked seldom.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rollway
from rollway import private
from rollway.errors import RollwayError
from rollway.observe.record import Recorder
from rollway.observe.runs import remove_run
from rollway.observe.sample import Sampler, Target
from rollway.stack.state import make_home

LISTING_SECONDS = 5.0


@contextmanager
def record_attached(url: str) -> Iterator[Path]:
    """Record what a frontend tells, and yield the directory of the record."""
    runs = private.make_directory(make_home() / "runs")
    name = f"attached-{secrets.token_hex(6)}"
    recorder = Recorder(private.make_directory(runs / name), "driver", stack=url, run=name)
    stop = threading.Event()
    with rollway.attach(url, watch=False, record=False) as stack:  # raises if nobody answers there
        recorder.event("attached", f"serves {', '.join(stack.models)}")
        recorder.flush()
        target = Target("frontend", f"{stack.frontend_url}/metrics", "frontend")
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
