"""Receive LoRA adapters, and verify that vLLM uses them.

    rollway_adapter ─► check names, shapes, config ─► background: read and verify ─► write files
    rollway_adapter_ready ─► running, failed or ready
    (the caller makes the engine load that directory, under the version's own name)
    rollway_adapter_loaded ─► compare the layers' slots with what was published
    rollway_adapter_drop ─► remove the directory of an unloaded adapter

When vLLM runs out of slots it evicts the least recently used adapter, and later reads it from its
path again during an engine step, where a missing file would kill the engine. So a directory stays
until its adapter is unloaded. A guard process removes all of them when the worker ends, however it
ends. If a supervisor kills both, it removes them itself.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollway.engine.incoming import BackgroundTask, get_reader
from rollway.weights.adapter import Adapter, create_adapter_home, detach_adapter, directory_of
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.leftovers import Guard
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Arrival:
    """A version of an adapter in this worker."""

    config: Mapping[str, Any]
    directory: Path
    """Another one for other weights or another config."""
    task: BackgroundTask
    discarded: threading.Event


class Adapters:
    """All adapters that this worker received."""

    def __init__(self, worker: Any, served: Mapping[str, TensorHeader] | None) -> None:
        self._worker = worker
        self._served = served
        self._arrivals: dict[str, Arrival] = {}
        self._readers: dict[str, dict[str, Reader]] = {}
        self._last: list[BackgroundTask] = []
        """The last one that began, if any."""
        self._guard: Guard | None = None

    def receive(self, signed: Offer, tell: str) -> None:
        """Start receiving an adapter; raise if it does not fit the served model."""
        offer, adapter = detach_adapter(signed)
        directory = directory_of(offer, adapter)
        earlier = self._arrivals.get(adapter.served)
        if earlier is None or earlier.task.has_failed:
            earlier = self._arrivals[adapter.served] = self._start(offer, adapter, directory)
        elif earlier.directory != directory:
            raise RuntimeError(
                f"{adapter.served} already names other weights; use the next version"
            )
        earlier.task.notify_when_done(tell)

    def _start(self, offer: Offer, adapter: Adapter, directory: Path) -> Arrival:
        # A delta is applied to the last version of that name, which its reader keeps.
        readers = self._readers.setdefault(adapter.served.rpartition("@")[0], {})
        reader = get_reader(offer, readers)
        layers = Layers(self._worker, self._served)
        layers.check_config(adapter.config)
        layers.check_headers(reader.headers(offer), int(adapter.config["r"]))
        if self._guard is None:
            self._guard = Guard(create_adapter_home(adapter.place))
        before, discarded = self._last, threading.Event()

        def receive() -> None:
            # One after the other: one that was discarded may still read, and remove its directory.
            wait(before)
            tensors = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
            _write(directory, tensors, adapter.config)
            if discarded.is_set():
                shutil.rmtree(directory, ignore_errors=True)

        task = BackgroundTask(adapter.served, receive)
        self._last = [task]
        return Arrival(adapter.config, directory, task, discarded)

    def check_ready(self, served: str) -> None:
        """Raise while an adapter is being received, and its error if that failed."""
        self._get_arrival(served).task.check()

    def check_loaded(self, served: str, number: int | None) -> None:
        """Raise unless the engine uses the adapter; `number` is the engine's id of it."""
        self.check_ready(served)
        arrival = self._get_arrival(served)
        layers = Layers(self._worker, self._served)
        pairs = layers.make_pairs(load_file(arrival.directory / WEIGHTS), arrival.config)
        if number is not None:
            layers.activate(served, number, arrival.directory)
        if not layers.hold(pairs, number):
            raise RuntimeError(f"the engine does not hold the weights published as {served}")

    def discard(self, served: str) -> None:
        """Remove an adapter. If it is still being received, its task removes what it writes."""
        arrival = self._arrivals.pop(served, None)
        if arrival is not None:
            arrival.discarded.set()
            shutil.rmtree(arrival.directory, ignore_errors=True)

    def _get_arrival(self, served: str) -> Arrival:
        if served not in self._arrivals:
            raise RuntimeError(f"this worker did not receive adapter {served}")
        return self._arrivals[served]


