"""The launcher for this machine: start a supervisor, wait for it, stop it, clear what is left.

Nothing here runs a stack; `rollway.stack.supervisor` does, in a process of its own. This side
spawns it, reads the state file it writes, and sends it signals.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.config import StackSpec
from rollway.errors import RollwayError, SpecError, StackNotRunning, StartError, UsageError
from rollway.fleet.discovery import Worker
from rollway.stack import processes
from rollway.stack.locks import NamedLock
from rollway.stack.processes import ProcessId
from rollway.stack.ready import is_at
from rollway.stack.state import DETACH, StackDir, StackState, known_stacks, patience
from rollway.weights.adapter import remove_abandoned

Progress = Callable[[StackState], None]
_POLL_SECONDS = 0.1


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
    clear_leftovers(directory)
    state = directory.read()
    if state is not None and state.supervised:
        raise StartError(
            f"A stack named `{spec.name}` is already running (supervisor {state.supervisor_pid}).",
            f"Stop it with `rollway down {spec.name}`, or choose another name with --name.",
        )
    _writable_home(directory)
    supervisor, lifeline = _spawn_supervisor(spec, directory)
    try:
        state = _until_ready(directory, supervisor, progress)
    except BaseException:
        os.close(lifeline)
        _ended(directory, supervisor, spec.stop_seconds, progress)
        raise
    return RunningStack(directory, state, supervisor, lifeline)


def stop(name: str, progress: Progress | None = None) -> None:
    """End a stack of this user by name, whoever started it."""
    directory = StackDir(name)
    state = directory.read()
    if state is None or state.uid != os.getuid():
        raise not_running(name)
    if state.supervised:
        state.supervisor.send(signal.SIGTERM)
        deadline = time.monotonic() + state.stop_seconds + 15.0
        while state.supervisor.alive and time.monotonic() < deadline:
            _show_stop(directory, progress)
            time.sleep(_POLL_SECONDS)
        state.supervisor.send(signal.SIGKILL)
        processes.wait_gone({state.supervisor}, 5.0)
    clear_leftovers(directory)


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
        if Path(state.run_dir).name.startswith(f"rollway-{state.uid}-"):
            shutil.rmtree(state.run_dir, ignore_errors=True)
        directory.forget()
    finally:
        lock.release()
    return True


def resolve_name(name: str | None, *, dead_too: bool = False) -> str:
    """The stack meant by a command that names none: the only one there is."""
    if name is not None:
        return name
    known = [state.name for state in known_stacks() if dead_too or state.supervised]
    if len(known) == 1:
        return known[0]
    if known:
        raise UsageError(f"There are several stacks: {', '.join(known)}.", "Name the one you mean.")
    raise not_running(None)


def not_running(name: str | None) -> StackNotRunning:
    what = f"No stack named `{name}` is running" if name else "No stack is running"
    return StackNotRunning(f"{what}.", "Start one with `rollway up`; `rollway status` lists all.")


def _writable_home(directory: StackDir) -> None:
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        (directory.path / "supervisor.log").touch()
    except OSError as error:
        raise StartError(
            f"Rollway's directory {directory.path} cannot be written: {error.strerror}.",
            "Set ROLLWAY_HOME to a directory you can write.",
        ) from error


def _spawn_supervisor(spec: StackSpec, directory: StackDir) -> tuple[subprocess.Popen[bytes], int]:
    """A supervisor of its own session, tied to this process by a pipe."""
    # The supervisor must import this very package, wherever the caller found it. Not through
    # PYTHONPATH: the workers would inherit it, and may live in another environment.
    source = str(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {source!r}); "
        "from rollway.stack.supervisor import main; sys.exit(main())"
    )
    with (directory.path / "supervisor.log").open("wb") as output:
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
    while True:
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


def _supervisor_died(directory: StackDir, supervisor: subprocess.Popen[bytes]) -> StartError:
    log = directory.path / "supervisor.log"
    said = log.read_text(errors="replace").strip() if log.is_file() else ""
    if supervisor.returncode == 3:
        return StartError(
            f"A stack named `{directory.name}` is being started by another process.",
            "Wait for it, or choose another name with --name.",
        )
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
    state = directory.read()
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
