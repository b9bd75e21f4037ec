"""LoRA adapters that came by a transport, on their way into vLLM's adapter manager.

    rollway_adapter ─► names, shapes, config fit ─► a thread: read ─► prove ─► write a directory
    rollway_adapter_ready ─► still at it, or wrong, or ready
    (the caller has the engine load that directory, under the version's own name)
    rollway_adapter_loaded ─► what the layers compute with is what was published
    rollway_adapter_drop ─► unloaded: the directory goes

vLLM drops the adapter that was used least recently when it has no room, and reads it from its path
again within a step of the engine, where a missing file would end the engine. So a directory stays
until its adapter is unloaded. When the worker ends, however it ends, a guard removes them all; what
a supervisor kills, guard included, it removes itself.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollway.engine.errand import Errand
from rollway.engine.receivers import Receiver, receiver_for
from rollway.weights.adapter import Adapter, detached, directory_of, take_home
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.bits import digest
from rollway.weights.leftovers import Guard
from rollway.weights.offer import Offer

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Arrival:
    """One version of an adapter in one worker."""

    offer: Offer
    adapter: Adapter
    directory: Path
    errand: Errand | None = None
    digests: dict[str, str] = field(default_factory=dict)
    """Of the tensors as they came; what the engine loads from must still have them."""
    dropped: bool = False

    @property
    def is_same(self) -> tuple[str, Path]:
        return self.offer.identity, self.directory


class Adapters:
    """All adapters that came to a worker this way."""

    def __init__(self, worker: Any, served: Mapping[str, TensorHeader] | None) -> None:
        self._worker = worker
        self._served = served
        self._arrivals: dict[str, Arrival] = {}
        self._receivers: dict[str, dict[str, Receiver]] = {}
        self._leaving: dict[Path, Errand] = {}
        self._guard: Guard | None = None

    def bring(self, signed: Offer, tell: str) -> None:
        """Begin to bring one; refuses what does not fit the served model."""
        offer, adapter = detached(signed)
        arrival = Arrival(offer, adapter, directory_of(offer, adapter))
        before = self._arrivals.get(adapter.served)
        if before is not None and before.errand is not None and not before.errand.failed:
            if before.is_same != arrival.is_same:
                raise RuntimeError(
                    f"{adapter.served} already names other weights; give these the next version"
                )
            before.errand.when_done(tell)
            return
        leaving = self._leaving.pop(arrival.directory, None)
        if leaving is not None and not leaving.done:
            self._leaving[arrival.directory] = leaving
            raise RuntimeError(f"an earlier {adapter.served} has not ended yet; try again later")
        # A delta is applied to what came before by that name.
        receivers = self._receivers.setdefault(adapter.served.rpartition("@")[0], {})
        receiver = receiver_for(offer, receivers)
        layers = Layers(self._worker, self._served)
        layers.refuse_config(adapter.config)
        layers.refuse_misfits(receiver.headers(offer), int(adapter.config["r"]))
        if self._guard is None:
            self._guard = Guard(take_home(adapter.place))

        def take() -> None:
            tensors = {name: tensor.clone() for name, tensor in receiver.tensors(offer)}
            arrival.digests = {name: digest(tensor) for name, tensor in tensors.items()}
            _write(arrival.directory, tensors, adapter.config)
            if arrival.dropped:
                shutil.rmtree(arrival.directory, ignore_errors=True)

        arrival.errand = Errand(adapter.served, take)
        arrival.errand.when_done(tell)
        self._arrivals[adapter.served] = arrival

    def ready(self, served: str) -> None:
        errand = self._arrival(served).errand
        assert errand is not None
        errand.check()

    def loaded(self, served: str, number: int | None) -> None:
        """Raise unless the engine computes with it; `number` is what the engine calls it."""
        self.ready(served)
        arrival = self._arrival(served)
        tensors = load_file(arrival.directory / WEIGHTS)
        if {name: digest(tensor) for name, tensor in tensors.items()} != arrival.digests:
            raise RuntimeError(f"{arrival.directory} was changed by somebody else")
        layers = Layers(self._worker, self._served)
        if number is not None:
            layers.activate(served, number, arrival.directory)
        if not layers.hold(layers.pairs(tensors, arrival.adapter.config), number):
            raise RuntimeError(f"the engine does not hold what was published as {served}")

    def drop(self, served: str) -> None:
        """One that is still on its way removes what it writes by itself: nobody waits for it."""
        arrival = self._arrivals.pop(served, None)
        if arrival is None or arrival.errand is None:
            return
        arrival.dropped = True
        self._leaving[arrival.directory] = arrival.errand
        shutil.rmtree(arrival.directory, ignore_errors=True)

    def _arrival(self, served: str) -> Arrival:
        if served not in self._arrivals:
            raise RuntimeError(f"adapter {served} was not brought here")
        return self._arrivals[served]


class Layers:
    """The served model's layers that adapters can be put on."""

    def __init__(self, worker: Any, served: Mapping[str, TensorHeader] | None) -> None:
        if worker.vllm_config.lora_config is None:
            raise RuntimeError(
                "this worker takes no adapters; start it with enable-lora, and with "
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

    def refuse_config(self, config: Mapping[str, Any]) -> None:
        """What vLLM itself would say when it loads it."""
        from vllm.lora.peft_helper import PEFTHelper

        PEFTHelper.from_dict(dict(config)).validate_legal(self._config)

    def refuse_misfits(self, new: Mapping[str, TensorHeader], rank: int) -> None:
        """Names that no layer has, shapes that are not its own, an A without its B."""
        halves: dict[str, set[bool]] = {}
        for name, header in new.items():
            module, first = self._parsed(name)
            layer, index = self._layer(name, module)
            out, into = self._shape(name, layer, index)
            wanted = (rank, into) if first else (out, rank)
            if tuple(header.shape) != wanted:
                raise RuntimeError(
                    f"{name} has shape {tuple(header.shape)}, and the served model takes {wanted}"
                )
            halves.setdefault(module, set()).add(first)
        lone = [module for module, found in halves.items() if len(found) < 2]
        if lone:
            raise RuntimeError(f"{lone[0]} has only one of lora_A and lora_B")
        if not halves:
            raise RuntimeError("the adapter has no tensors")

    def pairs(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> dict[str, Pair]:
        """A, and B times the scale, rounded as vLLM rounds it."""
        from vllm.lora.peft_helper import PEFTHelper

        scale = PEFTHelper.from_dict(dict(config)).vllm_lora_scaling_factor
        halves: dict[str, dict[bool, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            module, first = self._parsed(name)
            half = tensor.to(self._config.lora_dtype)
            # In place in vLLM, and not at all for 1.
            halves.setdefault(module, {})[first] = half if first or scale == 1 else half * scale
        return {module: (half[True], half[False]) for module, half in halves.items()}

    def activate(self, served: str, number: int, directory: Path) -> None:
        """Into a slot of the layers, as a request for it would; another may have taken its slot."""
        from vllm.lora.request import LoRARequest

        self._workers_manager.add_adapter(LoRARequest(served, number, str(directory)))

    def hold(self, pairs: Mapping[str, Pair], number: int | None) -> bool:
        """Whether a slot of the layers has exactly these, and nothing where there is none."""
        slots = [
            slot
            for slot, held in enumerate(self._manager.lora_index_to_id)
            if held is not None and number in (None, held)
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

    def _parsed(self, name: str) -> tuple[str, bool]:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        module, first = parse_fine_tuned_lora_name(name, self._mapper)
        return str(module), bool(first)

    def _layer(self, name: str, module: str) -> tuple[Any, int]:
        whole, index = self._places.get(module, (module, 0))
        layer = self._manager.modules.get(whole)
        if layer is None or ".lora_" not in name:
            raise RuntimeError(f"{name} is for no layer that the served model can adapt")
        slices = len(self._manager.packed_modules.get(whole, [whole]))
        if not _is_linear(layer) or len(layer.lora_a_stacked) != slices:
            raise RuntimeError(
                f"{name} is for a {type(layer).__name__}, whose adapters cannot be proved; load "
                "it from files (AdminAPI.load_lora)"
            )
        return layer, index

    def _shape(self, name: str, layer: Any, index: int) -> tuple[int, int]:
        """Of the weight that is adapted: outputs, inputs."""
        if layer.tp_size == 1:
            out, into = layer.lora_b_stacked[index].shape[-2], layer.lora_a_stacked[index].shape[-1]
            return int(out), int(into)
        weight = f"{name.removeprefix(_PREFIX).rpartition('.lora_')[0]}.weight"
        if self._served is None or weight not in self._served:
            raise RuntimeError(
                f"{weight} is not in the served checkpoint, so that the shape of {name} cannot be "
                "checked on several ranks; serve the model from a directory"
            )
        out, into = self._served[weight].shape
        return out, into


def _is_linear(layer: Any) -> bool:
    """Experts, embeddings and heads keep their adapters in ways of their own."""
    stacked = getattr(layer, "lora_a_stacked", None)
    plain = isinstance(stacked, tuple) and all(a.dim() == 4 and a.shape[1] == 1 for a in stacked)
    return plain and hasattr(layer, "tp_size")


def _holds(layer: Any, slot: int, parts: Mapping[int, Pair]) -> bool:
    """Whether a layer's slot has these parts and zeros elsewhere, as this rank has them cut."""
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
        _same(held[slot, 0], tensor)
        for buffers, tensors in zip(stacked, (first, second), strict=True)
        for held, tensor in zip(buffers, tensors, strict=True)
    )


def _same(held: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    if tensor is None:
        return not bool(held.any())
    rows, columns = tensor.shape
    corner = held[:rows, :columns]
    if corner.shape != tensor.shape or not torch.equal(corner.to(tensor.device), tensor):
        return False
    return not bool(held[rows:].any()) and not bool(held[:, columns:].any())


def _write(directory: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Appears whole. Ranks of one worker may all write it: the same bytes."""
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        (made / CONFIG).write_text(json.dumps(config))
        save_file(tensors, made / WEIGHTS)
        made.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def adapters_of(worker: Any, served: Mapping[str, TensorHeader] | None) -> Adapters:
    """The worker's, made when first asked for."""
    if not hasattr(worker, "_rollway_adapters"):
        worker._rollway_adapters = Adapters(worker, served)
    found: Adapters = worker._rollway_adapters
    return found
