"""vLLM's own receiver of weights (`--weight-transfer-config`, backend nccl) without a GPU.

Only what needs a GPU is another: NCCL's communicator is a gloo group, CUDA's streams are nothing.
The engine, its messages and its chunks are vLLM's. `write_plugin` makes a plugin of vLLM, by which
a worker that is otherwise stock has it; `replaced` does the same for a test's own process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from rollway.weights.transports.group import ID_BYTES

SECONDS = timedelta(seconds=60)
_METADATA = "Metadata-Version: 2.1\nName: rollway-gloo-transfer\nVersion: 0\n"
_ENTRY = "[vllm.general_plugins]\nrollway_gloo_transfer = tests.stack.gloo_transfer:install\n"


class Gloo:
    """A rank of a group, with the calls of `group.Nccl`."""

    device = torch.device("cpu")

    def __init__(self, unique_id: bytes, rank: int, world: int, **_: Any) -> None:
        host, _, port = unique_id.rstrip(b"\0").decode().partition(":")
        store = TCPStore(host, int(port), world, rank == 0, SECONDS, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(store, rank, world, SECONDS)
        self._group.allreduce([torch.zeros(1)]).wait()  # as NCCL's do

    @staticmethod
    def make_id() -> bytes:
        """Return where the first rank will listen, in as many bytes as NCCL's ids have."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}".encode().ljust(ID_BYTES, b"\0")

    def broadcast(self, flat: torch.Tensor, seconds: float) -> Any:
        return self._group.broadcast(flat, 0, timedelta(seconds=seconds))

    def abort(self) -> None:
        self._group = None


class WorkerGloo(Gloo):
    """The same with the calls of vLLM's communicator."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        super().broadcast(tensor, 60).wait()


def join_worker(init_info: Any, parallel_config: Any) -> WorkerGloo:
    """Stand in for vLLM's `worker_init_process_group`."""
    own = parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank
    unique_id = init_info.nccl_unique_id_bytes
    return WorkerGloo(unique_id, own + init_info.rank_offset, init_info.world_size)


def list_replaced() -> list[tuple[Any, str, Any]]:
    """Return what needs a GPU in vLLM's receiver, and what takes its place."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    streams: Callable[..., Any] = lambda device, count: (stream,) * count  # noqa: E731
    return [
        (nccl_engine, "worker_init_process_group", join_worker),
        (packed_tensor, "_get_streams", streams),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda *_: None),
    ]


def install() -> None:
    """Do it for the whole process; vLLM calls this in every one of its own."""
    for place, name, value in list_replaced():
        setattr(place, name, value)


@contextmanager
def replaced() -> Iterator[None]:
    """Do it for a while."""
    patches = [mock.patch.object(place, name, value) for place, name, value in list_replaced()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def write_plugin(directory: Path) -> Path:
    """Write a package's metadata; return the directory to put on a worker's path."""
    info = directory / "rollway_gloo_transfer-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY)
    return directory