class Layers:
    """The served model's layers that can have adapters."""

    def __init__(self, worker: Any, served: Mapping[str, TensorHeader] | None) -> None:
        if worker.vllm_config.lora_config is None:
            raise RuntimeError(
                "this worker accepts no adapters; start it with enable-lora and with "
                "DYN_LORA_ENABLED=true"
            )
        self._config = worker.vllm_config.lora_config
        self._workers_manager: Any = worker.model_runner.lora_manager
        self._manager: Any = self._workers_manager._adapter_manager
        self._served = served
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper.get_rename_mapper() if mapper is not None else None
        self._places = {
            part: (whole, index)
            for whole, parts in self._manager.packed_modules.items()
            for index, part in enumerate(parts)
        }

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise what vLLM itself would raise when it loads the adapter."""
        from vllm.lora.peft_helper import PEFTHelper

        PEFTHelper.from_dict(dict(config)).validate_legal(self._config)

    def check_headers(self, new: Mapping[str, TensorHeader], rank: int) -> None:
        """Raise for unknown names, wrong shapes, and an A without its B."""
        halves: dict[str, set[bool]] = {}
        for name, header in new.items():
            module, first = self._parse(name)
            layer, index = self._find_layer(name, module)
            out, into = self._get_shape(name, layer, index)
            wanted = (rank, into) if first else (out, rank)
            if tuple(header.shape) != wanted:
                raise RuntimeError(
                    f"{name} has shape {tuple(header.shape)}, but the served model needs {wanted}"
                )
            halves.setdefault(module, set()).add(first)
        incomplete = [module for module, kinds in halves.items() if len(kinds) < 2]
        if incomplete:
            raise RuntimeError(f"{incomplete[0]} has only one of lora_A and lora_B")
        if not halves:
            raise RuntimeError("the adapter has no tensors")

    def make_pairs(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> dict[str, Pair]:
        """Return A, and B times the scale, rounded as vLLM does."""
        from vllm.lora.peft_helper import PEFTHelper

        scale = PEFTHelper.from_dict(dict(config)).vllm_lora_scaling_factor
        halves: dict[str, dict[bool, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            module, first = self._parse(name)
            half = tensor.to(self._config.lora_dtype)
            # vLLM scales B in place, and skips a scale of 1.
            halves.setdefault(module, {})[first] = half if first or scale == 1 else half * scale
        return {module: (half[True], half[False]) for module, half in halves.items()}

    def activate(self, served: str, number: int, directory: Path) -> None:
        """Load the adapter into a slot of the layers, like a request does: it may have been
        evicted."""
        from vllm.lora.request import LoRARequest

        self._workers_manager.add_adapter(LoRARequest(served, number, str(directory)))

    def hold(self, pairs: Mapping[str, Pair], number: int | None) -> bool:
        """Return whether a slot of the layers has exactly these tensors, and zeros elsewhere."""
        slots = [
            slot
            for slot, adapter in enumerate(self._manager.lora_index_to_id)
            if adapter is not None and number in (None, adapter)
        ]
        return any(self._slot_holds(slot, pairs) for slot in slots)

    def _slot_holds(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        expected: dict[str, dict[int, Pair]] = {name: {} for name in self._manager.modules}
        for module, pair in pairs.items():
            whole, index = self._places.get(module, (module, 0))
            expected[whole][index] = pair
        return all(
            _holds(self._manager.modules[name], slot, parts) for name, parts in expected.items()
        )

    def _parse(self, name: str) -> tuple[str, bool]:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        module, first = parse_fine_tuned_lora_name(name, self._mapper)
        return str(module), bool(first)

    def _find_layer(self, name: str, module: str) -> tuple[Any, int]:
        whole, index = self._places.get(module, (module, 0))
        layer = self._manager.modules.get(whole)
        if layer is None or ".lora_" not in name:
            raise RuntimeError(f"the served model has no layer for the adapter tensor {name}")
        slices = len(self._manager.packed_modules.get(whole, [whole]))
        if not _is_linear(layer) or len(layer.lora_a_stacked) != slices:
            raise RuntimeError(
                f"{name} belongs to a {type(layer).__name__}, whose adapters cannot be verified; "
                "load it from files (fleet.admin.load_lora)"
            )
        return layer, index

    def _get_shape(self, name: str, layer: Any, index: int) -> tuple[int, int]:
        """Return the shape of the adapted weight: outputs, inputs."""
        if layer.tp_size == 1:
            out, into = layer.lora_b_stacked[index].shape[-2], layer.lora_a_stacked[index].shape[-1]
            return int(out), int(into)
        weight = f"{name.removeprefix(_PREFIX).rpartition('.lora_')[0]}.weight"
        if self._served is None or weight not in self._served:
            raise RuntimeError(
                f"{weight} is not in the served checkpoint, so the shape of {name} cannot be "
                "checked on several ranks; serve the model from a directory"
            )
        out, into = self._served[weight].shape
        return out, into


def _is_linear(layer: Any) -> bool:
    """Return whether a layer is linear. Experts, embeddings and heads store adapters
    differently."""
    stacked = getattr(layer, "lora_a_stacked", None)
    plain = isinstance(stacked, tuple) and all(a.dim() == 4 and a.shape[1] == 1 for a in stacked)
    return plain and hasattr(layer, "tp_size")


def _holds(layer: Any, slot: int, parts: Mapping[int, Pair]) -> bool:
    """Return whether a slot has this rank's cuts of these parts, and zeros elsewhere."""
    if not _is_linear(layer):
        return not parts
    count = len(layer.lora_a_stacked)
    first = [parts[i][0] if i in parts else None for i in range(count)]
    second = [parts[i][1] if i in parts else None for i in range(count)]
    if layer.tp_size > 1 and parts:
        merged = count > 1
        first = layer.slice_lora_a(first) if merged else [layer.slice_lora_a(first[0])]
        second = layer.slice_lora_b(second) if merged else [layer.slice_lora_b(second[0])]
    stacked = (layer.lora_a_stacked, layer.lora_b_stacked)
    return all(
        _same(buffer[slot, 0], tensor)
        for buffers, tensors in zip(stacked, (first, second), strict=True)
        for buffer, tensor in zip(buffers, tensors, strict=True)
    )


def _same(buffer: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    expected = torch.zeros_like(buffer)
    if tensor is not None:
        rows, columns = tensor.shape
        expected[:rows, :columns] = tensor
    return bool(torch.equal(buffer, expected))


def _write(directory: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write the directory atomically. All ranks of a worker may write it, with the same bytes."""
    scratch = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        (scratch / CONFIG).write_text(json.dumps(config))
        save_file(tensors, scratch / WEIGHTS)
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def get_adapters(worker: Any, served: Mapping[str, TensorHeader] | None) -> Adapters:
    """Return the worker's adapters; create them at the first call."""
    if not hasattr(worker, "_rollway_adapters"):
        worker._rollway_adapters = Adapters(worker, served)
    adapters: Adapters = worker._rollway_adapters
    return adapters
