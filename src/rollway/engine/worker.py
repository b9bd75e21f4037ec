"""Rollway's methods in a vLLM worker: check weights, stage them, swap them in, verify them.

vLLM adds this class to its worker (`--worker-extension-cls`), and Dynamo's `/engine` routes call
its methods by name. These routes return no value, so a method raises if something is wrong: the
caller then sees `status: error` and the message. Callers inside the engine's process get the
values of `rollway_staging` and `rollway_swap`.

The checks are needed because vLLM itself loads an incomplete checkpoint over the old weights and
reports success, leaves a worker without weights if the path is wrong, and on CPU corrupts the
experts of any MoE model it reloads.

Anyone who reaches the engine's RPC could name any method of the worker. So everything that changes
weights must be signed by the stack (offers, and the orders of `rollway_check` and `rollway_load`),
and only the methods that `engine/rpc.py` lists are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollway.engine import core, rpc, transferred
from rollway.engine.adapters import get_adapters
from rollway.engine.companions import Draft, KvScales, restore_scales, split_headers
from rollway.engine.fingerprint import Proof, Reduce
from rollway.engine.foreign_senders import BROADCAST, PrimeRlBroadcastReader, find_rank
from rollway.engine.incoming import BackgroundTask, Incoming, get_reader, warm_up
from rollway.engine.layers import explain_no_reload, find_unpacked, watch_loading
from rollway.engine.patching import set_served
from rollway.engine.sleep_mode import describe_memory, prepare_sleep, refuse_sleeping
from rollway.engine.staging import Staging
from rollway.signed_calls import OrderRefused, Verifier, keep_secret, read_stack_secret
from rollway.weights.checkpoint import (
    TensorHeader,
    check_checkpoint,
    differences,
    explain_joined,
    read_headers,
    refuse_differences,
)
from rollway.weights.offer import read_offer
from rollway.weights.transports.base import Reader
from rollway.weights.transports.files import read_tensors

ORDER_SECONDS = 1800.0
"""How old an order may be: an engine may be busy for a while before it runs one."""
# vLLM imports this module in a worker's process before the worker runs its first call.
_verifier = None
if rpc.in_worker_process():
    _verifier = Verifier(keep_secret(), fresh_seconds=ORDER_SECONDS)


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    def rollway_check(self, order: dict[str, Any]) -> None:
        """Raise if this worker could not serve a checkpoint. Changes nothing."""
        arguments = _open_order("rollway_check", order)
        check_servable(self, arguments["path"], allow_cast=arguments["allow_cast"])

    def rollway_load(self, order: dict[str, Any]) -> None:
        """Load a checkpoint, then compare the model's parameters with the files."""
        arguments = _open_order("rollway_load", order)
        load_checkpoint(self, arguments["path"], identity=arguments["identity"])

    def rollway_refuse(self) -> None:
        """Raise for a call that `engine/rpc.py` refused."""
        raise self._rollway_refusal  # type: ignore[attr-defined]

    def rollway_stage(
        self, offer: dict[str, Any], allow_cast: bool = False, tell: str = ""
    ) -> None:
        """Start receiving offered weights; `rollway_staging` returns the outcome.

        Discards what was staged before. `tell` names a socket of this machine to notify at the
        end."""
        weights = read_offer(offer)
        refuse_sleeping(_get_model(self))
        _refuse_unloadable(_get_model(self))
        earlier = _get_staging(self)
        if earlier is not None and earlier.offer == weights and not earlier.task.has_failed:
            earlier.task.notify_when_done(tell)
            return
        if earlier is not None:
            earlier.discard()
        reader = get_reader(weights, _get_readers(self))
        reader.rank = self.rank  # type: ignore[attr-defined]
        new, draft, scales = split_headers(reader.headers(weights))
        from_files = weights.transport == "files"
        facts = (from_files, frozenset(new))
        if getattr(self, "_rollway_verifiable", None) != facts:  # it takes a while, every time
            _refuse_unverifiable(self, new, "rollway_stage", from_files=from_files)
            self._rollway_verifiable = facts
        policy_draft = Draft(self, draft, allow_cast) if draft else None
        cache = KvScales(self, scales) if scales else None
        reduced = _find_reduction()
        incoming = Incoming(self, reader, weights, new, reduced, policy_draft, cache)
        host = self.__dict__.setdefault("_rollway_host", [])
        staging = Staging(incoming, _read_served_headers(self), host, allow_cast=allow_cast)
        staging.task.notify_when_done(tell)
        self._rollway_staging: Staging | None = staging

    def rollway_staging(self, identity: str) -> dict[str, Any]:
        """Return how far the staging of these weights is; never raise."""
        staging = _get_staging(self)
        if staging is None or staging.offer.identity != identity:
            return {"state": "failed", "error": f"weights {identity} are not staged here"}
        return staging.report()

    def rollway_staged(self, identity: str) -> None:
        """Raise unless these weights are staged and verified; for callers that cannot receive the
        value of `rollway_staging`."""
        _find_staged(self, identity).task.check()

    def rollway_label(self, label: int | None) -> bool:
        """Return False: no engine of this process refuses requests by their version. Where one
        does, `engine/core.py` answers instead."""
        return False

    def rollway_swap(self, identity: str) -> dict[str, Any]:
        """Serve the staged weights; the worker must be paused. Return how it was done."""
        report = _find_staged(self, identity).swap()
        self._rollway_staging = None
        return report

    def rollway_release_kv(self) -> int:
        """Free the blocks that are held for decode workers; only when none reads them."""
        return transferred.release_in_worker()

    def rollway_unstage(self, identity: str = "") -> None:
        """Discard staged weights that will not be served; with an identity, only those."""
        staging = _get_staging(self)
        if staging is not None and identity in ("", staging.offer.identity):
            staging.discard()
            self._rollway_staging = None

    def rollway_join(self, offer: dict[str, Any], tell: str = "") -> None:
        """Start to join the group of prime-rl's trainer; `rollway_joined` returns the outcome."""
        seat = read_offer(offer)
        rank = find_rank(self.vllm_config.parallel_config, self.rank)  # type: ignore[attr-defined]
        device = next(_get_model(self).parameters()).device
        _get_broadcast_reader(self).join(seat, rank, device, tell)

    def rollway_joined(self, identity: str) -> None:
        """Raise unless this rank has joined the group."""
        _get_broadcast_reader(self).check_joined(identity)

    def rollway_leave(self, identity: str) -> None:
        """Leave a group that will not be used."""
        _get_broadcast_reader(self).leave(identity)

    def rollway_memory(self, level: int = 0) -> dict[str, Any]:
        """Return the memory of this rank; with a level, also why it may not sleep at it."""
        memory: dict[str, Any] = describe_memory(self, _read_served_headers(self), level)
        return memory

    def rollway_before_sleep(self, level: int) -> None:
        """Discard staged weights and what will not be true after the sleep."""
        prepare_sleep(self, level)

    def rollway_adapter(self, offer: dict[str, Any], tell: str = "") -> None:
        """Start receiving an adapter; `rollway_adapter_ready` returns the outcome."""
        get_adapters(self, _read_served_headers(self)).receive(read_offer(offer), tell)

    def rollway_adapter_ready(self, served: str) -> None:
        """Raise unless the adapter is complete in the directory from which it will be loaded."""
        get_adapters(self, _read_served_headers(self)).check_ready(served)

    def rollway_adapter_loaded(self, served: str, number: int | None = None) -> None:
        """Raise unless the engine computes with the adapter."""
        get_adapters(self, _read_served_headers(self)).check_loaded(served, number)

    def rollway_adapter_drop(self, served: str) -> None:
        """Discard an adapter that was unloaded, or that will not be loaded."""
        get_adapters(self, _read_served_headers(self)).discard(served)


