"""Refit a draft model (EAGLE and similar) together with the policy, as one version.

A publisher adds the draft model's tensors to the policy's, with the prefix `draft.` before their
names in the draft checkpoint. They are staged with the policy and swapped in the same pause, so the
two never have different versions. Modules that both share, usually embeddings and head, get the
policy's new parameters at the swap.

A version without such tensors leaves the draft model as it is: its guesses get worse, but samples
do not change, because the policy judges every guess.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollway.engine.fingerprint import Proof, fingerprint
from rollway.engine.shadow import exchange, pair_modules
from rollway.weights.checkpoint import (
    TensorHeader,
    differences,
    read_headers,
    refuse_differences,
)

PREFIX = "draft."
# vLLM does not load these of EAGLE-3: the inverse of a loaded table, and a computed table.
_NOT_LOADED = ("t2d", "rotary_emb.inv_freq")
# Two names of the only layer of an EAGLE-3 head. Trainers export the first, and vLLM loads either.
_ONLY_LAYER = ("midlayer.", "layers.0.")
Headers = dict[str, TensorHeader]


def split_draft(headers: Mapping[str, TensorHeader]) -> tuple[Headers, Headers]:
    """Return the policy's tensors, and the draft model's without their prefix."""
    policy = {name: header for name, header in headers.items() if not name.startswith(PREFIX)}
    draft = {n.removeprefix(PREFIX): header for n, header in headers.items() if n not in policy}
    return policy, draft


def _list_loaded(headers: Headers) -> Headers:
    """Return the tensors that vLLM loads, each under one name."""
    return {
        name.replace(*_ONLY_LAYER): header
        for name, header in headers.items()
        if not name.endswith(_NOT_LOADED)
    }


class Draft:
    """The draft model of one worker, and a version of it that is being staged."""

    def __init__(self, worker: Any, new: Headers, allow_cast: bool = False) -> None:
        """Raise if this worker could not serve the version."""
        runner = worker.model_runner
        # vLLM's second model runner, the default where Triton works, has another name for it.
        drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        live = getattr(drafter, "model", None)
        if not isinstance(live, torch.nn.Module):
            raise RuntimeError(
                "the version has weights of a draft model, but this worker has none; start it with "
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
                "the draft model is quantised or drafts in parallel, so it has more state than its "
                "weights; restart the worker with the new draft model"
            )
        self._refuse_differences(worker, new, allow_cast)

    def start(self, *, in_place: bool) -> None:
        """Create the second draft model. Call this on the serving thread, because vLLM sets
        process-wide state meanwhile."""
        if not in_place:
            self._fresh = self._create_model()
        elif any(parameter.numel() == 0 for parameter in self._own(self._live).values()):
            raise RuntimeError(
                "a draft model on CPU can only be swapped; start the worker with enforce-eager and "
                "without adapters, and leave memory for the weights twice"
            )

    def keep_draft(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's tensors; keep the draft model's, which are small."""
        for name, tensor in tensors:
            if name.startswith(PREFIX):
                self._tensors[name.removeprefix(PREFIX)] = tensor.clone()
            else:
                yield name, tensor

    def load(self, ranks: int) -> None:
        """Load the second draft model with vLLM's loader, verify it, and prepare it."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for parameter in self._own(self._fresh).values():
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)  # `_check` finds parameters that were not loaded
        self._fresh.load_weights(iter(self._tensors.items()))
        self._check(self._fresh, ranks)
        process_weights_after_loading(self._fresh, self._config, torch.device("cpu"))
        self._fresh.eval()
        self._pairs = pair_modules(self._fresh, self._live, self._shared)

    def exchange(self) -> None:
        """Use the new draft model from now on; the worker must be paused."""
        for live, fresh in self._pairs:
            exchange(live, fresh)
        self.discard()

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
        self.discard()

    def discard(self) -> None:
        """Release what was staged."""
        self._fresh, self._pairs, self._tensors = None, [], {}

    def _refuse_differences(self, worker: Any, new: Headers, allow_cast: bool) -> None:
        """Raise unless names, shapes and dtypes are those of the draft model's own checkpoint,
        without the modules that it shares with the policy."""
        shared = {
            name.rpartition(".")[2]
            for name, module in self._live.named_modules()
            if id(module) in self._shared
        }
        duplicates = [
            name for name in new if name.split(".")[-2:-1] and name.split(".")[-2] in shared
        ]
        if duplicates:
            raise RuntimeError(
                f"the draft model shares {duplicates[0]} with the policy; publish without it, or "
                "start the worker with a draft checkpoint that has one of its own"
            )
        path = Path(self._config.model)
        if not path.is_dir() or path == Path(worker.model_config.model):
            raise RuntimeError(
                "the draft model has no checkpoint directory to compare with; start the worker "
                "with one in its speculative-config"
            )
        served = {
            name: header
            for name, header in read_headers(path).items()
            if f".{name}".split(".")[-2] not in shared
        }
        served = Proof(self._live).read_served(_list_loaded(served), self._config.dtype)
        problems = differences(_list_loaded(new), served, allow_cast=allow_cast)
        refuse_differences(problems, "The draft model")

    def _create_model(self) -> Any:
        from vllm.compilation.backends import set_model_tag
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self._drafter._create_draft_vllm_config())
        # Layers register themselves here by name; the serving models' entries must stay.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        tag, dtype = set_model_tag("eagle_head"), set_default_torch_dtype(self._config.dtype)
        with tag, dtype, torch.device("cpu"):
            return initialize_model(vllm_config=config, model_config=self._config)

    def _own(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that do not belong to the policy."""
        live_modules = dict(self._live.named_modules())
        return {
            f"{name}.{key}": parameter
            for name, module in model.named_modules()
            if id(live_modules.get(name)) not in self._shared
            for key, parameter in module.named_parameters(recurse=False)
        }

    def _check(self, model: torch.nn.Module, ranks: int) -> None:
        """Raise unless the model holds the published tensors. vLLM's loader renames, fuses and
        reorders tensors, but that does not change a sum over their bits, and neither do the
        zeros of padding."""
        own = self._own(model)
        floats = [parameter for parameter in own.values() if parameter.is_floating_point()]
        if any(bool(parameter.isnan().any()) for parameter in floats):
            raise RuntimeError("vLLM's loader left a part of the draft model empty")
        if ranks > 1:
            return  # some parameters are divided among ranks, others are whole on each
        dtype = floats[0].dtype
        published = sum(
            fingerprint(tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in self._tensors.items()
            if not name.endswith(_NOT_LOADED)
        )
        held = sum(fingerprint(parameter) for parameter in own.values())
        if (published - held) % (1 << 64):
            raise RuntimeError("the draft model does not hold the published tensors")
