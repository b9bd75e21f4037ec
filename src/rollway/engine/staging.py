"""Receive and verify new weights while the worker generates, so that the pause is only a copy, or
on CPU vLLM's load.

    rollway_stage    background: plan ─► choose where to stage ─► copy and verify ─► prepare
    rollway_staging  running, failed or ready
    rollway_swap     (paused) one batched copy ─► vLLM reloads layers without a plan ─► compare sums

Captured graphs and compiled code hold on to the addresses of parameters. So a worker keeps its
parameters and gets new contents, by a plan that was recorded from vLLM's own loader
(`rollway.engine.loading`). Layers without a plan are reloaded by vLLM: on CPU these are all,
because they are packed.

| strategy | staged in | during the pause |
|---|---|---|
| patch | the device's memory, only what changed | written where it changed |
| direct | nothing is staged | copied from the publisher's device memory |
| device | the device's memory | copied within the device |
| host | pinned host memory | copied at the speed of the bus |
| reload | as above, if memory allows | vLLM loads the tensors |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from rollway.engine import memory
from rollway.engine.companions import restore_scales
from rollway.engine.fingerprint import Proof
from rollway.engine.incoming import BackgroundTask, Incoming, measure, release_frames, zero_pad_all
from rollway.engine.layers import reload_layers, watch_loading
from rollway.engine.loading import BatchedCopy, LoadPlan, find_plan
from rollway.engine.memory import StagedTensors
from rollway.engine.patching import NoPatch, Patch, Served, prepare_patch, set_served
from rollway.engine.sleep_mode import refuse_sleeping
from rollway.weights.checkpoint import TensorHeader, differences, refuse_differences

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name

Placement = Literal["patch", "direct", "device", "host", "nowhere"]


class Staging:
    """A version that is being staged in this worker."""

    def __init__(
        self,
        incoming: Incoming,
        served: dict[str, TensorHeader] | None,
        host: list[torch.Tensor],
        *,
        allow_cast: bool = False,
    ) -> None:
        """Raise if the weights do not fit this worker; otherwise start to receive them. `host` has
        the pinned memory that a worker keeps from one version to the next."""
        offer = self.offer = incoming.offer
        if served is not None:
            problems = differences(incoming.headers, served, allow_cast=allow_cast)
            refuse_differences(problems, offer.where.get("path", f"version {offer.version}"))
        self.incoming = incoming
        self._host = host
        self._plan = LoadPlan()
        self._placement: Placement = "nowhere"
        self._why_placed = self._why_no_patch = ""
        self._device = next(incoming.model.parameters()).device
        self._staged: StagedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        """What was received: views of staged memory, or of the publisher's."""
        self._proof: Proof | None = None
        self._copies: BatchedCopy | Patch | None = None
        log.info("staging version %d", offer.version)
        self.task = BackgroundTask(f"version {offer.version}", self._run, self._device)

    @property
    def strategy(self) -> str:
        is_reload = self._plan.refusal or self._placement == "nowhere"
        return "reload" if is_reload else self._placement

    @property
    def reason(self) -> str:
        """One sentence: where the weights are staged and why, and what vLLM reloads."""
        return "; ".join(filter(None, (self._why_placed, self._why_no_patch, self._plan.reason)))

    def report(self) -> dict[str, Any]:
        """Return how far the staging is. It never raises: in the engine's log, every exception is
        an error with a stack trace."""
        if not self.task.done():
            return {"state": "running", "error": ""}
        if error := self.task.exception():
            return {"state": "failed", "error": f"{error}"}
        digest = self.incoming.reader.get_digest(self.offer)
        return {"state": "ready", "error": "", "digest": digest}

    def swap(self) -> dict[str, Any]:
        """Serve the staged weights; the worker must be paused. Return what was done."""
        self.task.check()
        incoming, steps = self.incoming, dict[str, float]()
        refuse_sleeping(incoming.model)
        began = time.perf_counter()
        self._write(steps)
        _clear_kv_after_non_finite(incoming)
        if incoming.scales is not None:
            incoming.scales.install()
        else:
            restore_scales(incoming.worker)
        report = {"strategy": self.strategy, "reason": self.reason, "seconds": steps}
        seconds = incoming.seconds | {f"swap/{name}": value for name, value in steps.items()}
        seconds["swap"] = time.perf_counter() - began
        # Without waiting: a device takes longer to free memory than to copy the weights.
        self._release(wait=False)
        incoming.reader.finish(self.offer)
        spent = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
        log.info("version %d: %s, because %s", self.offer.version, self.strategy, self.reason)
        log.info("version %d is served (%s)", self.offer.version, spent)
        return report

    def discard(self) -> None:
        """Release the received weights. A background task that still runs stops at its next tensor
        (with deltas, once the version is written), and they are released when it has ended."""
        self.incoming.reader.release()
        self.incoming.abandoned.set()
        self.task.add_done_callback(lambda _: self._release())

    # --- in the background -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            refusal = self._explain_exhaustion(error)
            release_frames(error)  # their variables hold staged tensors
            self.incoming.reader.release()
            self._release()
            if refusal:
                raise RuntimeError(refusal) from None
            raise

    def _receive(self) -> None:
        incoming = self.incoming
        incoming.restrict()
        with incoming.measure("plan"):
            self._plan = find_plan(incoming.worker, incoming.headers)
        if self._receive_patch():
            return
        shapes = memory.list_received_shapes(incoming.headers, incoming.slices)
        self._choose(memory.count_bytes(shapes))
        if self._placement == "nowhere":
            return
        with incoming.measure("load"):
            self._stage(shapes)
        with incoming.measure("prove"):
            self._verify_staged()
        if not self._plan.refusal:
            with incoming.measure("prepare"):
                model = incoming.model
                self._copies = BatchedCopy(self._plan, model, self._tensors, incoming.slices)
                self._copies.warm_up()

    def _receive_patch(self) -> bool:
        """Stage only what changed, if the transport knows that; otherwise note why not."""
        incoming = self.incoming
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

    def _choose(self, needed: int) -> None:
        """Choose where to stage; the reason is part of the report."""
        reader, offer = self.incoming.reader, self.offer
        if reader.shares_device(offer):
            self._placement = "direct"
            self._why_placed = "the publisher's device memory is read in place"
            return
        device = memory.read_device_memory(self._device, needed)
        host = memory.read_host_memory(needed, sum(b.nbytes for b in self._host))
        size = f"{needed / 1e9:.2f} GB are needed"
        if device.holds(needed):
            self._placement, self._why_placed = "device", f"{size}, {device}"
        elif host.holds(needed):
            self._placement, self._why_placed = "host", f"{size}, but {device}; {host}"
        else:
            self._why_placed = f"{size}, but {device}, {host}: they are read during the pause"

    def _stage(self, shapes: Mapping[str, tuple[str, Any]]) -> None:
        incoming = self.incoming
        sums = incoming.reader.sums(self.offer)
        proof = self._proof = Proof(incoming.model, sums, incoming.slices.boxes)
        received = proof.collect(incoming.tensors(proof.by_sum.__contains__))
        if self._placement == "direct":
            self._tensors = dict(received)
            return
        host = self._host if self._placement == "host" else None
        staged = self._staged = StagedTensors(self._device, host)
        staged.allocate(shapes)
        self._tensors = staged.views
        for name, tensor in received:
            staged.put(name, tensor)

    def _verify_staged(self) -> None:
        """Compare the staged tensors with what was received, or with the publisher's sums."""
        assert self._proof is not None
        # Where nothing was copied, the reader left those with a published sum to the caller.
        copied = self._tensors.keys() if self._staged is not None else self._proof.by_sum
        self._proof.check_copies({name: self._tensors[name] for name in copied})
        draft = self.incoming.draft
        names = self._proof.list_non_finite(self._tensors)
        self.incoming.note_non_finite(names + (draft.list_non_finite() if draft else []))

    def _explain_exhaustion(self, error: BaseException) -> str:
        """Return a refusal with figures if memory was not sufficient; "" otherwise."""
        if not memory.is_out_of_memory(error):
            return ""
        needed = self.offer.nbytes
        if self._placement == "host":
            free = memory.read_host_memory(needed)
        else:
            free = memory.read_device_memory(self._device, needed)
        return (
            f"memory does not hold version {self.offer.version}: {needed / 1e9:.2f} GB are needed, "
            f"{free} ({str(error)[:200]})"
        )

    # --- during the pause ------------------------------------------------------------------------

    def _write(self, seconds: dict[str, float]) -> None:
        """Write the weights into the parameters, and verify these."""
        incoming, model = self.incoming, self.incoming.model
        set_served(incoming.worker, None)  # in doubt until everything is verified
        if self._copies is not None:
            with measure(seconds, "copy"), torch.inference_mode():
                _synchronize(self._device)  # nothing may still read the old weights
                self._copies.run()
                _synchronize(self._device)
        if self.strategy == "reload" or self._plan.reloaded:
            with measure(seconds, "reload"):
                self._reload(model)
        assert self._proof is not None
        with measure(seconds, "verify"), torch.inference_mode():
            fingerprints = self._proof.check(model, incoming.reduced)
        set_served(incoming.worker, Served(self.offer.identity, fingerprints))
        incoming.worker.model_runner.reset_encoder_cache()
        incoming.worker.model_runner.reset_mm_cache()
        if incoming.draft is not None:
            with measure(seconds, "draft"):
                incoming.draft.load()

    def _reload(self, model: Any) -> None:
        """Let vLLM load the whole model, or the layers that have no plan."""
        incoming, worker = self.incoming, self.incoming.worker
        tensors: Iterable[tuple[str, torch.Tensor]] = self._tensors.items()
        if self._placement == "nowhere":
            self._proof = Proof(model, cuts=incoming.slices.boxes)
            tensors = self._proof.collect(incoming.tensors())
        assert self._proof is not None
        tensors = zero_pad_all(incoming.slices, tensors)
        with watch_loading(model, self._proof.measure_loaded):
            if self.strategy == "reload":
                worker.reload_weights(weights_iterator=tensors)
                return
            target_of, names = self._proof.target_of, self._plan.reloaded
            layers = torch.nn.ModuleList(model.get_submodule(name) for name in names)
            chosen = (
                (n, t) for n, t in tensors if (target_of(n) or "").rpartition(".")[0] in names
            )
            with reload_layers(layers, worker.vllm_config, worker.model_config):
                model.load_weights(chosen)

    def _release(self, *, wait: bool = True) -> None:
        """Give back the memory of what was staged."""
        self._copies, self._proof, self._tensors = None, None, {}
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.release(wait=wait)
        elif self._placement == "patch":
            memory.return_unused(self._device, wait=wait)
        if self.incoming.draft is not None:
            self.incoming.draft.discard()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clear_kv_after_non_finite(incoming: Incoming) -> None:
    """Clear the memory of the KV cache if the version that leaves may have filled it with NaN.

    vLLM's attention on CPU multiplies what lies behind the end of a sequence by zero, and that is
    NaN: blocks of a later version would be spoilt by what was freed there."""
    worker = incoming.worker
    if getattr(worker, "_rollway_kv_in_doubt", False):
        with torch.inference_mode():
            for memory_block in tree_leaves(getattr(worker.model_runner, "kv_caches", [])):
                memory_block.zero_()
    worker._rollway_kv_in_doubt = not incoming.is_finite
