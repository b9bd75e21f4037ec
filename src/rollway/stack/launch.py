"""Start a child process that ends with this one, and a supervisor, which is such a child.

    this process                                   child: `main()` of a module, in its own session
      stdin: the job, one line ───────────────────►  Parent().job
      ◄──────────── stdout: a report, one line ────  Parent().report(…)
      close stdin, or die ────────────────────────►  Parent().watch(…): stop and exit

However this process dies, the kernel closes its end of the pipe: the lifeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rollway import private_files, processes
from rollway.errors import (
    RollwayError,
    SpecError,
    StartError,
    UsageError,
    restore_error,
)
from rollway.processes import ProcessId
from rollway.spec import StackSpec
from rollway.stack import logs
from rollway.stack.locks import NamedLock, describe
from rollway.stack.state import StackDir, StackState

NAME_IN_USE = 3
"""The exit status of a supervisor whose name another supervisor has locked."""
_POLL_SECONDS = 0.1
_PARENT_SECONDS = 1.0
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


class Child:
    """A process of this package that ends with this one."""

    def __init__(
        self,
        module: str,
        job: bytes,
        *,
        stderr: IO[bytes] | None = None,
        shell: Sequence[str] = (),
    ) -> None:
        """Run `main()` of a module; `shell` is a command that runs the program after it."""
        # The child must import this very package. PYTHONPATH would do it, but its own children
        # would inherit it, and they may belong to another environment.
        source = str(Path(__file__).parents[2])
        code = (
            f"import sys; sys.path.insert(0, {source!r}); "
            f"from {module} import main; sys.exit(main())"
        )
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is this process's
        )
        self.send(job + b"\n")

    def send(self, message: bytes) -> bool:
        """Write to the child; return False if it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(message)
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def read_report(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the child's report; None if it ended without one. Raise the error that it
        reports, or TimeoutError."""
        assert self.process.stdout is not None
        arrival = select.poll()
        arrival.register(self.process.stdout, select.POLLIN)
        if not arrival.poll(None if seconds is None else 1000 * seconds):
            raise TimeoutError
        line = self.process.stdout.readline()
        report: dict[str, Any] | None = json.loads(line) if line else None
        if report is not None and "error" in report:
            raise restore_error(report)
        return report

    def let_go(self) -> None:
        """Close the lifeline."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def stop(self, seconds: float) -> None:
        """Close the lifeline, and kill the child if it has not ended within `seconds`."""
        self.let_go()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Parent:
    """The process that has started this one as a `Child`."""

    def __init__(self) -> None:
        self._reports = os.dup(1)
        os.dup2(2, 1)  # what libraries print is for the log
        self.job = sys.stdin.buffer.readline()

    def report(self, fields: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: the lifeline tells
            os.write(self._reports, (json.dumps(fields) + "\n").encode())

    def report_error(self, error: RollwayError) -> None:
        kind = {"error": SpecError.__name__} if isinstance(error, UsageError) else {}
        self.report({**error.as_json(), **kind})

    def watch(self, on_end: Callable[[bytes], object], *, by_pid: bool = True) -> None:
        """Call `on_end`, in a thread, with the last message when the parent closes the lifeline or
        dies. `by_pid` notices its death also while a fork of it keeps the pipe open."""
        first = os.getppid()

        def wait() -> None:
            message = b""
            while not by_pid or os.getppid() == first:
                if select.select([0], [], [], _PARENT_SECONDS)[0]:
                    message = os.read(0, 1)
                    break
            with contextlib.suppress(RuntimeError):  # the event loop that it calls has ended
                on_end(message)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()


def spawn_supervisor(spec: StackSpec, directory: StackDir, *, as_grandchild: bool = False) -> Child:
    """Start a supervisor, or a shell that it is a child of."""
    if shutil.disk_usage(directory.path).free < _SPACE_BYTES:
        # Without it the stack could write neither its state nor why it failed.
        raise StartError(
            f"No space is left in {directory.path} for the state and the logs of a stack.",
            "Free some space, or set ROLLWAY_HOME to a directory on another disk.",
        )
    log = private_files.open_file(directory.path / "supervisor.log", os.O_WRONLY | os.O_TRUNC)
    shell = ("/bin/sh", "-c", _GRANDCHILD, "supervisor") if as_grandchild else ()
    with os.fdopen(log, "wb") as output:
        job = spec.model_dump_json().encode()
        return Child("rollway.stack.supervisor", job, stderr=output, shell=shell)


def wait_until_ready(
    directory: StackDir, supervisor: Child, progress: Callable[[StackState], None] | None
) -> StackState:
    """Return the state of a stack when its supervisor reports that it is ready."""
    stop_request = directory.get_stop_request(processes.this_process())
    while not stop_request.exists():
        try:
            is_ready = supervisor.read_report(_POLL_SECONDS) is not None
        except TimeoutError:
            state = directory.read()
            if state is not None and progress is not None:
                progress(state)
            continue
        state = directory.read()
        if is_ready and state is not None:
            return state
        supervisor.process.wait()
        raise _make_exit_error(directory, supervisor.process)
    raise _make_stopped_error(directory)


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
    return StartError(
        f"The supervisor of `{directory.name}` ended before the stack was ready "
        f"(status {supervisor.returncode}).",
        f"Its log is {log}.",
        log_tail="\n".join(logs.tail(log, 15)),
    )
