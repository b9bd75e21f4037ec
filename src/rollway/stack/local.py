"""The launcher for this machine: start a supervisor, wait for it, stop it, clear what is left.

Nothing here runs a stack; `rollway.stack.supervisor` does, in a process of its own. This side
spawns it, reads the state file it writes, and sends it signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway import private, processes
from rollway.config import StackSpec
from rollway.errors import (
    RollwayError,
    SpecError,
    StackNotRunning,
    StartError,
    StateUnreadable,
    UsageError,
)
from rollway.fleet.discovery import Worker
from rollway.processes import ProcessId
from rollway.stack.locks import NamedLock, describe, sweep_abandoned
from rollway.stack.ready import is_at
from rollway.stack.state import (
    DETACH,
    StackDir,
    StackState,
    known_stacks,
    patience,
    remove_run_dir,
    run_dir_name,
    stack_names,
    unreadable_stacks,
)
from rollway.weights.adapter import remove_abandoned

Progress = Callable[[StackState], None]
_POLL_SECONDS = 0.1
_LONGEST_INTERRUPT_SECONDS = 120.0


@dataclass(slots=True)
class RunningStack:
    """A stack this process started. It ends with this process unless it is detached."""

    directory: StackDir
    state: StackState
    _supervisor: subprocess.Popen[bytes]
    _lifeline: int

    def detach(self) -> None:
        """Let the stack outlive this process."""
        try:
            os.write(self._lifeline, DETACH)
        except BrokenPipeError:
            raise StackNotRunning(
                f"The stack `{self.directory.name}` ended as soon as it was ready.",
                f"See {self.directory.path / 'supervisor.log'} and {self.state.log_dir}.",
            ) from None
        finally:
            os.close(self._lifeline)
        # The supervisor is no longer ours to wait for; this keeps Popen from complaining.
        self._supervisor.returncode = 0

    def stop(self, progress: Progress | None = None) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        _ended(self.directory, self._supervisor, self.state.stop_seconds, progress)


def start(spec: StackSpec, progress: Progress | None = None) -> RunningStack:
    """Bring a stack up and return when it is ready.

    On failure, and on KeyboardInterrupt, everything that had started is stopped first."""
    directory = StackDir(spec.name)
    directory.create()
    directory.stop_request(_this_process()).unlink(missing_ok=True)
    # Held until the stack is ready: by this lock `rollway down` finds a start that has no state.
    starting = NamedLock(directory.start_lock_name)
    if not starting.acquire():
        raise _explain_other_start(directory, starting.holder())
    try:
        return _start(spec, directory, progress)
    finally:
        directory.stop_request(_this_process()).unlink(missing_ok=True)
        starting.release()


def _start(spec: StackSpec, directory: StackDir, progress: Progress | None) -> RunningStack:
    clear_leftovers(directory)
    state = directory.read()
    if state is not None and state.supervised:
        raise StartError(
            f"A stack named `{spec.name}` is already running (supervisor {state.supervisor_pid}).",
            f"Stop it with `rollway down {spec.name}`, or choose another name with --name.",
        )
    supervisor, lifeline = _spawn_supervisor(spec, directory)
    try:
        state = _until_ready(directory, supervisor, progress)
    except BaseException:
        os.close(lifeline)
        _ended(directory, supervisor, spec.stop_seconds, progress)
        raise
    return RunningStack(directory, state, supervisor, lifeline)


def stop(name: str, progress: Progress | None = None) -> None:
    """End a stack of this user by name, whoever started it, also one that is just starting."""
    directory = StackDir(name)
    interrupted = _interrupt_start(directory, progress)
    try:
        state = directory.read()
    except StateUnreadable:
        _clear_unreadable(directory)
        return
    if state is None or state.uid != os.getuid():
        if interrupted:
            return
        raise not_running(name)
    if state.supervised:
        _end_supervisors({state.supervisor}, directory, state.stop_seconds, progress)
    clear_leftovers(directory)


def stop_all(names: list[str], progress: Progress | None = None) -> list[str]:
    """End several stacks; one that cannot be ended does not keep the others from it."""
    stopped: list[str] = []
    failures: list[RollwayError] = []
    for name in names:
        try:
            stop(name, progress)
            stopped.append(name)
        except RollwayError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return stopped


def _interrupt_start(directory: StackDir, progress: Progress | None) -> bool:
    """Have the process that is starting this stack stop it; False when nobody is.

    Not by a signal: that process may be a trainer, and goes on."""
    lock = NamedLock(directory.start_lock_name)
    starter = lock.holder()
    if starter is None:
        return False
    request = directory.stop_request(starter)
    os.close(private.open_file(request, os.O_WRONLY))
    deadline = time.monotonic() + _LONGEST_INTERRUPT_SECONDS
    while lock.holder() == starter and time.monotonic() < deadline:
        _show_stop(directory, progress)
        time.sleep(_POLL_SECONDS)
    request.unlink(missing_ok=True)
    return True


def _end_supervisors(
    supervisors: set[ProcessId], directory: StackDir, seconds: float, progress: Progress | None
) -> None:
    for supervisor in supervisors:
        supervisor.send(signal.SIGTERM)
    deadline = time.monotonic() + seconds + 15.0
    while any(s.alive for s in supervisors) and time.monotonic() < deadline:
        _show_stop(directory, progress)
        time.sleep(_POLL_SECONDS)
    for supervisor in supervisors:
        supervisor.send(signal.SIGKILL)
    processes.wait_gone(supervisors, 5.0)


def _clear_unreadable(directory: StackDir) -> None:
    """End what runs under a state that cannot be read, as far as it can be told; remove the state.

    The supervisor is known by its lock or by what the record still says of it, its processes by the
    mark that the history names."""
    if directory.path.lstat().st_uid != os.getuid():
        raise not_running(directory.name)
    remains = directory.remains()
    candidates = (NamedLock(directory.lock_name).holder(), remains.supervisor)
    supervisors = {process for process in candidates if process and _is_supervisor(process)}
    _end_supervisors(supervisors, directory, 20.0, None)
    if remains.run_id is not None:
        run_id = remains.run_id
        memory = processes.end(lambda: processes.members(run_id), 0.5)
        processes.remove_shared_memory(memory)
        for base in {tempfile.gettempdir(), "/tmp"}:
            remove_run_dir(Path(base, run_dir_name(run_id, os.getuid())))
    remove_abandoned()
    directory.forget()


def _is_supervisor(process: ProcessId) -> bool:
    return process.alive and "rollway.stack.supervisor" in processes.command_of(process, 2000)


def _this_process() -> ProcessId:
    process = ProcessId.of(os.getpid())
    assert process is not None
    return process


def clear_leftovers(directory: StackDir) -> bool:
    """End what a dead supervisor left: by its record and its mark, never by a program's name."""
    state = directory.read()
    if state is None or state.supervised or state.uid != os.getuid():
        return False
    lock = NamedLock(directory.lock_name)
    if not lock.acquire():
        return False  # a supervisor is starting at this moment
    try:
        if state.boot == processes.boot_id():
            _end_members(state)
        remove_run_dir(Path(state.run_dir))
        directory.forget()
        sweep_abandoned()
    finally:
        lock.release()
    return True


