"""The processes of a stack as children of this one: started, reported on, cleared up after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from rollway import private, processes
from rollway.config import StackSpec
from rollway.http import Http
from rollway.orders import SECRET, SECRET_FILE
from rollway.processes import ProcessId
from rollway.stack import retention
from rollway.stack.lease import Lease
from rollway.stack.plan import ProcessPlan, StackPlan
from rollway.stack.state import (
    ProcessState,
    StackDir,
    StackState,
    new_secret,
    run_dir_name,
    secret_file,
)
from rollway.weights.adapter import remove_abandoned


class Children:
    """What a supervisor has: the plan, the children, and the state it writes down."""

    def __init__(self, spec: StackSpec, lifeline: int | None) -> None:
        self.spec = spec
        self.directory = StackDir(spec.name)
        self.lifeline = lifeline
        self.ports = Lease()
        self.http = Http()
        self.stopping = asyncio.Event()
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.healing: dict[str, asyncio.Task[None]] = {}
        self.instances: dict[str, int] = {}
        self.retired: set[int] = set()
        self.plans: dict[str, ProcessPlan] = {}
        self.secret = ""
        self.plan: StackPlan | None = None
        me = ProcessId.of(os.getpid())
        assert me is not None
        run_id = secrets.token_hex(8)
        self.state = StackState(
            name=spec.name,
            run_id=run_id,
            supervisor_pid=me.pid,
            supervisor_start=me.start,
            run_dir=str(_run_dir(run_id)),
            log_dir=str(spec.log_dir or self.directory.logs),
            models=[model.name for model in spec.models],
            model_paths={model.name: model.path for model in spec.models},
            checkpoint_roots=[str(root) for root in spec.checkpoint_roots],
            timeouts=spec.timeouts.model_dump(),
            restarts=spec.restart.enabled,
            stop_seconds=spec.stop_seconds,
        )

    def _spawn(self, process: ProcessPlan) -> None:
        with os.fdopen(private.open_file(process.log, os.O_WRONLY | os.O_APPEND), "ab") as log:
            child = subprocess.Popen(
                process.argv,
                env=self._environment(process),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        self.children[process.name] = child
        identity = ProcessId.of(child.pid)
        state = self._state_of(process.name)
        state.pid, state.start = child.pid, identity.start if identity else None
        state.ready_seconds, state.instance = None, None
        self._report(process, "starting", "")

    def _environment(self, process: ProcessPlan) -> dict[str, str]:
        """Name the file of the secret; the secret itself is in no process's environment."""
        with contextlib.suppress(FileExistsError):  # what clears old files may have taken it
            new_secret(Path(self.state.run_dir), self.secret)
        inherited = {name: value for name, value in os.environ.items() if name != SECRET}
        secret = {SECRET_FILE: str(secret_file(self.state))}
        # vLLM gives Ray's actors only the variables that it knows, and those that this one names.
        copied = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": SECRET_FILE}
        return {**inherited, **copied, **process.env, **secret}

    def _respawn(self, process: ProcessPlan) -> None:
        """Start a worker again that runs but never became known."""
        child = self.children[process.name]
        self._report(process, "lost", "it runs, but its registration was lost; starting it again")
        child.kill()
        child.wait()
        self._clear_session(child.pid)
        self._state_of(process.name).restarts += 1
        self._spawn(process)

    def _report(self, process: ProcessPlan, new_state: str, detail: str) -> None:
        state = self._state_of(process.name)
        if (state.state, state.detail) == (new_state, detail):
            return
        state.state, state.detail = new_state, detail
        if new_state == "ready":
            state.ready_seconds = round(time.time() - self.state.started_at, 3)
        self.directory.record(new_state, process=process.name, pid=state.pid, detail=detail)
        self._write()

    def _state_of(self, name: str) -> ProcessState:
        return next(state for state in self.state.processes if state.name == name)

    def _clear_session(self, leader: int) -> None:
        """End what a dead leader left in its session: vLLM's EngineCore and Worker processes."""

        def left() -> set[ProcessId]:
            members = processes.members(self.state.run_id)
            return {process for process in members if _session(process.pid) == leader}

        memory = processes.end(left, 0.0)
        processes.remove_shared_memory({*memory, *self.state.shared_memory})
        remove_abandoned()

    def _scan_memory(self) -> None:
        """Note shared memory while its owners live: the dead cannot be asked."""
        known = set(self.state.shared_memory)
        found = processes.shared_memory(processes.members(self.state.run_id))
        if not found <= known:
            self.state.shared_memory = sorted(known | found)
            self._write()

    def _rotate_logs(self) -> None:
        """Keep every process's log, and the history, within its bounds."""
        limits = self.spec.logs
        for process in self.plans.values():
            retention.rotate(process.log, limits.max_mb * 1e6, limits.keep)
        retention.rotate(self.directory.events_file, retention.EVENTS_BYTES, 1)

    def _set_logs_aside(self, log_dir: Path) -> None:
        retention.set_aside(log_dir, self.spec.name)
        retention.prune(self.spec.name, log_dir, self.spec.keep_runs)

    def _prune_after(self) -> None:
        """This run has ended and counts as one of those that are kept."""
        log_dir, keep = Path(self.state.log_dir), self.spec.keep_runs
        with contextlib.suppress(OSError):
            retention.prune(self.spec.name, log_dir, max(0, keep - 1))
            if keep == 0:
                retention.remove_run(self.spec.name, log_dir)

    def _write(self) -> None:
        """A full disk must not keep the stack from being watched and ended."""
        with contextlib.suppress(OSError):
            self.directory.write(self.state)


def _run_dir(run_id: str) -> Path:
    base = os.path.normpath(tempfile.gettempdir())
    if len(base) > 40:
        base = "/tmp"
    return Path(base) / run_dir_name(run_id, os.getuid())


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def exit_words(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"
