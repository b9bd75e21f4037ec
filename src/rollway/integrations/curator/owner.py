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
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollway import private_files
from rollway.errors import RollwayError, StartError
from rollway.spec import StackSpec
from rollway.stack import local, logs
from rollway.stack.launch import Child, Parent
from rollway.stack.state import ProcessState, StackDir, StackState

STOP_SECONDS = 60.0
"""What a stop may take beyond the stop time of the stack."""
LOG_TAIL_LINES = 15


class OwnedStack:
    """A running stack that a child process holds."""

    def __init__(self, spec: StackSpec, child: Child, log: Path) -> None:
        self.spec = spec
        self.frontend = ""
        self.log_dir = ""
        self.placements: list[dict[str, Any]] = []
        self.free_cpus: float | None = None
        """What the stack leaves to pipelines, by Ray's count; None without Ray."""
        self._child = child
        self._log = log

    def wait_until_ready(self) -> None:
        """Wait for the owner's report; raise the error that it reports."""
        report = self._child.read_report()
        if report is None:
            raise StartError(
                f"The owner of the stack `{self.spec.name}` ended before the stack was ready "
                f"(status {self._child.process.wait()}).",
                f"Its log is {self._log}.",
                log_tail="\n".join(logs.tail(self._log, LOG_TAIL_LINES)),
            )
        self.frontend = report["frontend"]
        self.log_dir = report["log_dir"]
        self.placements = report["placements"]
        self.free_cpus = report["free_cpus"]

    def stop(self) -> None:
        """Stop the stack and return when nothing of it is left."""
        # If the owner has to be killed, the launcher takes the stack down.
        self._child.stop(self.spec.stop_seconds + STOP_SECONDS)
        if self._child.process.returncode == 0:
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
    with os.fdopen(private_files.open_file(log, os.O_WRONLY | os.O_TRUNC), "wb") as output:
        child = Child(__name__, spec.model_dump_json().encode(), stderr=output)
    stack = OwnedStack(spec, child, log)
    try:
        stack.wait_until_ready()
    except BaseException:
        stack.stop()
        raise
    return stack


# --- in the owner --------------------------------------------------------------------------------


def main() -> int:
    """Run in the child: start the stack, report, hold it until the driver closes its end."""
    parent = Parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec = StackSpec.model_validate_json(parent.job)
    started, is_let_go = threading.Event(), threading.Event()

    def let_go(_: bytes) -> None:
        is_let_go.set()
        if not started.is_set():
            # A real signal: only that wakes the main thread while it waits for the start.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    parent.watch(let_go)
    try:
        with _open(spec) as report:
            started.set()
            parent.report(report)
            is_let_go.wait()
    except KeyboardInterrupt:
        return 1
    except RollwayError as error:
        parent.report_error(error)
        return 1
    return 0


@contextlib.contextmanager
def _open(spec: StackSpec) -> Iterator[dict[str, Any]]:
    """Run the stack for the block; yield what the driver learns about it."""
    with contextlib.ExitStack() as cleanup:
        if spec.launcher == "ray":
            from rollway.stack.ray import cluster, launcher

            cleanup.enter_context(cluster.connect(spec.ray.address))
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
