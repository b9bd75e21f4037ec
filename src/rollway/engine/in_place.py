"""Copy staged weights into the parameters that serve, whose addresses stay.

Captured graphs and compiled code hold on to the addresses of parameters. So a worker keeps its
parameters and gets new contents: one batched copy during the pause, by a plan that was recorded
from vLLM's own loader (`rollway.engine.loading`). Layers without a plan are reloaded by vLLM: on
CPU these are all, because they are packed.

    background   plan ─► choose where to stage ─► copy and verify ─► prepare the batched copy
    pause        one batched copy ─► vLLM reloads layers without a plan ─► compare the sums

| strategy | staged in | during the pause |
|---|---|---|
| patch | the device's memory, only what changed | written where it changed |
| direct | nothing is staged | copied from the publisher's device memory |
| device | the device's memory | copied within the device |
| host | pinned host memory | copied at the speed of the bus |
| reload | as above, if memory allows | vLLM loads the tensors |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from rollway.engine import memory
from rollway.engine.fingerprint import Proof
from rollway.engine.incoming import Incoming, Stopwatch, zero_pad_all
from rollway.engine.layers import PACKED, explain_no_plan, list_changed_layers, watch_loading
from rollway.engine.loading import LoadPlan, Region, get_plan, record_plan
from rollway.engine.memory import HostBuffers, StagedTensors
from rollway.engine.patching import NoPatch, Patch, Served, prepare_patch, set_served
from rollway.engine.sleep_mode import refuse_pooled
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Slices

Placement = Literal["patch", "direct", "device", "host", "none"]


class InPlace:
    """The strategies that write into the serving model's own parameters."""

    def __init__(self, incoming: Incoming, host: HostBuffers) -> None:
        self._incoming = incoming
        self._host = host
        self._plan = LoadPlan()
        self._placement: Placement = "none"
        self._why_placed = self._why_no_patch = ""
        self._device = next(incoming.model.parameters()).device
        self._staged: StagedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        """What was received: views of staged memory, or of the publisher's."""
        self._proof: Proof | None = None
        self._copies: BatchedCopy | Patch | None = None
        self._addresses = list_addresses(incoming.model)
        """Where the copies go. The addresses stay also if the engine sleeps in between."""

    @property
    def strategy(self) -> str:
        return "reload" if self._plan.refusal or self._placement == "none" else self._placement

    @property
    def reason(self) -> str:
        """One sentence: where the weights are staged and why, and what vLLM reloads."""
        return "; ".join(filter(None, (self._why_placed, self._why_no_patch, self._plan.reason)))

    @property
    def nbytes(self) -> int:
        if isinstance(self._copies, Patch):
            return self._copies.nbytes
        return self._staged.nbytes if self._staged is not None else 0

    @property
    def reloaded(self) -> list[str]:
        """The layers that vLLM reloads; "all" stands for the whole model."""
        return ["all"] if self.strategy == "reload" else sorted(self._plan.reloaded)

    def receive(self) -> None:
        """Stage and verify the weights; runs in the background."""
        needed = self._incoming.offer.nbytes

        def read_memory() -> memory.FreeMemory:
            if self._placement == "host":
                return memory.read_host_memory(needed)
            return memory.read_device_memory(self._device, needed)

        with memory.explain_exhaustion(self._incoming.offer.version, needed, read_memory):
            self._receive()

    def _receive(self) -> None:
        incoming, model = self._incoming, self._incoming.model
        incoming.restrict(model)
        with incoming.measure("plan"):
            self._plan = plan_in_place(incoming.worker, incoming.headers)
        if self._receive_patch():
            return
        shapes = memory.list_received_shapes(incoming.headers, incoming.slices)
        self._choose(memory.count_bytes(shapes))
        if self._placement == "none":
            return
        with incoming.measure("load"):
            self._stage(model, shapes)
        with incoming.measure("prove"):
            self._verify_staged()
        if not self._plan.refusal:
            with incoming.measure("prepare"):
                self._copies = BatchedCopy(self._plan, model, self._tensors, incoming.slices)
                self._copies.warm_up()

    def _receive_patch(self) -> bool:
        """Stage only what changed, if the transport knows that; otherwise note why not."""
        incoming = self._incoming
        try:
            with incoming.measure("load"):
                self._copies, self._proof = prepare_patch(incoming, self._plan, self._device)
        except NoPatch as refusal:
            why_not = f"{refusal}"
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            why_not = "the device's memory does not hold it"
        else:
            self._placement = "patch"
            incoming.note_non_finite(self._copies.list_non_finite())
            self._why_placed = f"{self._copies.count} elements changed since the served version"
            return True
        self._why_no_patch = f"no patch, because {why_not}" if why_not else ""
        del incoming.seconds["load"]  # whole tensors are loaded instead
        return False

    def swap(self) -> dict[str, float]:
        """Serve the staged weights; the worker must be paused. Return the seconds of each step."""
        incoming, seconds = self._incoming, dict[str, float]()
        model = incoming.model
        set_served(incoming.worker, None)  # in doubt until everything is verified
        with torch.inference_mode():
            if self._copies is not None:
                if list_addresses(model) != self._addresses:
                    raise RuntimeError("parameters have moved since the weights were staged")
                with Stopwatch(seconds, "copy"):
                    _synchronize(self._device)  # nothing may still read the old weights
                    self._copies.run()
                    _synchronize(self._device)
        if self.strategy == "reload" or self._plan.reloaded:
            with Stopwatch(seconds, "reload"):
                self._reload(model)
        assert self._proof is not None
        with Stopwatch(seconds, "verify"), torch.inference_mode():
            self._proof.check(model, incoming.reduced)
        set_served(
            incoming.worker, Served(incoming.offer.identity, self._proof.list_fingerprints())
        )
        incoming.worker.model_runner.reset_encoder_cache()
        incoming.worker.model_runner.reset_mm_cache()
        if incoming.draft is not None:
            with Stopwatch(seconds, "draft"):
                incoming.draft.load_in_place(incoming.ranks)
        return seconds

    def release(self, *, wait: bool = True) -> None:
        """Give back the memory of what was staged."""
        self._copies, self._proof, self._tensors = None, None, {}
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.release(wait=wait)
        elif self._placement == "patch":
            memory.return_unused(self._device, wait=wait)

    def _choose(self, needed: int) -> None:
        """Choose where to stage; the reason is part of the report."""
        if self._incoming.reader.shares_device(self._incoming.offer):
            self._placement = "direct"
            self._why_placed = "the publisher's device memory is read in place"
            return
        device = memory.read_device_memory(self._device, needed)
        host = memory.read_host_memory(needed, self._host.nbytes)
        size = f"{needed / 1e9:.2f} GB are needed"
        if device.holds(needed):
            self._placement, self._why_placed = "device", f"{size}, {device}"
        elif host.holds(needed):
            self._placement, self._why_placed = "host", f"{size}, but {device}; {host}"
        else:
            self._why_placed = f"{size}, but {device}, {host}: they are read during the pause"

    def _stage(self, model: torch.nn.Module, shapes: Mapping[str, tuple[str, Any]]) -> None:
        incoming = self._incoming
        sums = incoming.reader.sums(incoming.offer)
        proof = self._proof = Proof(model, sums, incoming.slices.boxes)
        received = proof.collect(incoming.tensors(proof.by_sum.__contains__))
        if self._placement == "direct":
            self._tensors = dict(received)
        else:
            on_host = self._placement == "host"
            staged = self._staged = StagedTensors(
                torch.device("cpu") if on_host else self._device,
                pinned=on_host and torch.cuda.is_available(),
                host=self._host if on_host else None,
            )
            staged.allocate(shapes)
            refuse_pooled(staged.views.values())
            self._tensors = staged.views
            for name, tensor in received:
                staged.put(name, tensor)
        proof.refuse_missing()

    def _verify_staged(self) -> None:
        """Compare the staged tensors with what was received, or with the publisher's sums."""
        assert self._proof is not None
        copies: Mapping[str, torch.Tensor] = self._tensors
        if self._staged is None:
            # Nothing was copied. The reader left tensors with a published sum to the caller.
            copies = {name: copies[name] for name in self._proof.by_sum}
        try:
            self._proof.check_copies(copies)
        except RuntimeError:
            if self._proof.by_sum:
                # Read once more: this raises if the publisher changed the tensors meanwhile.
                for _ in self._incoming.reader.tensors(self._incoming.offer):
                    pass
            raise
        self._proof.finish_collecting()
        draft = self._incoming.draft
        names = self._proof.list_non_finite(self._tensors)
        self._incoming.note_non_finite(names + (draft.list_non_finite() if draft else []))

    def _reload(self, model: torch.nn.Module) -> None:
        """Let vLLM load the whole model, or the layers that have no plan."""
        incoming = self._incoming
        if self._placement == "none":
            proof = self._proof = Proof(model, cuts=incoming.slices.boxes)
            tensors: Iterable[tuple[str, torch.Tensor]] = proof.collect(incoming.tensors())
        else:
            tensors = self._tensors.items()
        tensors = zero_pad_all(incoming.slices, tensors)
        assert self._proof is not None
        with watch_loading(model, self._proof.measure_loaded):
            if self.strategy == "reload":
                incoming.worker.reload_weights(weights_iterator=tensors)
                return
            target_of, layers = self._proof.target_of, self._plan.reloaded
            chosen = (
                (n, t) for n, t in tensors if (target_of(n) or "").rpartition(".")[0] in layers
            )
            reload_layers(incoming.worker, layers, chosen)


