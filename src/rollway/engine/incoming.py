"""A version on its way into a worker: the thread that receives it beside generation, the reader of
its offer, and the part that a rank needs.

vLLM's loaders accept whole tensors and cut them. A rank that received only its part passes them a
zero-padded tensor: the shape of the whole tensor, with the part in its place. The zeros are never
touched, so on a CPU they take no memory. A loader that cut elsewhere would load zeros, and the
verification after the load would fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch

from rollway.engine.companions import DRAFT, SCALE, Draft, KvScales
from rollway.engine.layers import list_loaded_parameters
from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Shape, Slices
from rollway.weights.offer import STILL, Offer
from rollway.weights.planning.targets import EngineRank, TargetPart, engine_ranks, part_of
from rollway.weights.transports.base import Reader, never

ALLOW_NON_FINITE = "ROLLWAY_ALLOW_NON_FINITE"
"""The environment variable by which a user has workers serve NaN and infinity."""


class BackgroundTask(Future[None]):
    """The outcome of work in a thread. Callers poll it, or have it notify a socket at its end."""

    def __init__(
        self, what: str, work: Callable[[], None], device: torch.device | None = None
    ) -> None:
        """On a GPU, `work` has a stream of its own on `device`, and ends when that is idle."""
        super().__init__()
        self._what = what
        arguments = work, device or torch.device("cpu")
        threading.Thread(
            target=self._run, args=arguments, name="rollway-background", daemon=True
        ).start()

    @property
    def has_failed(self) -> bool:
        return self.done() and self.exception() is not None

    def check(self) -> None:
        """Raise while it is running, and its error if it failed."""
        if not self.done():
            raise RuntimeError(f"{STILL} {self._what}")
        if (error := self.exception()) is not None:
            raise RuntimeError(f"{error}") from error

    def notify_when_done(self, name: str) -> None:
        """Connect to the abstract Unix socket of that name at the end; "" is none."""
        if name:
            self.add_done_callback(lambda _: _connect(name))

    def _run(self, work: Callable[[], None], device: torch.device) -> None:
        try:
            torch.get_num_threads()  # initialises this thread's setting, which share_cores changes
            share_cores(alone=False)
            with torch.no_grad(), use_own_stream(device):
                work()
        except BaseException as error:  # noqa: BLE001 (`check` raises it)
            release_frames(error)
            self.set_exception(error)
        else:
            self.set_result(None)


def _connect(name: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(f"\0{name}")


@contextlib.contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Let this thread use a stream of its own on a GPU, so that it never waits for the engine's
    work or delays it; leave when everything on it is complete."""
    if device.type != "cuda":
        yield
        return
    # A new thread begins on the first GPU, whichever GPU the engine's thread uses.
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def release_frames(error: BaseException) -> None:
    """Release the local variables of an error's traceback: tensors there would keep memory for as
    long as the error is kept."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


@functools.cache
def _count_threads() -> int:
    return int(torch.get_num_threads())


def share_cores(*, alone: bool) -> None:
    """Let this thread compute with all cores, or with half of them while the engine generates. Two
    teams of threads on the same cores wait for each other at every step: a copy then takes ten
    times as long."""
    threads = _count_threads() if alone else max(1, _count_threads() // 2)
    with contextlib.suppress(AttributeError):  # torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(threads)  # only for this thread


@dataclass(slots=True)
class Incoming:
    """A version that is offered to a worker, and how its tensors are received."""

    worker: Any
    reader: Reader
    offer: Offer
    headers: dict[str, TensorHeader]
    """The policy's tensors."""
    reduced: Callable[[torch.Tensor], torch.Tensor]
    """Sums a tensor over the ranks; all of them must call it."""
    draft: Draft | None = None
    """The draft model whose weights are part of this version."""
    scales: KvScales | None = None
    """The scales of the KV cache that are part of this version."""
    seconds: dict[str, float] = field(default_factory=dict)
    slices: Slices = field(default_factory=Slices)
    """What this rank receives; everything until `restrict` was called."""
    abandoned: threading.Event = field(default_factory=threading.Event)
    is_finite: bool = False
    """Whether all values that this rank received are known to be finite."""

    @property
    def model(self) -> torch.nn.Module:
        """The model that serves."""
        model: torch.nn.Module = self.worker.model_runner.get_model()
        return model

    def restrict(self) -> None:
        """Receive only what this rank holds of the model, if the transport can."""
        if self.reader.can_restrict:
            mine = find_slices(find_engine_rank(self.worker), self.headers, self.model)
            self.slices = self.reader.restrict(self.offer, mine)

    def tensors(self, summed: Callable[[str], bool] = never) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's tensors, and keep those of the draft model and of the KV cache."""
        for name, tensor in self.reader.tensors(self.offer, summed):
            self.check_wanted()
            if self.draft is not None and name.startswith(DRAFT):
                self.draft.keep(name.removeprefix(DRAFT), tensor)
            elif self.scales is not None and name.startswith(SCALE):
                self.scales.keep(name.removeprefix(SCALE), tensor)
            else:
                yield name, tensor

    def check_wanted(self) -> None:
        """Raise if the version was discarded meanwhile."""
        if self.abandoned.is_set():
            raise RuntimeError(f"version {self.offer.version} was discarded")

    def note_non_finite(self, names: list[str]) -> None:
        """Note which tensors have NaN or infinity. Raise if there are any, unless the user allows
        them: nobody would see it before the log-probs."""
        self.is_finite = not names
        if names and os.environ.get(ALLOW_NON_FINITE) != "1":
            raise RuntimeError(
                f"{', '.join(names[:3])} of version {self.offer.version} has NaN or infinity. Look "
                f"at the training step, or set {ALLOW_NON_FINITE}=1 in the model's `env`"
            )

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a part of the staging, and use as many cores as are free for it."""
        batch = getattr(self.worker.model_runner, "input_batch", None)
        share_cores(alone=getattr(batch, "num_reqs", None) == 0)
        with measure(self.seconds, name):
            yield


@contextlib.contextmanager
def measure(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Write the seconds of a `with` block into a dict, also where it raises."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - began


_READERS = {
    "files": ("rollway.weights.transports.files", "FilesReader"),
    "delta": ("rollway.weights.transports.delta", "DeltaReader"),
    "shm": ("rollway.weights.transports.shm", "ShmReader"),
    "cuda_ipc": ("rollway.weights.transports.cuda_ipc", "CudaIpcReader"),
    "collective": ("rollway.weights.transports.collective", "CollectiveReader"),
    "nixl": ("rollway.weights.transports.nixl", "NixlReader"),
    "verl_buckets": ("rollway.engine.foreign_senders", "VerlBucketsReceiver"),
}
_WARMED_UP = ("shm", "files", "delta", "cuda_ipc")
"""Transports without packages of their own; a worker meets the others when it is offered one."""


def warm_up() -> None:
    """Import readers now, so that the first refit does not wait."""
    for transport in _WARMED_UP:
        import_module(_READERS[transport][0])


def get_reader(offer: Offer, readers: dict[str, Reader]) -> Reader:
    """Return the reader of the offer's transport from `readers`; add a new one if there is none."""
    if offer.transport not in readers:
        readers[offer.transport] = open_reader(offer.transport)
    return readers[offer.transport]


