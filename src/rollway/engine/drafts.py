"""Weights of a draft model (EAGLE and its like) that come with the policy's, as one version.

A publisher puts the draft model's tensors beside the policy's, under names that begin with `draft.`
and go on as in the draft model's own checkpoint. They are staged with the policy and swapped in the
same pause, so the two are never of two versions. What the draft model shares with the policy, as
most share embeddings and head, is a module of both: it has the policy's new parameters at once.

A version without such tensors leaves the draft model's own as they are: slower guesses, never other
samples, since the policy judges every guess.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollway.engine.fingerprint import fingerprint
from rollway.engine.shadow import exchange, paired
from rollway.weights.checkpoint import (
    TensorHeader,
    differences,
    read_headers,
    refuse_differences,
)

PREFIX = "draft."
# Of EAGLE-3: the inverse of a table that is loaded, which vLLM passes over; and what is computed.
_NOT_LOADED = ("t2d", "rotary_emb.inv_freq")
Headers = dict[str, TensorHeader]


def parted(headers: Mapping[str, TensorHeader]) -> tuple[Headers, Headers]:
    """The policy's tensors, and the draft model's by their own names."""
    policy = {name: one for name, one in headers.items() if not name.startswith(PREFIX)}
    draft = {name.removeprefix(PREFIX): one for name, one in headers.items() if name not in policy}
    return policy, draft


class Draft:
    """The draft model of one worker, and a version of it that is on its way."""

    def __init__(self, worker: Any, new: Headers, allow_cast: bool = False) -> None:
        """Refuse what could not be served here."""
        drafter: Any = getattr(worker.model_runner, "drafter", None)
        live = getattr(drafter, "model", None)
        if not isinstance(live, torch.nn.Module):
            raise RuntimeError(
                "the version has weights of a draft model, and this worker has none; start it with "
                f"a speculative-config, or publish without names that begin with {PREFIX}"
            )
        self._drafter: Any = drafter
        self._live: Any = live
        self._config: Any = drafter.speculative_config.draft_model_config
        policy = worker.model_runner.get_model()
        self._shared = frozenset(id(module) for module in policy.modules())
        self._tensors: dict[str, torch.Tensor] = {}
        self._fresh: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        if self._config.quantization is not None or getattr(drafter, "parallel_drafting", False):
            raise RuntimeError(
                "the draft model is quantised or drafts in parallel, and keeps more than its "
                "weights; restart the worker with the new one"
            )
        self._refuse_differences(worker, new, allow_cast)

    def start(self, *, in_place: bool) -> None:
        """On the thread that serves: vLLM sets things for the whole process here."""
        if not in_place:
            self._fresh = self._made()
        elif any(parameter.numel() == 0 for parameter in self._own(self._live).values()):
            raise RuntimeError(
                "a draft model on CPU is only refitted by exchange; start the worker with "
                "enforce-eager and without adapters, and leave room for the weights twice"
            )

    def beside(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's tensors as they come; the others are kept, since they are few."""
        for name, tensor in tensors:
            if name.startswith(PREFIX):
                self._tensors[name.removeprefix(PREFIX)] = tensor.clone()
            else:
                yield name, tensor

    def load(self, ranks: int) -> None:
        """Fill a second draft model with vLLM's loader, prove it, make it ready."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for parameter in self._own(self._fresh).values():
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)  # what is still there afterwards was not loaded
        self._fresh.load_weights(iter(self._tensors.items()))
        self._check(self._fresh, ranks)
        process_weights_after_loading(self._fresh, self._config, torch.device("cpu"))
        self._fresh.eval()
        self._pairs = paired(self._fresh, self._live, self._shared)

    def exchange(self) -> None:
        """Draft with it from now on; the worker must be paused."""
        for live, fresh in self._pairs:
            exchange(live, fresh)
        self.drop()

    def load_in_place(self, ranks: int) -> None:
        """Have vLLM reload the draft model; the worker must be paused."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self._live)
        self._live.load_weights(iter(self._tensors.items()))
        finalize_layerwise_reload(self._live, self._config)  # type: ignore[no-untyped-call]
        self._check(self._live, ranks)
        self.drop()

    def drop(self) -> None:
        self._fresh, self._pairs, self._tensors = None, [], {}

    def _refuse_differences(self, worker: Any, new: Headers, allow_cast: bool) -> None:
        """Names, shapes and dtypes must be those of the draft model's own checkpoint, less what it
        shares with the policy."""
        shared = {
            name.rpartition(".")[2]
            for name, module in self._live.named_modules()
            if id(module) in self._shared
        }
        doubled = [name for name in new if name.split(".")[-2:-1] and name.split(".")[-2] in shared]
        if doubled:
            raise RuntimeError(
                f"the draft model shares {doubled[0]} with the policy, whose own it gets; publish "
                "without it"
            )
        path = Path(self._config.model)
        if not path.is_dir() or path == Path(worker.model_config.model):
            raise RuntimeError(
                "the draft model has no checkpoint directory of its own to compare with; start the "
                "worker with one in its speculative-config"
            )
        served = {
            name: header
            for name, header in read_headers(path).items()
            if f".{name}".split(".")[-2] not in shared
        }
        refuse_differences(differences(new, served, allow_cast=allow_cast), "The draft model")

    def _made(self) -> Any:
        from vllm.compilation.backends import set_model_tag
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self._drafter._create_draft_vllm_config())
        # Layers enter themselves here by name; those of the served models stay.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        tag, dtype = set_model_tag("eagle_head"), set_default_torch_dtype(self._config.dtype)
        with tag, dtype, torch.device("cpu"):
            return initialize_model(vllm_config=config, model_config=self._config)

    def _own(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Parameters that are not the policy's."""
        theirs = dict(self._live.named_modules())
        return {
            f"{name}.{key}": parameter
            for name, module in model.named_modules()
            if id(theirs.get(name)) not in self._shared
            for key, parameter in module.named_parameters(recurse=False)
        }

    def _check(self, model: torch.nn.Module, ranks: int) -> None:
        """Raise unless it holds what came. How vLLM's loader renames, fuses and orders tensors is
        its own affair: sums of bits do not change by it, and zeros of padding do not count."""
        own = self._own(model)
        floats = [one for one in own.values() if one.is_floating_point()]
        if any(bool(parameter.isnan().any()) for parameter in floats):
            raise RuntimeError("vLLM's loader left a part of the draft model empty")
        if ranks > 1:
            return  # some are cut among ranks and some are whole on each
        dtype = floats[0].dtype
        came = sum(
            fingerprint(tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in self._tensors.items()
            if not name.endswith(_NOT_LOADED)
        )
        held = sum(fingerprint(parameter) for parameter in own.values())
        if (came - held) % (1 << 64):
            raise RuntimeError("the draft model does not hold what was published")