def list_addresses(model: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


class BatchedCopy:
    """All copies of a plan for one version, prepared so that running them takes no decisions."""

    def __init__(
        self,
        plan: LoadPlan,
        model: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        slices: Slices,
    ) -> None:
        live: dict[str, torch.Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
        }
        if plan.refusal or any(tuple(live[n].shape) != shape for n, shape in plan.shapes.items()):
            raise RuntimeError(plan.refusal or "the model's parameters changed their shapes")
        self._batches: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._single: list[tuple[torch.Tensor, torch.Tensor]] = []
        padded: dict[str, torch.Tensor] = {}
        for copy in plan.copies:
            if copy.tensor not in tensors:
                raise RuntimeError(f"{copy.tensor} was not received")
            source = _view_source(copy.source, copy.tensor, tensors, slices, padded)
            self._add(copy.destination.view(live[copy.parameter]), source)
        self._zeros = [region.view(live[name]) for name, region in plan.padding]

    def _add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # One kernel copies a whole list only if both sides are dense; one exception would make it
        # copy all of them one by one.
        dense = target.is_contiguous() and source.is_contiguous()
        if dense and target.dtype == source.dtype:
            targets, sources = self._batches.setdefault((target.dtype, source.device), ([], []))
            targets.append(target)
            sources.append(source)
        else:
            self._single.append((target, source))

    def warm_up(self) -> None:
        """Run the copy's kernels once on other memory: CUDA loads a kernel when it is first used,
        which must not happen during the pause."""
        for targets, sources in self._batches.values():
            scratch = torch.empty(8, dtype=targets[0].dtype, device=targets[0].device)
            source = torch.zeros(8, dtype=sources[0].dtype, device=sources[0].device)
            torch._foreach_copy_([scratch], [source], non_blocking=True)
            torch._foreach_zero_([scratch])

    def run(self) -> None:
        """Copy; on a GPU this only starts the copies."""
        for targets, sources in self._batches.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in self._single:
            target.copy_(source, non_blocking=True)
        if self._zeros:
            torch._foreach_zero_(self._zeros)


def _view_source(
    region: Region,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    slices: Slices,
    padded: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the elements of a tensor that a copy needs, also where only a part of it came."""
    tensor, box = tensors[name], slices.boxes.get(name)
    if box is None:
        return region.view(tensor)
    within = region.within(slices.shapes[name], box)
    if within is None:  # the loader cuts elsewhere; the zeros then fail the verification
        if name not in padded:
            padded[name] = dict(zero_pad_all(slices, [(name, tensor)]))[name]
        return region.view(padded[name])
    return within.view(tensor)


def plan_in_place(worker: Any, headers: Mapping[str, TensorHeader]) -> LoadPlan:
    """Return how tensors with these headers are copied into the serving parameters."""
    return get_plan(worker, headers, partial(_record, worker, headers))


def _record(worker: Any, headers: Mapping[str, TensorHeader]) -> LoadPlan:
    refusal = explain_no_plan(worker)
    if refusal:
        return LoadPlan(refusal=refusal)
    model = worker.model_runner.get_model()
    changed = list_changed_layers(model)
    packed = [name for name, reason in changed.items() if reason == PACKED]
    if packed:
        # On CPU nearly all layers are packed, and vLLM reloads them faster together.
        return LoadPlan(refusal=f"{packed[0]}: {PACKED}")
    plan = record_plan(model, headers, Proof(model).target_of, changed)
    if not plan.copies and not plan.refusal:
        return LoadPlan(refusal=plan.reason or "vLLM's loader copies no tensor")
    return plan


def reload_layers(
    worker: Any, names: Iterable[str], tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Let vLLM reload these layers only. It treats a module that has them, and no other layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.model_runner.get_model()
    layers = torch.nn.ModuleList(model.get_submodule(name) for name in names)
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(layers)
        model.load_weights(tensors)
        finalize_layerwise_reload(layers, worker.model_config)  # type: ignore[no-untyped-call]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
