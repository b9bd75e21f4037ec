"""The processes of one stack as children of its supervisor: start, report, stop, clean up; and why
one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path

from rollway import private_files, processes
from rollway.errors import StartError
from rollway.model_spec import slug
from rollway.processes import ProcessId
from rollway.signed_calls import REFITTED_FILE, SECRET, SECRET_FILE, read_stack_secret
from rollway.spec import StackSpec
from rollway.stack import logs
from rollway.stack.history import StackHistory
from rollway.stack.locks import Lease
from rollway.stack.plan import ProcessPlan, StackPlan, plan_stack
from rollway.stack.state import (
    ProcessState,
    StackDir,
    StackState,
    choose_run_dir,
    get_stop_seconds,
    remove_run_dir,
    secret_file,
    write_secret,
)
from rollway.weights.adapter import remove_abandoned

_SCAN_SHARE = 4.0
"""How much longer than a scan of the processes that stop is the pause after it."""


class Children:
    """Runs a stack's processes, and records their states in the state file."""

    def __init__(self, spec: StackSpec) -> None:
        self.spec = spec
        self.directory = StackDir(spec.name)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.plans: dict[str, ProcessPlan] = {}
        self.secret = ""
        self._plan: StackPlan | None = None
        me = processes.this_process()
        run_id = secrets.token_hex(8)
        self.state = StackState.from_spec(
            spec,
            run_id=run_id,
            supervisor_pid=me.pid,
            supervisor_start=me.start,
            run_dir=str(choose_run_dir(run_id)),
            log_dir=str(spec.log_dir or self.directory.logs),
        )
        self.history = StackHistory(spec, self.state)

    @property
    def plan(self) -> StackPlan:
        assert self._plan is not None, "prepare() makes the plan"
        return self._plan

    def prepare(self, ports: Lease) -> StackPlan:
        """Create the directories and the secret of this run, and plan its processes."""
        run_dir, log_dir = Path(self.state.run_dir), Path(self.state.log_dir)
        logs.prepare_directory(log_dir)
        logs.set_aside(log_dir, self.spec.name)
        logs.prune(self.spec.name, log_dir, self.spec.keep_runs)
        for path in (run_dir, run_dir / "tmp", run_dir / "discovery"):
            private_files.make_scratch(path)
        # A stack that joins another shares its secret: otherwise each would refuse the other's
        # orders and offers.
        join = self.spec.join
        self.secret = write_secret(run_dir, (join.secret or read_stack_secret()) if join else "")
        plan = plan_stack(
            self.spec, run_id=self.state.run_id, run_dir=run_dir, log_dir=log_dir, ports=ports
        )
        for process in plan.processes:
            start = process.start_dir
            if start is not None and not start.is_dir():
                raise StartError(
                    f"The `working_dir` of `{process.model}`, {start}, is no directory.",
                    "Name one that this machine has; Rollway uploads nothing.",
                )
        self._plan = plan
        self.plans = {process.name: process for process in plan.processes}
        logs.record_names(log_dir, self.plans)
        self.state.frontend, self.state.rl = plan.frontend_url, plan.rl_url
        self.state.join_spec = plan.join_spec
        self.state.processes = [_make_state(process) for process in plan.processes]
        self.write_state()
        return plan

    def spawn(self, process: ProcessPlan) -> None:
        """Start a process as the leader of a new session."""
        with os.fdopen(
            private_files.open_file(process.log, os.O_WRONLY | os.O_APPEND), "ab"
        ) as log:
            child = subprocess.Popen(
                process.argv,
                env=self._make_environment(process),
                cwd=process.start_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # `clear_session` finds the process's children by it
                preexec_fn=processes.die_with_parent,
            )
        self.running[process.name] = child
        identity = ProcessId.of(child.pid)
        state = self.get_state(process.name)
        state.pid, state.start = child.pid, identity.start if identity else None
        state.ready_seconds, state.instance, state.version = None, None, None
        self.report(process, "starting", "")

    def _make_environment(self, process: ProcessPlan) -> dict[str, str]:
        """Return the environment of a process: it names the file of the secret, never the secret
        itself, which every process of this user could read there."""
        # A cleaner of temporary files may have removed the file since the last start.
        with contextlib.suppress(FileExistsError):
            write_secret(Path(self.state.run_dir), self.secret)
        inherited = {name: value for name, value in os.environ.items() if name != SECRET}
        # vLLM passes only variables that it knows to Ray actors, and those listed here.
        copied = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": SECRET_FILE}
        secret = {SECRET_FILE: str(secret_file(self.state))}
        refitted = {REFITTED_FILE: str(self.get_refitted_file(process.model or ""))}
        return {**inherited, **copied, **process.env, **secret, **refitted}

    def get_refitted_file(self, model: str) -> Path:
        """Return the file that exists once workers of this model were refitted."""
        return Path(self.state.run_dir) / f"refitted-{slug(model)}"

    def respawn(self, process: ProcessPlan) -> None:
        """Restart a worker that runs but that never appeared in discovery."""
        child = self.running[process.name]
        if process.shares_replica:  # its other ranks must go, too
            child.kill()
            return
        self.report(process, "lost", "it runs, but its registration was lost; starting it again")
        child.kill()
        child.wait()
        self.clear_session(child.pid)
        self.get_state(process.name).restarts += 1
        self.spawn(process)

    def report(self, process: ProcessPlan, new_state: str, detail: str) -> None:
        """Record a change of a process's state in the run's record and in the state file."""
        state = self.get_state(process.name)
        if (state.state, state.detail) == (new_state, detail):
            return  # polling loops report the same state again and again
        state.state, state.detail = new_state, detail
        if new_state == "ready" and state.ready_seconds is None:
            state.ready_seconds = round(time.time() - self.state.started_at, 3)
        self.history.note(new_state, state, detail)
        self.write_state()

    def get_state(self, name: str) -> ProcessState:
        return next(state for state in self.state.processes if state.name == name)

    def clear_session(self, leader: int) -> None:
        """Kill what a dead process left in its session: vLLM's EngineCore and Worker processes."""

        def find_left() -> set[ProcessId]:
            members = processes.find_members(self.state.run_id)
            return {process for process in members if _get_session(process.pid) == leader}

        memory = processes.end(find_left, 0.0)
        processes.remove_shared_memory({*memory, *self.state.shared_memory})
        remove_abandoned()

    def reap(self) -> None:
        """Collect orphans that this process adopted; Popen collects the children."""
        processes.reap({child.pid: None for child in self.running.values()})

    def scan_memory(self) -> None:
        """Record the shared memory of living processes: after a SIGKILL nobody knows the names."""
        known = set(self.state.shared_memory)
        segments = processes.find_shared_memory(processes.find_members(self.state.run_id))
        if not segments <= known:
            self.state.shared_memory = sorted(known | segments)
            self.write_state()

    def rotate_logs(self) -> None:
        limits = self.spec.logs
        for process in self.plans.values():
            logs.rotate(process.log, limits.max_mb * 1e6, limits.keep)

    def prune_logs(self) -> None:
        """Remove logs beyond `keep_runs`, which counts this run, too, now that it has ended."""
        log_dir, keep = Path(self.state.log_dir), self.spec.keep_runs
        with contextlib.suppress(OSError):
            logs.prune(self.spec.name, log_dir, max(0, keep - 1))
            if keep == 0:
                logs.remove_run(self.spec.name, log_dir)

    def write_state(self) -> None:
        """Write the state file. A full disk must not keep the stack from being watched."""
        self.history.note_state(self.state)
        with contextlib.suppress(OSError):
            self.directory.write(self.state)

    async def stop(self) -> None:
        """Stop all processes, and remove their shared memory and the run's directory."""
        seconds = get_stop_seconds(self.state)  # looks at states that change below
        self.state.phase = "stopping"
        for state in self.state.processes:
            if state.state not in ("failed", "waiting"):
                state.state = "stopping"
        self.write_state()
        self.scan_memory()
        for child in self.running.values():
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
        memory = await asyncio.to_thread(self._wait_for_exits, seconds)
        processes.remove_shared_memory({*memory, *self.state.shared_memory})
        remove_abandoned()
        remove_run_dir(Path(self.state.run_dir))

    def _wait_for_exits(self, seconds: float) -> set[str]:
        """Wait until all children have exited, then SIGKILL every member of the run that is left;
        return the names of their shared memory."""
        began = next_scan = time.monotonic()
        memory: set[str] = set()
        while time.monotonic() < began + seconds:
            if all(child.poll() is not None for child in self.running.values()):
                break
            if time.monotonic() >= next_scan:
                scan_began = time.monotonic()
                self.reap()
                memory |= processes.find_shared_memory(processes.find_members(self.state.run_id))
                # A scan reads files of all processes. The cores are for those that stop.
                pause = _SCAN_SHARE * (time.monotonic() - scan_began)
                next_scan = time.monotonic() + max(pause, 0.05)
            time.sleep(0.02)
        self.reap()
        for name, child in self.running.items():
            if child.poll() is None:
                detail = f"it did not exit within {seconds:g} s of SIGTERM"
                self.history.note("killed", self.get_state(name), detail)
        # Children of a child that has exited may still be on their way out: half a second.
        memory |= processes.end(lambda: processes.find_members(self.state.run_id), 0.5)
        for child in self.running.values():
            child.poll()
        processes.reap({})
        return memory