def start_warm_up(worker: Any) -> None:
    """Prepare for the first refit in the background; an error only means that it will be slower."""
    device = next(_get_model(worker).parameters()).device
    worker._rollway_warm_up = BackgroundTask("the warm-up", warm_up, device)


def check_servable(worker: Any, path: str, *, allow_cast: bool) -> None:
    """Raise if this worker could not serve a checkpoint, or could not verify it afterwards."""
    _refuse_unloadable(_get_model(worker))
    new, draft, scales = split_headers(read_headers(Path(path)))
    if draft or scales:
        what = "weights of a draft model" if draft else "scales of a KV cache"
        raise RuntimeError(f"{path} has {what}, which can only be staged with the policy's weights")
    _refuse_unverifiable(worker, new, "rollway_check")
    served = _read_served_headers(worker)
    if served is not None:
        refuse_differences(differences(new, served, allow_cast=allow_cast), path)


def load_checkpoint(worker: Any, path: str, *, identity: str = "") -> None:
    """Load a checkpoint into the serving model and verify it; the worker must be paused. Raise if
    the files no longer have the given `identity`."""
    check_servable(worker, path, allow_cast=True)  # the files may have changed since
    refuse_sleeping(_get_model(worker))
    # Whoever signed the order has decided whether the weights need a config beside them.
    check = partial(check_checkpoint, Path(path), needs_config=False)
    if identity and check(whole=False).identity != identity:
        raise RuntimeError(f"{path} has other weights than the order names")
    model = _get_model(worker)
    proof = Proof(model)
    set_served(worker, None)
    with ThreadPoolExecutor(1) as pool, watch_loading(model, proof.measure_loaded):
        # Hash the files while loading: it takes about as long as reading them.
        intact = pool.submit(check)
        worker.reload_weights(weights_iterator=proof.collect(read_tensors(Path(path))))
        restore_scales(worker)
        checkpoint = intact.result()
    if identity and checkpoint.identity != identity:
        raise RuntimeError(f"{path} changed while it was loaded")
    proof.check(model, _find_reduction())