def open_reader(transport: str) -> Reader:
    """Return a new reader. A worker imports the packages of one transport, not of all."""
    if transport not in _READERS:
        raise WeightsError(f"This worker cannot receive weights by {transport}.")
    module, name = _READERS[transport]
    reader: Reader = getattr(import_module(module), name)()
    return reader


def find_slices(
    rank: EngineRank | None, headers: Mapping[str, TensorHeader], model: torch.nn.Module
) -> Slices:
    """Return the slices that `rank` holds of the tensors in `headers`.

    A tensor is sliced only if there is a rule for it, and the model's parameter has the shape that
    follows from the rule. All other tensors are received whole."""
    if rank is None:
        return Slices()
    loaded = list_loaded_parameters(model)
    by_parameter: dict[str, dict[str, TargetPart | None]] = {}
    for name in headers:
        try:
            parameter, part = part_of(name, headers, rank)
        except (UsageError, IndexError):  # no rule, or a tensor unlike those of the rule
            continue
        by_parameter.setdefault(parameter, {})[name] = part
    boxes: dict[str, Box | None] = {}
    parameters: dict[str, str] = {}
    for parameter, parts in by_parameter.items():
        here = [part for part in parts.values() if part is not None]
        mine = {name: part.box if part is not None else None for name, part in parts.items()}
        is_divided = any(box != Box.whole(headers[name].shape) for name, box in mine.items())
        is_known = parameter in loaded and all(p.shape == loaded[parameter].shape for p in here)
        # A parameter that consists of padding alone is received whole: the engine still loads the
        # padding, and verifies it.
        if here and is_divided and is_known:
            boxes |= mine
            parameters |= dict.fromkeys(mine, parameter)
    return Slices(boxes, {name: header.shape for name, header in headers.items()}, parameters)


def find_engine_rank(worker: Any) -> EngineRank | None:
    """Return the worker's rank in its engine, or None if it is alone or its sharding is unknown."""
    from vllm.distributed import (
        get_ep_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    parallel = worker.vllm_config.parallel_config
    tp, ep = get_tensor_model_parallel_world_size(), 1
    rank = get_tensor_model_parallel_rank()
    if parallel.enable_expert_parallel and worker.model_config.is_moe:
        if parallel.enable_eplb or parallel.expert_placement_strategy != "linear":
            return None  # experts move between ranks
        ep, rank = get_ep_group().world_size, get_ep_group().rank_in_group
    if max(tp, ep) == 1:
        return None
    try:
        return engine_ranks(worker.model_config.hf_config.to_dict(), tp, ep)[rank]
    except UsageError:
        return None


def zero_pad_all(
    slices: Slices, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with each part at its place in a zero-padded whole tensor."""
    for name, tensor in tensors:
        box = slices.boxes.get(name)
        if box is not None and box != Box.whole(slices.shapes[name]):
            tensor = zero_pad(tensor, box, slices.shapes[name])
        yield name, tensor


def zero_pad(part: torch.Tensor, box: Box, shape: Shape) -> torch.Tensor:
    """Return a zero-padded tensor of this shape with `part` at `box`."""
    if part.device.type == "cpu":
        # numpy's zeros are pages that the kernel provides when they are touched; torch's are
        # written.
        raw = np.zeros(Box.whole(shape).elements * part.element_size(), dtype=np.uint8)
        whole = torch.from_numpy(raw).view(part.dtype).view(shape)
    else:
        whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
    whole[box.slices] = part
    return whole
