"""The process that holds a stack for a driver of Curator's.

    driver                               owner (a child in a session of its own)
      spec ── stdin ────────────────────►  starts the stack
      ◄───────────────── stdout ── ready: addresses, or the error
      pipeline.run(): ray.init … ray.shutdown, as often as it likes
      close stdin, or die ──────────────►  stops the stack, and exits

Curator's executors connect to Ray and disconnect again, and every disconnect ends what belongs to
the driver's Ray job. The owner has a connection of its own, so the stack outlives them, and it ends
with the driver all the same: however the driver dies, the pipe closes. The user's connection is
never touched, because this side needs none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rollway import private
from rollway.config import StackSpec
from rollway.errors import RollwayError, SpecError, StartError, UsageError, restore_error
from rollway.stack import local
from rollway.stack.state import ProcessState, StackDir, StackState

STOP_SECONDS = 60.0
"""What a stop may take beyond the stop time of the stack."""
PARENT_SECONDS = 1.0
"""How often the owner looks whether its parent is alive. A fork of the driver keeps the pipe open
when the driver has died."""
LOG_TAIL_LINES = 15


class OwnedStack:
    """A running stack that a child process holds."""

    def __init__(self, spec: StackSpec, process: subprocess.Popen[str], log: Path) -> None:
        self.spec = spec
        self.frontend = ""
        self.log_dir = ""
        self.placements: list[dict[str, Any]] = []
        self.free_cpus: float | None = None
        """What the stack leaves to pipelines, by Ray's count; None without Ray."""
        self._process = process
        self._log = log

    def wait_until_ready(self) -> None:
        """Wait for the owner's report; raise the error that it reports."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StartError(
                f"The owner of the stack `{self.spec.name}` ended before the stack was ready "
                f"(status {self._process.wait()}).",
                f"Its log is {self._log}.",
                log_tail=_read_tail(self._log),
            )
        report = json.loads(line)
        if "error" in report:
            raise restore_error(report)
        self.frontend = report["frontend"]
        self.log_dir = report["log_dir"]
        self.placements = report["placements"]
        self.free_cpus = report["free_cpus"]

    def stop(self) -> None:
        """Stop the stack and return when nothing of it is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(self.spec.stop_seconds + STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Without its owner, the launcher takes the stack down.
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._process.returncode == 0:
            # Every start has a name of its own: without this, directories would pile up.
            self._log.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._log.parent.rmdir()


def start_stack(spec: StackSpec) -> OwnedStack:
    """Start a stack in an owner process and return when it is ready.

    On failure, and on KeyboardInterrupt, everything that has started is stopped first."""
    directory = StackDir(spec.name)
    directory.create()
    log = directory.path / "owner.log"
    with os.fdopen(private.open_file(log, os.O_WRONLY | os.O_TRUNC), "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _make_program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # Ctrl-C is the driver's; the owner stops when the driver says
        )
    stack = OwnedStack(spec, process, log)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(spec.model_dump_json() + "\n")
            process.stdin.flush()
        stack.wait_until_ready()
    except BaseException:
        stack.stop()
        raise
    return stack


def _make_program() -> str:
    # As for a supervisor: the owner must import this very package, and no child may inherit a path.
    source = str(Path(__file__).parents[3])
    return (
        f"import sys; sys.path.insert(0, {source!r}); "
        "from rollway.integrations.curator.owner import main; sys.exit(main())"
    )


def _read_tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    return "\n".join(text.strip().splitlines()[-LOG_TAIL_LINES:])


# --- in the owner --------------------------------------------------------------------------------


def main() -> int:
    """Run in the child: start the stack, report, hold it until the driver closes its end."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is for the log
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec = StackSpec.model_validate_json(sys.stdin.readline())
    lifeline = _Lifeline()
    try:
        with _open(spec) as report:
            lifeline.is_starting = False
            _send(reports, report)
            lifeline.wait()
    except KeyboardInterrupt:
        return 1
    except RollwayError as error:
        kind = {"error": SpecError.__name__} if isinstance(error, UsageError) else {}
        _send(reports, {**error.as_json(), **kind})
        return 1
    return 0


class _Lifeline:
    """Notices that the driver has closed the pipe or died, also in the middle of a start."""

    def __init__(self) -> None:
        self.is_starting = True
        self._closed = threading.Event()
        self._parent = os.getppid()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def wait(self) -> None:
        self._closed.wait()

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            readable, _, _ = select.select([0], [], [], PARENT_SECONDS)
            if readable and not os.read(0, 1024):
                break
        self._closed.set()
        if self.is_starting:
            # A real signal: only that wakes the main thread while it waits for the start.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextlib.contextmanager
def _open(spec: StackSpec) -> Iterator[dict[str, Any]]:
    """Run the stack for the block; yield what the driver learns about it."""
    with contextlib.ExitStack() as cleanup:
        if spec.launcher == "ray":
            from rollway.stack.ray import connection, launcher

            cleanup.enter_context(connection.connect(spec.ray.address))
            running: Any = launcher.start(_add_log_dir(spec))
        else:
            running = local.start(spec)
        try:
            yield {**_describe(spec, running.state), "free_cpus": _count_free_cpus(spec)}
        finally:
            running.stop()
        # The driver waits for this process. Ray's disconnect and the end of the interpreter would
        # take half a second more, and there is nothing left to do.
        os._exit(0)


def _add_log_dir(spec: StackSpec) -> StackSpec:
    """Put the logs where Curator's are: in the directory of Ray's session, which tools collect."""
    if spec.log_dir is not None:
        return spec
    import ray

    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir()) / context.get_session_name()
    run = spec.name.rpartition("-")[2]
    return spec.model_copy(update={"log_dir": session / f"nemo_curator_dynamo_{run}"})


def _count_free_cpus(spec: StackSpec) -> float | None:
    if spec.launcher != "ray":
        return None
    from rollway.stack.ray import cluster

    return sum(node.cpus for node in cluster.read_nodes())


def _describe(spec: StackSpec, state: StackState) -> dict[str, Any]:
    """Return what the driver learns, with the placements in the words of Curator's manifest."""
    placements = [
        _describe_replica(spec, process)
        for process in state.processes
        if process.role == "worker" and process.node_rank == 0
    ]
    return {"frontend": state.frontend, "log_dir": state.log_dir, "placements": placements}


def _describe_replica(spec: StackSpec, process: ProcessState) -> dict[str, Any]:
    model = next(model for model in spec.models if model.name == process.model)
    role: Any = process.worker_role
    node = getattr(process, "node", "")
    return {
        "model": process.model,
        **({"mode": "disagg", "role": role} if role else {}),
        "replica": process.replica or 0,
        "process": process.name,
        "nnodes": process.nodes,
        "gpus_per_node": model.roles[role].ranks // process.nodes,
        "multi_node": process.nodes > 1,
        "master_addr": node if process.nodes > 1 else None,
        "node": node,
    }


def _send(reports: TextIO, report: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the driver has died: the lifeline notices
        reports.write(json.dumps(report) + "\n")
        reports.flush()