def _open_order(method: str, order: Any) -> dict[str, Any]:
    try:
        return (_verifier or Verifier(read_stack_secret())).open(method, order)
    except OrderRefused as refusal:
        raise RuntimeError(f"{method} is refused: {refusal}") from refusal


def _get_staging(worker: Any) -> Staging | None:
    return getattr(worker, "_rollway_staging", None)


def _get_broadcast_reader(worker: Any) -> PrimeRlBroadcastReader:
    """Return the reader that holds this rank's place in the group of prime-rl's trainer."""
    readers = _get_readers(worker)
    if BROADCAST not in readers:
        served = _read_served_headers(worker)
        if served is None:
            raise RuntimeError(
                "the model was given by a name, so the tensors of a broadcast cannot be checked; "
                "start the stack from a checkpoint directory"
            )
        config = worker.model_config.hf_text_config
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        readers[BROADCAST] = PrimeRlBroadcastReader(served, is_tied=is_tied)
    reader = readers[BROADCAST]
    assert isinstance(reader, PrimeRlBroadcastReader)
    return reader


def _get_readers(worker: Any) -> dict[str, Reader]:
    """Return the readers that this worker has opened, by transport."""
    readers: dict[str, Reader] = worker.__dict__.setdefault("_rollway_readers", {})
    return readers


def _find_staged(worker: Any, identity: str) -> Staging:
    staging = _get_staging(worker)
    if staging is None or staging.offer.identity != identity:
        raise RuntimeError(f"weights {identity} are not staged here")
    return staging


def _get_model(worker: Any) -> torch.nn.Module:
    model: torch.nn.Module = worker.model_runner.get_model()
    return model


def _read_served_headers(worker: Any) -> dict[str, TensorHeader] | None:
    """Return the names and shapes of the checkpoint that the worker started from, and the dtypes
    that it serves. Return None if that was not a directory but a model name, whose files vLLM
    downloaded."""
    if not hasattr(worker, "_rollway_served"):
        config = worker.model_config
        path = Path(config.model)
        worker._rollway_served = read_headers(path) if path.is_dir() else None
        if worker._rollway_served and config.quantization is None:
            proof = Proof(_get_model(worker))
            worker._rollway_served = proof.read_served(worker._rollway_served, config.dtype)
    served: dict[str, TensorHeader] | None = worker._rollway_served
    return served


def _refuse_unverifiable(
    worker: Any, new: Mapping[str, TensorHeader], method: str, *, from_files: bool = True
) -> None:
    """Raise if the loaded weights could not be compared with the published ones."""
    quantised = worker.model_config.quantization
    if quantised is not None and not from_files:
        raise RuntimeError(
            f"the served model is quantised ({quantised}): the engine computes its scales when it "
            "loads a checkpoint, and published tensors have none; refit from a checkpoint "
            "directory, which a canary then verifies"
        )
    proof = Proof(_get_model(worker))
    unverifiable = proof.list_unverifiable(new)
    unsupported = [f"tensors like {name}" for name in unverifiable[:1]]
    if quantised is not None:
        unsupported.append("quantised models")
    unpacked = find_unpacked(_get_model(worker)) if unsupported and from_files else ""
    if unpacked:
        # A caller without a proof would have vLLM reload it alone.
        fix = explain_joined(unverifiable) or (
            "Use a checkpoint with the tensors of the served one, or restart the worker with it"
        )
        raise RuntimeError(
            f"{unsupported[0]} cannot be compared with the model's parameters, and vLLM alone does "
            f"not pack {unpacked} again on CPU. {fix}"
        )
    if unsupported and not from_files:
        fix = explain_joined(unverifiable) or (
            "Publish the tensors of the served checkpoint, or refit from a directory, which a "
            "canary then verifies"
        )
        raise RuntimeError(
            f"{unsupported[0]} cannot be compared with the model's parameters. {fix}"
        )
    if unsupported:
        # Callers know this message from workers without this class, and use a canary instead.
        raise NotImplementedError(f"Method '{method}' is not implemented for {unsupported[0]}")


def _refuse_unloadable(model: torch.nn.Module) -> None:
    why_not = explain_no_reload(model)
    if why_not:
        raise RuntimeError(why_not)


def _find_reduction() -> Reduce:
    """Return a function that sums over the ranks that divide parameters."""
    from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group

    def total(local: torch.Tensor) -> torch.Tensor:
        whole = local.clone()
        torch.distributed.all_reduce(whole, group=get_tp_group().device_group)
        return whole

    return torch.clone if get_tensor_model_parallel_world_size() == 1 else total


if rpc.in_worker_process():
    rpc.guard_rpc(WorkerExtension, start_warm_up)
    core.install()
    transferred.rest_between_polls()
