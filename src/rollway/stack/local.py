"""Start, stop and clear stacks on this machine.

This side spawns `rollway.stack.supervisor`, which runs the stack, reads the state file that the
supervisor writes, and sends it signals.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollway import private_files, processes
from rollway.errors import RollwayError, StackNotRunning, StartError, StateUnreadable, UsageError
from rollway.processes import ProcessId
from rollway.stack.launch import Child, make_name_error, spawn_supervisor, wait_until_ready
from rollway.stack.locks import NamedLock, sweep_abandoned
from rollway.stack.state import (
    DETACH,
    StackDir,
    StackState,
    get_stop_seconds,
    is_ray_part,
    list_run_dirs,
    list_stack_names,
    list_stacks,
    list_unreadable_stacks,
    remove_run_dir,
)
from rollway.weights.adapter import remove_abandoned

if TYPE_CHECKING:  # a Keeper imports this module, and does not need most of what this imports
    from rollway.spec import StackSpec

Progress = Callable[[StackState], None]
_POLL_SECONDS = 0.1
_END_POLL_SECONDS = 0.02
_LONGEST_INTERRUPT_SECONDS = 120.0
_SUPERVISOR_SECONDS = 15.0
"""What a supervisor may need beyond the stop time of its stack."""


@dataclass(slots=True)
class RunningStack:
    """A stack that this process started. It ends with this process unless it is detached."""

    directory: StackDir
    state: StackState
    _supervisor: Child

    def detach(self) -> None:
        """Leave the stack running when this process ends."""
        is_running = self._supervisor.send(DETACH)
        self._supervisor.let_go()
        if not is_running:
            raise StackNotRunning(
                f"The stack `{self.directory.name}` ended as soon as it was ready.",
                f"See {self.directory.path / 'supervisor.log'} and {self.state.log_dir}.",
            )
        # Popen warns about a child that is still running unless it has a return code.
        self._supervisor.process.returncode = 0

    def stop(self, progress: Progress | None = None) -> None:
        _stop_own(self.directory, self._supervisor, self.state.stop_seconds, progress)


def start(
    spec: StackSpec, progress: Progress | None = None, *, as_grandchild: bool = False
) -> RunningStack:
    """Start a stack and return when it is ready.

    On failure, and on KeyboardInterrupt, everything that has started is stopped first. With
    `as_grandchild` the supervisor survives if somebody kills all children of this process."""
    directory = StackDir(spec.name)
    directory.create()
    stop_request = directory.get_stop_request(processes.this_process())
    stop_request.unlink(missing_ok=True)
    # Held until the stack is ready: by this lock `rollway down` finds a start without a state.
    starting = NamedLock(directory.start_lock_name)
    if not starting.acquire():
        raise make_name_error(directory, starting.find_holder())
    try:
        clear_leftovers(directory)
        state = directory.read()
        if state is not None and state.is_supervised:
            raise StartError(
                f"A stack named `{spec.name}` is already running (supervisor "
                f"{state.supervisor_pid}).",
                f"Stop it with `rollway down {spec.name}`, or choose another name with --name.",
            )
        supervisor = spawn_supervisor(spec, directory, as_grandchild=as_grandchild)
        try:
            state = wait_until_ready(directory, supervisor, progress)
        except BaseException:
            _stop_own(directory, supervisor, spec.stop_seconds, progress)
            raise
        return RunningStack(directory, state, supervisor)
    finally:
        stop_request.unlink(missing_ok=True)
        starting.release()


def stop(name: str, progress: Progress | None = None) -> None:
    """Stop a stack of this user by name, even one that is still starting."""
    directory = StackDir(name)
    was_starting = _interrupt_start(directory, progress)
    try:
        state = directory.read()
    except StateUnreadable:
        _clear_unreadable(directory)
        return
    if state is None or state.uid != os.getuid():
        if was_starting:
            return
        raise make_not_running_error(name)
    if state.is_supervised:
        _stop_supervisor(state.supervisor, directory, state.stop_seconds, progress)
    clear_leftovers(directory)


def stop_all(names: list[str], progress: Progress | None = None) -> None:
    """Stop several stacks, and raise the first error after the last of them."""
    failures: list[RollwayError] = []
    for name in names:
        try:
            stop(name, progress)
        except RollwayError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _interrupt_start(directory: StackDir, progress: Progress | None) -> bool:
    """Have the process that is starting this stack stop it; return False if there is none.

    A file asks it to, not a signal: that process may be a trainer, which continues."""
    lock = NamedLock(directory.start_lock_name)
    starter = lock.find_holder()
    if starter is None:
        return False
    request = directory.get_stop_request(starter)
    os.close(private_files.open_file(request, os.O_WRONLY))
    _wait_while(
        lambda: lock.find_holder() == starter, _LONGEST_INTERRUPT_SECONDS, directory, progress
    )
    request.unlink(missing_ok=True)
    return True


def _stop_supervisor(
    supervisor: ProcessId, directory: StackDir, seconds: float, progress: Progress | None
) -> None:
    supervisor.send(signal.SIGTERM)
    _wait_while(lambda: supervisor.alive, seconds + _SUPERVISOR_SECONDS, directory, progress)
    supervisor.send(signal.SIGKILL)
    processes.wait_gone({supervisor}, 5.0)


def _stop_own(
    directory: StackDir, child: Child, stop_seconds: float, progress: Progress | None
) -> None:
    """Stop a supervisor that is a child of this process, and clear what it leaves."""
    child.let_go()
    supervisor = child.process
    with contextlib.suppress(ProcessLookupError):
        supervisor.terminate()
    # `poll` and not the pid: an exited child stays a zombie until its parent collects it.
    _wait_while(
        lambda: supervisor.poll() is None, stop_seconds + _SUPERVISOR_SECONDS, directory, progress
    )
    if supervisor.poll() is None:
        supervisor.kill()
        supervisor.wait()
    state = directory.read()
    if state is not None and state.is_supervised:  # its shell has been killed alone
        _stop_supervisor(state.supervisor, directory, stop_seconds, progress)
    clear_leftovers(directory)


def _wait_while(
    condition: Callable[[], bool], seconds: float, directory: StackDir, progress: Progress | None
) -> None:
    """Wait while a condition holds, and show how far the stop of the stack is."""
    deadline = time.monotonic() + seconds
    next_report = 0.0
    while condition() and time.monotonic() < deadline:
        if progress is not None and time.monotonic() >= next_report:
            next_report = time.monotonic() + _POLL_SECONDS
            with contextlib.suppress(StateUnreadable):
                state = directory.read()
                if state is not None and state.phase == "stopping":
                    progress(state)
        time.sleep(_END_POLL_SECONDS)


def _clear_unreadable(directory: StackDir) -> None:
    """Stop the processes of a stack whose state is unreadable; remove the state.

    Its lock names the supervisor; the run id, which has a file of its own, marks the processes."""
    if directory.path.lstat().st_uid != os.getuid():
        raise make_not_running_error(directory.name)
    supervisor = NamedLock(directory.lock_name).find_holder()
    # Who clears what a dead supervisor left holds the lock as well, and may be a trainer.
    if supervisor is not None and processes.is_supervisor(supervisor):
        _stop_supervisor(supervisor, directory, 20.0, None)
    if (run_id := directory.read_run_id()) is not None:
        memory = processes.end(functools.partial(processes.find_members, run_id), 0.5)
        processes.remove_shared_memory(memory)
        for run_dir in list_run_dirs(run_id):
            remove_run_dir(run_dir)
    remove_abandoned()
    directory.forget()


def clear_leftovers(directory: StackDir) -> bool:
    """Stop the processes of a dead supervisor and remove its files; return whether there were any.

    Processes are identified by the record and by the mark of the run, never by a program's name."""
    state = directory.read()
    if state is None or state.is_supervised or state.uid != os.getuid():
        return False
    lock = NamedLock(directory.lock_name)
    if not lock.acquire():
        return False  # a supervisor is starting at this moment
    try:
        if state.boot == processes.boot_id():
            _stop_members(state)
        remove_run_dir(Path(state.run_dir))
        directory.forget()
        sweep_abandoned()
    finally:
        lock.release()
    return True


