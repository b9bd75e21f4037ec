"""Refit a draft model (EAGLE and similar) together with the policy, as one version.

A publisher adds the draft model's tensors to the policy's, with the prefix `draft.` before their
names in the draft checkpoint. They are staged with the policy, and vLLM reloads the draft model in
the same pause, so the two never have different versions. Modules that both share, usually
embeddings and head, are the policy's.

A version without such tensors leaves the draft model as it is: its guesses get worse, but samples
do not change, because the policy judges every guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollway.engine.fingerprint import Proof, fingerprint, list_non_finite
from rollway.engine.layers import watch_loading
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
        self._live: Any = live
        self._config: Any = drafter.speculative_config.draft_model_config
        self._vllm_config = worker.vllm_config
        policy = worker.model_runner.get_model()
        self._shared = frozenset(id(module) for module in policy.modules())
        self._tensors: dict[str, torch.Tensor] = {}
        if self._config.quantization is not None or getattr(drafter, "parallel_drafting", False):
            raise RuntimeError(
                "the draft model is quantised or drafts in parallel, so it has more state than its "
                "weights; restart the worker with the new draft model"
            )
        self._refuse_differences(worker, new, allow_cast)

    def keep_draft(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's tensors; keep the draft model's, which are small."""
        for name, tensor in tensors:
            if name.startswith(PREFIX):
                self._tensors[name.removeprefix(PREFIX)] = tensor.clone()
            else:
                yield name, tensor

    def list_non_finite(self) -> list[str]:
        """Return the staged tensors that have NaN or infinity in the draft model's dtype."""
        dtype, tensors = self._config.dtype, self._tensors.items()
        served = {PREFIX + n: t.to(dtype) for n, t in tensors if t.is_floating_point()}
        return list_non_finite(served)

    def load_in_place(self, ranks: int) -> None:
        """Have vLLM reload the draft model; the worker must be paused."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        loaded: dict[str, torch.Tensor] = {}
        """The parameters of layers that are packed for CPU afterwards."""

        def keep_loaded(name: str, layer: torch.nn.Module) -> None:
            parameters = layer.named_parameters(recurse=False)
            loaded.update((f"{name}.{key}", parameter) for key, parameter in parameters)

        # The kernels of experts, which are built again on CPU, read the config.
        with set_current_vllm_config(self._vllm_config), watch_loading(self._live, keep_loaded):
            initialize_layerwise_reload(self._live)
            self._live.load_weights(iter(self._tensors.items()))
            self._refuse_unloaded()
            finalize_layerwise_reload(self._live, self._config)  # type: ignore[no-untyped-call]
        self._check({**self._list_own(), **loaded}, ranks)
        self.discard()

    def discard(self) -> None:
        """Release what was staged."""
        self._tensors = {}

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

    def _list_own(self) -> dict[str, torch.Tensor]:
        """Return the parameters that do not belong to the policy."""
        return {
            f"{name}.{key}": parameter
            for name, module in self._live.named_modules()
            if id(module) not in self._shared
            for key, parameter in module.named_parameters(recurse=False)
        }

    def _refuse_unloaded(self) -> None:
        """Raise if vLLM's loader gave a parameter nothing; it would keep its old weights. vLLM
        lists what it has kept for a layer until that is complete."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        loaded, others = set[int](), dict[int, str]()
        for name, module in self._live.named_modules():
            if id(module) in self._shared:
                continue
            info = get_layerwise_info(module)
            incomplete = info.kernel_tensors if info.can_load() else None
            arrived = {key for key, _ in info.loaded_weights}
            for key, parameter in module.named_parameters(recurse=False):
                # Of layers that are tied, one is loaded: compare what they serve.
                served = parameter if incomplete is None else incomplete[0].get(key, parameter)
                if incomplete is None or key in arrived:
                    loaded.add(id(served))
                elif parameter.is_floating_point():  # not a table of tokens, which may be missing
                    others[id(served)] = f"{name}.{key}"
        empty = [name for number, name in others.items() if number not in loaded]
        if empty:
            raise RuntimeError(f"vLLM loaded nothing into {empty[0]} of the draft model")

    def _check(self, own: Mapping[str, torch.Tensor], ranks: int) -> None:
        """Raise unless the parameters are the published tensors. vLLM's loader renames, fuses and
        reorders tensors, but that does not change a sum over their bits, and neither do the
        zeros of padding."""
        if ranks > 1:
            return  # some parameters are divided among ranks, others are whole on each
        published = sum(
            self._fingerprint(tensor)
            for name, tensor in self._tensors.items()
            if not name.endswith(_NOT_LOADED)
        )
        held = sum(map(self._fingerprint, own.values()))
        if (published - held) % (1 << 64):
            raise RuntimeError("the draft model does not hold the published tensors")

    def _fingerprint(self, tensor: torch.Tensor) -> int:
        """Return the fingerprint of a tensor in the dtype of the draft model, which vLLM keeps of
        weights, but not of every bias on CPU."""
        return fingerprint(tensor.to(self._config.dtype) if tensor.is_floating_point() else tensor)
