"""Spawn a supervisor and wait until its stack is ready."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollway import private, processes
from rollway.config import StackSpec
from rollway.errors import StartError, restore_error
from rollway.processes import ProcessId
from rollway.stack.locks import NamedLock, describe
from rollway.stack.state import StackDir, StackState

NAME_IN_USE = 3
"""The exit status of a supervisor whose name another supervisor has locked."""
_POLL_SECONDS = 0.1
_SPACE_BYTES = 4 << 20
_GRANDCHILD = """
trap 'kill -TERM $child 2>/dev/null' TERM
exec 3<&0
"$@" <&3 3<&- & child=$!
exec 0<&- 3<&-
while wait $child; status=$?; kill -0 $child 2>/dev/null; do :; done
exit $status
"""
"""Runs a supervisor as the child of a shell, which passes SIGTERM and the exit status on. (A trap
interrupts `wait`. A shell gives background jobs no stdin, unless they are told.)"""


def spawn_supervisor(
    spec: StackSpec, directory: StackDir, *, as_grandchild: bool = False
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a supervisor in its own session; return it, or the shell that it is a child of, with
    our end of the lifeline."""
    # The supervisor must import this very package. PYTHONPATH would do it, but the workers would
    # inherit it, and they may belong to another environment.
    source = str(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {source!r}); "
        "from rollway.stack.supervisor import main; sys.exit(main())"
    )
    if shutil.disk_usage(directory.path).free < _SPACE_BYTES:
        # Without it the stack could write neither its state nor why it failed.
        raise StartError(
            f"No space is left in {directory.path} for the state and the logs of a stack.",
            "Free some space, or set ROLLWAY_HOME to a directory on another disk.",
        )
    log = private.open_file(directory.path / "supervisor.log", os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(log, "wb") as output:
        their_end, our_end = os.pipe()
        command = [sys.executable, "-c", code, str(their_end)]
        supervisor = subprocess.Popen(
            ["/bin/sh", "-c", _GRANDCHILD, "supervisor", *command] if as_grandchild else command,
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


def wait_until_ready(
    directory: StackDir,
    supervisor: subprocess.Popen[bytes],
    progress: Callable[[StackState], None] | None,
) -> StackState:
    stop_request = directory.get_stop_request(processes.this_process())
    state, read = None, None
    spawned = (directory.path / "supervisor.log").stat().st_mtime_ns
    while True:
        if stop_request.exists():
            raise _make_stopped_error(directory)
        # Before the state is read: a supervisor that exits in between has written its error.
        has_exited = supervisor.poll() is not None
        # The supervisor replaces the file: a look at its identity is cheaper than its validation.
        if (written := _identify(directory.state_file)) != read:
            state, read = directory.read(), written
        is_new = read is not None and read[1] >= spawned
        if state is not None and _is_from(state, supervisor, is_new=is_new):
            if progress:
                progress(state)
            if state.phase == "ready" and not has_exited:
                return state
            if state.error is not None:
                raise restore_error(state.error)
        if has_exited:
            raise _make_exit_error(directory, supervisor)
        time.sleep(_POLL_SECONDS)


def _is_from(state: StackState, supervisor: subprocess.Popen[bytes], *, is_new: bool) -> bool:
    """Return whether a state is this supervisor's, or that of its shell's child."""
    pid = state.supervisor_pid
    if pid == supervisor.pid:
        return True
    parent = processes.find_parent(pid)
    if parent is None:
        # It has ended already, with the error that it wrote; nobody else may start this name.
        return is_new
    return parent.pid == supervisor.pid


def _identify(file: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _make_stopped_error(directory: StackDir) -> StartError:
    return StartError(
        f"The stack `{directory.name}` was stopped while it was starting.",
        "Somebody ran `rollway down`; start it again with `rollway up`.",
    )


def make_name_error(directory: StackDir, holder: ProcessId | None) -> StartError:
    return StartError(
        f"A stack named `{directory.name}` is being started by another process: "
        f"{describe(holder)}.",
        "Wait for it, or choose another name with --name.",
    )


def _make_exit_error(directory: StackDir, supervisor: subprocess.Popen[bytes]) -> StartError:
    if supervisor.returncode == NAME_IN_USE:
        return make_name_error(directory, NamedLock(directory.lock_name).find_holder())
    # 0: it stopped because of a signal. A shell adds 128 to the signal that ended its child.
    if supervisor.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        return _make_stopped_error(directory)
    log = directory.path / "supervisor.log"
    text = log.read_text(errors="replace").strip() if log.is_file() else ""
    return StartError(
        f"The supervisor of `{directory.name}` ended before the stack was ready "
        f"(status {supervisor.returncode}).",
        f"Its log is {log}.",
        log_tail="\n".join(text.splitlines()[-15:]),
    )
