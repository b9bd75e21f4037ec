"""Make a Hugging Face mixture-of-experts model run the experts that the engine ran.

Two programs that round differently choose different experts for some tokens, and with other experts
a token has an entirely different log-prob. With the engine's choices replayed, only rounding
remains:

    with replay(model, routed):
        logits = model(input_ids).logits
        loss(logits).backward()     # inside: gradient checkpointing runs the layers again

The router still scores every expert. The weights are its scores of the recorded experts,
renormalised as in the model, so the router learns as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from rollway.errors import UsageError
from rollway.rollout.experts import RoutedExperts, dtype_for

Weigh: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]
"""Computes the weights of chosen experts from a router, its logits [tokens, experts] and the chosen
ids [tokens, top_k], exactly as that router does for its own choice."""


def _softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


def _mixtral(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    weights = torch.softmax(logits.float(), dim=-1).gather(-1, ids)
    return weights / weights.sum(dim=-1, keepdim=True)


# Keyed by the router's class in transformers 5. Each router returns (logits, weights, ids).
_ROUTERS: dict[str, Weigh] = {
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": _mixtral,
}


@contextmanager
def replay(model: nn.Module, routed: RoutedExperts | Sequence[RoutedExperts]) -> Iterator[None]:
    """Make every forward pass of `model` in this block use the recorded experts.

    Pass one record for a batch of one, or one for each sequence of a batch that is padded on the
    right. Positions without a record use the model's own routing: the last token, padding, and
    positions before `start`."""
    records = [routed] if isinstance(routed, RoutedExperts) else list(routed)
    routers = _routers(model)
    for record in records:
        _check_fit(record, routers)
    if not records:
        raise UsageError("There are no routed experts to replay.")
    ran: set[int] = set()

    def make_hook(layer: int) -> Callable[..., Any]:
        def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, _weights, own = output
            ids = _merge(records, layer, own)
            ran.add(layer)
            return logits, _ROUTERS[type(router).__name__](router, logits, ids), ids

        return hook

    def check_all_ran(*_: Any) -> None:
        if len(ran) != len(routers):
            raise UsageError(
                f"{len(routers) - len(ran)} of {len(routers)} routers did not run, so their layers "
                "replayed nothing.",
                "Load the model without fused MoE kernels (`use_kernels=False`).",
            )

    with ExitStack() as hooks:
        for layer, router in enumerate(routers):
            handle = router.register_forward_hook(make_hook(layer))
            hooks.callback(handle.remove)
        # Trainers that need no logits call the model without its head.
        body = getattr(model, "base_model", model)
        hooks.callback(body.register_forward_hook(check_all_ran).remove)
        yield


def router_choices(model: nn.Module, input_ids: Any) -> RoutedExperts:
    """Return the choices of the model's own routers for one sequence, as an engine reports them."""
    ids = torch.as_tensor(input_ids).reshape(1, -1)
    ids = ids.to(next(model.parameters()).device)
    routers = _routers(model)
    chosen: dict[int, Tensor] = {}

    def watch(layer: int) -> Callable[..., None]:
        def hook(_router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen[layer] = output[2]

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for layer, router in enumerate(routers):
            hooks.callback(router.register_forward_hook(watch(layer)).remove)
        model(ids)
    layers = [chosen[layer].cpu().numpy() for layer in range(len(routers))]
    return RoutedExperts(np.stack(layers, axis=1).astype(dtype_for(routers[0].num_experts)))


def _routers(model: nn.Module) -> list[Any]:
    """Return the routers in the order of the layers, as engines record them."""
    routers = [module for module in model.modules() if type(module).__name__ in _ROUTERS]
    if not routers:
        raise UsageError(
            f"{type(model).__name__} has no router that can be replayed.",
            f"Known routers of transformers 5: {', '.join(_ROUTERS)}.",
        )
    return routers


def _check_fit(record: RoutedExperts, routers: list[Any]) -> None:
    top_k, experts = routers[0].top_k, routers[0].num_experts
    if (record.layers, record.top_k) != (len(routers), top_k):
        raise UsageError(
            f"The record has {record.layers} layers and top-{record.top_k}; the model has "
            f"{len(routers)} sparse layers and top-{top_k}.",
            "Replay it in the model that the engine serves.",
        )
    if record.rows and not 0 <= int(record.ids.min()) <= int(record.ids.max()) < experts:
        raise UsageError(
            f"The record has expert ids up to {record.ids.max()}; the model has {experts} experts.",
            "Replay it in the model that the engine serves.",
        )


def _merge(records: list[RoutedExperts], layer: int, own: Tensor) -> Tensor:
    """Return the recorded ids of a layer, and the model's own for positions without a record."""
    length, rest = divmod(own.shape[0], len(records))
    longest = max(record.end for record in records)
    if rest or length not in (longest, longest + 1):
        raise UsageError(
            f"The model got {own.shape[0]} tokens but replays {len(records)} sequences, "
            f"the longest with {longest} recorded tokens.",
            "Pass prompt and completion as the engine saw them, without padding beyond the longest "
            "sequence. The last token may have no record.",
        )
    merged = own.clone()
    for index, record in enumerate(records):
        begin = index * length + record.start
        ids = torch.as_tensor(record.ids[:, layer].astype(np.int64), device=own.device)
        merged[begin : begin + record.rows] = ids
    return merged
