"""The stack that chaos breaks: where its workers run, and its processes, here or on Ray.

Chaos sends signals, so all nodes of a Ray cluster have to be raylets of this machine.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollway import processes
from rollway.demo.placement import Device, choose_device, choose_shared_gpu, make_float32_env
from rollway.errors import RollwayError, StackNotRunning, UsageError
from rollway.fleet.workers import Worker
from rollway.processes import ProcessId
from rollway.spec import StackSpec
from rollway.stack.preset import cache_dir
from rollway.stack.ray import launcher
from rollway.stack.running import LocalAccess, StackAccess
from rollway.stack.state import ProcessState, StackState


class Target:
    """A stack that runs; after its end, and a new start, `open` finds the next one."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self._access: StackAccess = LocalAccess(spec.name)
        self._on_ray: launcher.RayStack | None = None
        self._run_ids: set[str] = set()
        """Of all supervisors, also of those that have ended."""

    def open(self) -> None:
        """Find the stack that was started."""
        if self._spec.launcher == "ray":
            self.close()
            ray = self._spec.ray
            self._on_ray = launcher.find(f"{ray.namespace}/{self._spec.name}", ray.address)
            if self._on_ray is None:
                raise RollwayError(f"The stack `{self._spec.name}` has ended.")
            self._access = self._on_ray.access
        state = self.read_state()
        nodes = {process.node for process in state.processes} if state else set()
        if len(nodes) > 1:
            raise UsageError(
                f"The stack has processes on {', '.join(sorted(nodes))}.",
                "Chaos kills processes by their ids: run it on raylets of one machine.",
            )

    def close(self) -> None:
        if self._on_ray is not None:
            self._on_ray.close()
            self._on_ray = None

    def read_state(self) -> StackState | None:
        """Return the state of the stack; None after its end."""
        with contextlib.suppress(StackNotRunning):
            state = self._access.read_state()
            self._note_runs(state)
            return state
        return None

    def find_pid(self, worker: Worker) -> int | None:
        known = self._list_processes()
        return next((p.pid for p in known if p.instance == worker.instance_id), None)

    def find(self, name: str) -> list[ProcessId]:
        known = self._list_processes()
        return [p.id for p in known if p.name == name and p.id is not None]

    def kill_supervisor(self, worker: Worker) -> None:
        """Kill the supervisor of this worker, or of any if chaos itself started the worker. (A
        stack on Ray has a supervisor on every node.)"""
        pids = [self.find_pid(worker), *(p.pid for p in self._list_processes())]
        pid = next((pid for pid in pids if pid is not None), None)
        supervisor = processes.find_parent(pid) if pid is not None else None
        if supervisor is not None:
            supervisor.send(signal.SIGKILL)

    def count_orphans(self) -> int:
        """Return how many processes live of all that were seen since the first start."""
        return sum(len(processes.find_members(run)) for run in self._run_ids)

    def _list_processes(self) -> list[ProcessState]:
        state = self.read_state()
        return state.processes if state else []

    def _note_runs(self, state: StackState | None) -> None:
        for process in state.processes if state else ():
            # The mark of the process itself: on Ray, each node's supervisor has its own run id.
            run = processes.read_run_id(process.pid) if process.pid is not None else None
            self._run_ids |= {run} if run else set()


_GPU_SHARE = 0.05
"""Of the GPU's memory, for each worker. The tiny model needs less, and the KV cache has its own
size; a worker that joins or restarts must find as much free."""


def place_workers(
    model: Mapping[str, Any], device: Device | None, gpus: Sequence[str]
) -> dict[str, Any]:
    """Return the model's spec with what its workers need on these GPUs; unchanged without GPUs.

    The judge computes in float32 on the CPU, so that it shares no kernel with the engines; hence
    workers on a GPU must not round to TF32."""
    if choose_device(device, gpus) == "cpu":
        return dict(model)
    args = {
        **model["args"],
        "gpu-memory-utilization": _GPU_SHARE,
        "enforce-eager": True,  # a worker that was killed is back in 50 s instead of 90 to 170 s
    }
    env = {**make_float32_env(), **choose_shared_gpu(gpus, model["replicas"])}
    return {**model, "args": args, "env": env}


def demo_path(stack: Path | None) -> list[str]:
    """Return the override that replaces `path: demo` in a stack file by the demo's checkpoint, and
    build that if necessary."""
    from rollway.demo.model import build_base

    if stack is not None and "path: demo\n" not in stack.read_text():
        return []
    return [f"models.0.path={build_base(cache_dir() / 'demo')}"]
