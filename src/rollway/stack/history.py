"""What a supervisor records about its stack: events, the workers after every change, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from rollway.observe.read import prune_runs, remove_run
from rollway.observe.record import Recorder
from rollway.observe.sample import MetricsTarget, Sampler
from rollway.spec import StackSpec, is_loopback
from rollway.stack.commands import WILDCARDS
from rollway.stack.state import LOADED, ProcessState, StackState, find_record_dir

_GAP_SECONDS = 1.0
_MANY = 64


class StackHistory:
    """The supervisor's part of the record; does nothing for a stack that is not recorded."""

    def __init__(self, spec: StackSpec, state: StackState) -> None:
        self._spec = spec
        self._directory = find_record_dir(state)
        self._recorder: Recorder | None = None
        self._sampler: Sampler | None = None
        self._workers: list[dict[str, Any]] = []
        self._noted_at = float("-inf")
        self._stack, _, run = spec.observe.part_of.partition("/")
        self._stack, self._run = self._stack or spec.name, run or state.run_id
        if self._directory is not None:
            self._recorder = Recorder(
                self._directory,
                "supervisor",
                stack=self._stack,
                run=self._run,
                largest_bytes=int(spec.observe.max_mb * 1e6),
            )

    def note(self, event: str, state: ProcessState | None = None, detail: str = "") -> None:
        """Record an event, of one process or of the whole stack."""
        if self._recorder is None:
            return
        fields: dict[str, Any] = {}
        if state is not None:
            instance = None if state.instance is None else str(state.instance)
            fields = {"worker": state.name, "instance": instance}
        self._recorder.event(event, detail, **fields)

    def note_state(self, state: StackState, *, now: bool = False) -> None:
        """Record all workers, if anything about one of them has changed. Of many workers only once
        a second unless `now`: a start of thousands is thousands of changes."""
        is_early = time.monotonic() - self._noted_at < _GAP_SECONDS and not now
        if self._recorder is None or (is_early and len(self._workers) > _MANY):
            return
        self._noted_at = time.monotonic()
        workers = [
            describe_worker(process) for process in state.processes if process.role == "worker"
        ]
        if workers != self._workers:
            self._workers = workers
            self._recorder.write("workers", workers=workers)

    def start_sampling(self, state: Callable[[], StackState]) -> None:
        if self._recorder is None or self._directory is None:
            return
        prune_runs(self._directory.parent, self._stack, self._keep, but=self._directory.name)
        observe = self._spec.observe
        self._sampler = Sampler(
            self._recorder,
            lambda: list_targets(state()),
            interval=observe.interval_seconds,
            include=observe.include,
            exclude=observe.exclude,
        )
        self._sampler.start()

    def stop_sampling(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def close(self, *, ended_well: bool) -> None:
        """Write what is left. Runs beyond `keep_runs`, which counts this one, too, are removed."""
        if self._recorder is None or self._directory is None:
            return
        self._recorder.close()
        if ended_well:
            base, keep = self._directory.parent, self._keep
            prune_runs(base, self._stack, max(0, keep - 1), but=self._directory.name)
            if keep == 0:
                remove_run(self._directory)

    @property
    def _keep(self) -> int:
        own = self._spec.observe.keep_runs
        return self._spec.keep_runs if own is None else own


def list_targets(state: StackState) -> list[MetricsTarget]:
    """Return where the processes of a stack have their metrics: workers with weights, and the
    frontend if it is one of them."""
    targets = [
        MetricsTarget(
            p.name, f"{p.admin_url}/metrics", role=p.worker_role, process=(p.pid, p.start)
        )
        for p in state.processes
        if p.role == "worker" and p.state in LOADED and p.admin_url
    ]
    targets += [
        MetricsTarget(p.name, f"{state.frontend}/metrics", "frontend", process=(p.pid, p.start))
        for p in state.processes
        if p.role == "frontend" and p.state == "ready" and state.frontend
    ]
    return targets


def describe_worker(process: ProcessState) -> dict[str, Any]:
    """Return a worker as an entry `workers` has it."""
    return {
        "name": process.name,
        "instance": None if process.instance is None else str(process.instance),
        "node": process.node or _find_node(process.admin_url),
        "role": process.worker_role,
        "state": process.state,
        "version": process.version,
        "restarts": process.restarts,
        "pid": process.pid,
        "model": process.model,
    }


def _find_node(admin_url: str | None) -> str:
    """Return the machine of a worker that others reach; a part of a stack on Ray has no other name
    of its node."""
    host = urlsplit(admin_url or "").hostname or ""
    return "" if is_loopback(host) or host in WILDCARDS else host
