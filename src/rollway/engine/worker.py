"""Rollway's methods in a vLLM worker: stage weights, swap them in, verify them.

vLLM adds this class to its worker (`--worker-extension-cls`). Orders call its methods by name
(`engine/refit_orders.py`, `engine/core.py`), and so do Dynamo's `/engine` routes. These routes
return no value, so a method raises if something is wrong: the caller then sees `status: error` and
the message.

The checks are needed because vLLM itself loads an incomplete checkpoint over the old weights and
reports success, leaves a worker without weights if the path is wrong, and on CPU corrupts the
experts of any MoE model it reloads.

Anyone who reaches the engine's RPC could name any method of the worker. So offers of weights must
be signed by the stack, and only the methods that `engine/rpc.py` lists are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollway.engine import core, rpc, transferred
from rollway.engine.adapters import get_adapters
from rollway.engine.companions import Draft, KvScales, split_headers
from rollway.engine.fingerprint import Proof, Reduce
from rollway.engine.foreign_senders import BROADCAST, PrimeRlBroadcastReader, find_rank
from rollway.engine.incoming import BackgroundTask, Incoming, get_reader, warm_up
from rollway.engine.layers import explain_no_reload, find_unpacked
from rollway.engine.sleep_mode import describe_memory, prepare_sleep, refuse_sleeping
from rollway.engine.staging import Staging
from rollway.signed_calls import keep_secret
from rollway.weights.checkpoint import (
    TensorHeader,
    explain_joined,
    read_headers,
)
from rollway.weights.offer import read_offer
from rollway.weights.transports.base import Reader

# vLLM imports this module in a worker's process before the worker runs its first call.
if rpc.in_worker_process():
    keep_secret()


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

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