def _stop_members(state: StackState) -> None:
    """Stop the recorded processes, which stop their children, then kill the members left."""
    leaders = {p.id for p in state.processes if p.id is not None and p.id.alive}
    for leader in leaders:
        leader.send(signal.SIGTERM)
    processes.wait_gone(leaders, get_stop_seconds(state))

    def find_left() -> set[ProcessId]:
        return {leader for leader in leaders if leader.alive} | processes.find_members(state.run_id)

    memory = processes.end(find_left, 0.5)
    processes.remove_shared_memory({*memory, *state.shared_memory})
    remove_abandoned()


def resolve_name(name: str | None, *, dead_too: bool = False) -> str:
    """Return the name, or that of the only stack there is; raise if there are several."""
    if name is not None:
        return name
    running = [s.name for s in list_stacks() if s.is_supervised and not is_ray_part(s.name)]
    names = list_names() if dead_too else running
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageError(f"There are several stacks: {', '.join(names)}.", "Name the one you mean.")
    raise make_not_running_error(None)


def list_names() -> list[str]:
    """List every stack that `stop` can stop or clear."""
    starting = {
        name
        for name in list_stack_names()
        if NamedLock(StackDir(name).start_lock_name).find_holder() is not None
    }
    # A part of a stack on Ray is stopped with the whole; only what a dead one left is cleared here.
    stacks = [s.name for s in list_stacks() if not (is_ray_part(s.name) and s.is_supervised)]
    starting = {name for name in starting if not is_ray_part(name)}
    return sorted({*stacks, *list_unreadable_stacks(), *starting})


def make_not_running_error(name: str | None) -> StackNotRunning:
    """Make the error for a stack that does not run."""
    subject = f"No stack named `{name}` is running" if name else "No stack is running"
    return StackNotRunning(
        f"{subject}.", "Start one with `rollway up`; `rollway status` lists all."
    )


def watch_state(directory: StackDir) -> Iterator[StackState]:
    """Yield the state of a running stack every second until the stack ends."""
    while (state := directory.read()) is not None and state.is_supervised:
        yield state
        time.sleep(1.0)
