"""What Rollway adds to a vLLM worker: check a checkpoint, load it, prove what was loaded.

vLLM mixes this class into its worker (`--worker-extension-cls`), and Dynamo's `/engine` routes can
then call its methods by name. They have no way to return a value, so a method that finds something
wrong raises: the caller sees `status: error` and the message.

vLLM itself loads an incomplete checkpoint over the old weights and says ok, leaves a worker without
weights when the path is wrong, and on CPU corrupts the experts of any MoE it reloads.

Whoever reaches the engine's RPC could name any method of the worker. So what brings weights here
must be signed by the stack (offers, and the orders of `rollway_check` and `rollway_load`), and only
the methods that `engine/rpc.py` lists run at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rollway.engine import rpc
from rollway.engine.adapters import adapters_of
from rollway.engine.drafts import Draft, parted
from rollway.engine.fingerprint import Proof
from rollway.engine.receivers import Receiver, checkpoint_tensors, receiver_for
from rollway.engine.shadow import Room, exchangeable
from rollway.engine.staging import Staging
from rollway.orders import OrderRefused, Verifier, keep_secret, stack_secret
from rollway.weights.checkpoint import (
    TensorHeader,
    check_checkpoint,
    differences,
    read_headers,
    refuse_differences,
)
from rollway.weights.offer import read_offer

ORDER_SECONDS = 1800.0
"""An engine may be busy for a while before it comes to an order."""
# vLLM imports this module in a worker's process before the worker takes its first call.
_verifier = None
if rpc.in_worker_process():
    _verifier = Verifier(keep_secret(), fresh_seconds=ORDER_SECONDS)


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    def rollway_check(self, order: dict[str, Any]) -> None:
        """Refuse a checkpoint that this worker could not serve. Changes nothing."""
        arguments = _open_order("rollway_check", order)
        check_servable(self, arguments["path"], allow_cast=arguments["allow_cast"])

    def rollway_load(self, order: dict[str, Any]) -> None:
        """Load a checkpoint that was checked, then compare what the model holds with the files."""
        arguments = _open_order("rollway_load", order)
        load_checkpoint(self, arguments["path"], identity=arguments["identity"])

    def rollway_refuse(self) -> None:
        """Raise for a call that `engine/rpc.py` refused."""
        raise self._rollway_refusal  # type: ignore[attr-defined]

    def rollway_stage(
        self, offer: dict[str, Any], allow_cast: bool = False, tell: str = ""
    ) -> None:
        """Begin to bring offered weights here; `rollway_staged` says how it went. What was staged
        before is let go. `tell` names a socket to knock at when it is done."""
        made = read_offer(offer)
        if exchangeable(self):
            _refuse_what_vllm_corrupts(_model(self))
        before = _staging(self)
        if before is not None and before.offer == made and not before.failed:
            before.when_done(tell)
            return
        if before is not None:
            before.drop()
        if not hasattr(self, "_rollway_receivers"):
            self._rollway_receivers: dict[str, Receiver] = {}
        receiver = receiver_for(made, self._rollway_receivers)
        new, draft = parted(receiver.headers(made))
        _refuse_what_cannot_be_proved(
            self, new, "rollway_stage", from_files=made.transport == "files"
        )
        staging = Staging(
            self,
            receiver,
            made,
            new,
            _served(self),
            *_ranks(),
            _room(self),
            allow_cast=allow_cast,
            draft=Draft(self, draft, allow_cast) if draft else None,
        )
        staging.start()  # or refuse
        staging.when_done(tell)
        self._rollway_staging: Staging | None = staging

    def rollway_staged(self, identity: str) -> None:
        """Raise unless these weights are here and proved."""
        _staged(self, identity).check()

    def rollway_swap(self, identity: str) -> None:
        """Serve what was staged; the worker must be paused."""
        _staged(self, identity).swap()
        self._rollway_staging = None

    def rollway_unstage(self, identity: str = "") -> None:
        """Discard staged weights that will not be served; with an identity, only those."""
        staging = _staging(self)
        if staging is not None and identity in ("", staging.offer.identity):
            staging.drop()
            self._rollway_staging = None

    def rollway_adapter(self, offer: dict[str, Any], tell: str = "") -> None:
        """Begin to bring an adapter here; `rollway_adapter_ready` says how it went."""
        adapters_of(self, _served(self)).bring(read_offer(offer), tell)

    def rollway_adapter_ready(self, served: str) -> None:
        """Raise unless the adapter is here, whole, in the directory it is to be loaded from."""
        adapters_of(self, _served(self)).ready(served)

    def rollway_adapter_loaded(self, served: str, number: int | None = None) -> None:
        """Raise unless the engine computes with the adapter."""
        adapters_of(self, _served(self)).loaded(served, number)

    def rollway_adapter_drop(self, served: str) -> None:
        """Forget an adapter that was unloaded, or that will not be loaded."""
        adapters_of(self, _served(self)).drop(served)


def check_servable(worker: Any, path: str, *, allow_cast: bool) -> None:
    """Raise for a checkpoint that this worker could not serve, or could not prove afterwards."""
    _refuse_what_vllm_corrupts(_model(worker))
    new, draft = parted(read_headers(Path(path)))
    if draft:
        raise RuntimeError(
            f"{path} has weights of a draft model, which are only staged with the policy's"
        )
    _refuse_what_cannot_be_proved(worker, new, "rollway_check")
    served = _served(worker)
    if served is not None:
        refuse_differences(differences(new, served, allow_cast=allow_cast), path)


def load_checkpoint(worker: Any, path: str, *, identity: str = "") -> None:
    """Load a checkpoint into the model that serves, and prove it; the worker must be paused. With
    an `identity`, raise unless the files are still those that have it."""
    check_servable(worker, path, allow_cast=True)  # the files may have changed since
    if identity and check_checkpoint(Path(path), whole=False).identity != identity:
        raise RuntimeError(f"{path} holds other weights than those that were ordered")
    proof = Proof(_model(worker))
    with ThreadPoolExecutor(1) as pool:
        # While loading, since hashing takes about as long as reading.
        intact = pool.submit(check_checkpoint, Path(path))
        worker.reload_weights(weights_iterator=proof.watching(checkpoint_tensors(Path(path))))
        checkpoint = intact.result()
    if identity and checkpoint.identity != identity:
        raise RuntimeError(f"{path} was changed while it was loaded")
    proof.check(_model(worker), _ranks()[1])


def _open_order(method: str, order: Any) -> dict[str, Any]:
    try:
        return (_verifier or Verifier(stack_secret())).open(method, order)
    except OrderRefused as refusal:
        raise RuntimeError(f"{method} was refused: {refusal}") from refusal


def _staging(worker: Any) -> Staging | None:
    return getattr(worker, "_rollway_staging", None)


def _room(worker: Any) -> Room:
    """Where the last version was loaded; another place while anything of that is in use."""
    room: Room | None = getattr(worker, "_rollway_room", None)
    if room is None or not room.free:
        room = worker._rollway_room = Room()
    return room


def _staged(worker: Any, identity: str) -> Staging:
    staging = _staging(worker)
    if staging is None or staging.offer.identity != identity:
        raise RuntimeError(f"weights {identity} were not staged here")
    return staging


def _model(worker: Any) -> torch.nn.Module:
    model: torch.nn.Module = worker.model_runner.get_model()
    return model


def _served(worker: Any) -> dict[str, TensorHeader] | None:
    """Names, shapes and dtypes of the checkpoint the worker started from; None where that was not
    a directory (a model name, whose files vLLM fetched)."""
    if not hasattr(worker, "_rollway_served"):
        path = Path(worker.model_config.model)
        worker._rollway_served = read_headers(path) if path.is_dir() else None
    served: dict[str, TensorHeader] | None = worker._rollway_served
    return served


def _refuse_what_cannot_be_proved(
    worker: Any, new: Mapping[str, TensorHeader], method: str, *, from_files: bool = True
) -> None:
    quantised = worker.model_config.quantization
    if quantised is not None and not from_files:
        raise RuntimeError(
            f"the served model is quantised ({quantised}): its scales are made where the engine "
            "itself loads a checkpoint, and published tensors have none; refit from a checkpoint "
            "directory, which a canary then proves"
        )
    proof = Proof(_model(worker))
    beyond = [f"tensors like {name}" for name in proof.unknown_among(new)[:1]]
    if quantised is not None:
        beyond.append("quantised models")
    if proof.packed and _ranks()[0] > 1 and exchangeable(worker):
        beyond.append("packed layers on several ranks")
    if beyond and not from_files:
        raise RuntimeError(
            f"{beyond[0]} cannot be compared with what the model holds; publish what the served "
            "checkpoint has, or refit from a checkpoint directory, which a canary then proves"
        )
    if beyond:
        # In these words callers know it from a worker without this class, and use a canary.
        raise NotImplementedError(f"Method '{method}' is not implemented for {beyond[0]}")


def _refuse_what_vllm_corrupts(model: torch.nn.Module) -> None:
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if on_cpu and any(True for _ in _expert_layers(model)):
        raise RuntimeError(
            "vLLM corrupts the experts of a mixture-of-experts model when it reloads one in place "
            "on CPU; start the worker with enforce-eager and without adapters, so that it can be "
            "refitted by exchange"
        )


def _expert_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that hold the weights of several experts in one parameter."""
    for module in model.modules():
        if any(name.startswith("w13") for name, _ in module.named_parameters(recurse=False)):
            yield module


def _ranks() -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """Among how many ranks parameters are cut, and how to sum over them."""
    from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group

    def total(local: torch.Tensor) -> torch.Tensor:
        whole = local.clone()
        torch.distributed.all_reduce(whole, group=get_tp_group().device_group)
        return whole

    ranks = get_tensor_model_parallel_world_size()
    return ranks, torch.clone if ranks == 1 else total


if rpc.in_worker_process():
    rpc.guard_rpc(WorkerExtension)