def _make_state(process: ProcessPlan) -> ProcessState:
    state = ProcessState(
        process.name,
        process.role,
        str(process.log),
        model=process.model,
        worker_role=process.worker_role,
        admin_url=process.admin_url,
        ports=process.ports,
    )
    if process.placed is not None:
        placed = process.placed
        state.replica, state.node_rank, state.nodes = placed.replica, placed.node_rank, placed.nodes
    return state


def _get_session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


# --- why a child ended ---------------------------------------------------------------------------


# Patterns in the log of a worker or frontend, and advice for the user. The first match wins.
# What is `told` in the log stands before the advice: the engine's own sentence says more.
_HINTS: list[tuple[str, str]] = [
    (r"Error: (?P<told>[^\n]*(?:KV cache memory|memory for the cache blocks|Free memory on device|"
     r"Unsupported CPU attention configuration)[^\n]*)", "Give other options under `args` of the "
     "model, by the engine's own names (on a CPU `kv-cache-memory-bytes`), or another model."),
    (r"ModuleNotFoundError: No module named '?dynamo", "Dynamo is not installed in the Python "
     "that runs the workers: `pip install 'rollway[cpu]'` or `[vllm]`, see docs/install.md."),
    (r"ModuleNotFoundError: No module named '?vllm", "vLLM is not installed in the Python that "
     "runs the workers: `pip install 'rollway[cpu]'` or `[vllm]`, see docs/install.md."),
    (r"get_engine_zmq_addresses", "This vLLM does not work with this Dynamo: `rollway doctor` "
     "names the versions that do."),
    (r"torchvision::nms", "torchvision was built for CUDA and torch for CPU: docs/install.md "
     "shows how to keep it out."),
    (r"(?P<told>unrecognized arguments?: [^\n]*)", "The engine does not know this option; options "
     "under `args` are passed on under the engine's own names."),
    (r"(?i)out of memory|Cannot allocate memory|OutOfMemoryError", "Not enough memory: fewer "
     "replicas, a smaller `max-model-len`, or less KV cache (`kv-cache-memory-bytes`)."),
    (r"No space left on device.*shm|/dev/shm", "Shared memory is full: `df -h /dev/shm`; in a "
     "container raise --shm-size."),
    (r"No common block size", "This engine cannot use that `block-size`; leave it out or use a "
     "multiple of 32 on CPU."),
    (r"(?i)LocalEntryNotFoundError|offline mode|couldn't connect to '?https://huggingface|"
     r"is not a local folder", "The model is neither a local directory nor in the local cache: "
     "give a checkpoint directory as `path`."),
    (r"(?i)address already in use", "Another program bound a port while the stack started; "
     "run it again."),
    (r"(?i)max_model_len.*greater|larger than the maximum number of tokens",
     "Set a smaller `max-model-len` or a larger `kv-cache-memory-bytes`."),
]  # fmt: skip


def describe_exit(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def find_hint(path: Path) -> str:
    """Return advice about the failure at the end of this log."""
    text = "\n".join(logs.tail(path, 400))
    for pattern, advice in _HINTS:
        if match := re.search(pattern, text):
            told = match.groupdict().get("told", "").strip()
            return f"{told.rstrip('.')}. {advice}" if told else advice
    return f"The whole log is {path}."