def resolve_name(name: str | None, *, dead_too: bool = False) -> str:
    """The stack meant by a command that names none: the only one there is."""
    if name is not None:
        return name
    known = (
        all_names() if dead_too else [state.name for state in known_stacks() if state.supervised]
    )
    if len(known) == 1:
        return known[0]
    if known:
        raise UsageError(f"There are several stacks: {', '.join(known)}.", "Name the one you mean.")
    raise not_running(None)


def all_names() -> list[str]:
    """Every stack there is something to stop or to clear of."""
    starting = {
        name
        for name in stack_names()
        if NamedLock(StackDir(name).start_lock_name).holder() is not None
    }
    return sorted({*(state.name for state in known_stacks()), *unreadable_stacks(), *starting})


def not_running(name: str | None) -> StackNotRunning:
    what = f"No stack named `{name}` is running" if name else "No stack is running"
    return StackNotRunning(f"{what}.", "Start one with `rollway up`; `rollway status` lists all.")


def _spawn_supervisor(spec: StackSpec, directory: StackDir) -> tuple[subprocess.Popen[bytes], int]:
    """A supervisor of its own session, tied to this process by a pipe."""
    # The supervisor must import this very package, wherever the caller found it. Not through
    # PYTHONPATH: the workers would inherit it, and may live in another environment.
    source = str(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {source!r}); "
        "from rollway.stack.supervisor import main; sys.exit(main())"
    )
    log = private.open_file(directory.path / "supervisor.log", os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(log, "wb") as output:
        their_end, our_end = os.pipe()
        supervisor = subprocess.Popen(
            [sys.executable, "-c", code, str(their_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(their_end,),
        )
    os.close(their_end)
    assert supervisor.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        supervisor.stdin.write(spec.model_dump_json().encode())
        supervisor.stdin.close()
    return supervisor, our_end


def _until_ready(
    directory: StackDir, supervisor: subprocess.Popen[bytes], progress: Progress | None
) -> StackState:
    stop_request = directory.stop_request(_this_process())
    while True:
        if stop_request.exists():
            raise _explain_stop(directory)
        ended = supervisor.poll() is not None
        state = directory.read()
        if state is not None and state.supervisor_pid == supervisor.pid:
            if progress:
                progress(state)
            if state.phase == "ready" and not ended:
                return state
            if state.error is not None:
                raise _start_error(state.error)
        if ended:
            raise _supervisor_died(directory, supervisor)
        time.sleep(_POLL_SECONDS)


def _start_error(error: dict[str, Any]) -> RollwayError:
    if error["error"] == SpecError.__name__:
        return SpecError(error["message"], error["hint"])
    return StartError(error["message"], error["hint"], error.get("log_tail", ""))


def _explain_stop(directory: StackDir) -> StartError:
    return StartError(
        f"The stack `{directory.name}` was stopped while it was starting.",
        "Somebody ran `rollway down`; start it again with `rollway up`.",
    )


def _explain_other_start(directory: StackDir, holder: ProcessId | None) -> StartError:
    return StartError(
        f"A stack named `{directory.name}` is being started by another process: "
        f"{describe(holder)}.",
        "Wait for it, or choose another name with --name.",
    )


def _supervisor_died(directory: StackDir, supervisor: subprocess.Popen[bytes]) -> StartError:
    log = directory.path / "supervisor.log"
    said = log.read_text(errors="replace").strip() if log.is_file() else ""
    if supervisor.returncode == 3:
        return _explain_other_start(directory, NamedLock(directory.lock_name).holder())
    if supervisor.returncode in (0, -signal.SIGTERM):  # 0: it was told to stop
        return _explain_stop(directory)
    return StartError(
        f"The supervisor of `{directory.name}` ended before the stack was ready "
        f"(status {supervisor.returncode}).",
        f"Its log is {log}.",
        log_tail="\n".join(said.splitlines()[-15:]),
    )


def _ended(
    directory: StackDir,
    supervisor: subprocess.Popen[bytes],
    stop_seconds: float,
    progress: Progress | None,
) -> None:
    """Wait until the supervisor has ended the stack; end it for it if it does not."""
    with contextlib.suppress(ProcessLookupError):
        supervisor.terminate()
    deadline = time.monotonic() + stop_seconds + 15.0
    while supervisor.poll() is None and time.monotonic() < deadline:
        _show_stop(directory, progress)
        time.sleep(_POLL_SECONDS)
    if supervisor.poll() is None:
        supervisor.kill()
        supervisor.wait()
    clear_leftovers(directory)


def _show_stop(directory: StackDir, progress: Progress | None) -> None:
    try:
        state = directory.read()
    except StateUnreadable:
        return
    if progress is not None and state is not None and state.phase == "stopping":
        progress(state)


def _end_members(state: StackState) -> None:
    """Ask the recorded processes to end, which ends their children; then end whatever is left."""
    leaders = {p.id for p in state.processes if p.id is not None and p.id.alive}
    for leader in leaders:
        leader.send(signal.SIGTERM)
    processes.wait_gone(leaders, patience(state))

    def left() -> set[ProcessId]:
        return {leader for leader in leaders if leader.alive} | processes.members(state.run_id)

    memory = processes.end(left, 0.5)
    processes.remove_shared_memory({*memory, *state.shared_memory})
    remove_abandoned()


def each_state(directory: StackDir) -> Iterator[StackState]:
    """The state of a running stack, again and again, until it ends."""
    while (state := directory.read()) is not None and state.supervised:
        yield state
        time.sleep(1.0)


def supervises(name: str, worker: Worker) -> bool:
    """Whether a stack's supervisor has started a worker, or what was at its address before."""
    state = StackDir(name).read()
    if state is None or not state.supervised:
        return False
    return any(p.role == "worker" and is_at(worker.admin_url, p) for p in state.processes)


async def replace_worker(name: str, worker: Worker) -> bool:
    """End a worker of a stack so that its supervisor starts it anew; False when it is not one of
    the stack's, has been started anew already, or would not be."""
    state = StackDir(name).read()
    if state is None or not state.supervised or not state.restarts:
        return False
    for process in state.processes:
        if process.instance == worker.instance_id and process.id is not None:
            StackDir(name).record("replaced", process=process.name, pid=process.pid)
            process.id.send(signal.SIGKILL)
            return True
    return False
