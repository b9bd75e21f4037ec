"""NeMo-RL's policy workers, with publishing of what each rank holds.

    cluster.weight_sync.shards: true
      └─► Policy(worker_extension_cls_fqn="….workers.DTensorPolicyWorkerV2")
            └─► Ray's actor, in the environment of NeMo-RL's own class: imports this module

A class is made when it is asked for: an environment of NeMo-RL has the packages of one of them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rollway.integrations.nemo_rl.plug import register_worker_class
from rollway.integrations.nemo_rl.publish import DRAFT, ShardPublishing
from rollway.weights.layout import Role
from rollway.weights.transports.base import Source

_WORKERS = "nemo_rl.models.policy.workers"
MODULES = {
    "DTensorPolicyWorker": f"{_WORKERS}.dtensor_policy_worker",
    "DTensorPolicyWorkerV2": f"{_WORKERS}.dtensor_policy_worker_v2",
    "MegatronPolicyWorker": f"{_WORKERS}.megatron_policy_worker",
}
"""NeMo-RL's worker classes, and where they are."""


class MegatronShardPublishing(ShardPublishing):
    """Publishes the shards of a Megatron-Core model, and of a draft model that is trained with it;
    for workers that have `cfg`, too."""

    cfg: Mapping[str, Any]
    draft_model: Any = None
    """An EAGLE head, on the ranks of the last pipeline stage."""

    def list_shards(self) -> Source:
        from transformers import AutoConfig

        from rollway.weights.megatron.names import NameMap
        from rollway.weights.megatron.tensors import from_megatron

        config = AutoConfig.from_pretrained(self.cfg["model_name"]).to_dict()
        names = NameMap.from_hf_config(config)
        roles = make_overrides(self.rollway_roles)
        # NeMo-RL attaches the draft model to the policy, so that one optimizer has both.
        held = from_megatron(
            self.model, names, roles=roles, skipped="draft_model", experts=self.rollway_experts
        )
        return [*held, *self._list_draft()]

    def _list_draft(self) -> list[Any]:
        """Return the draft model's tensors as NeMo-RL exports them, gathered over the ranks of its
        stage; the first of these publishes them."""
        if self.draft_model is None:
            return []
        from rollway.weights.megatron.tensors import current_position
        from rollway.weights.sources import hold_whole

        exported = importlib.import_module("nemo_rl.models.megatron.draft")
        position = current_position()
        is_first = position.tp == 0 and position.dp == 0
        drafts: dict[str, Any] = self.__dict__.setdefault("_rollway_draft", {})
        held = []
        for name, tensor in exported.export_eagle_weights_to_hf(self.draft_model):
            # Kept in one place: receivers may read it until the version is complete, and again at
            # the same address in the next.
            kept = drafts.setdefault(name, tensor.detach().clone())
            kept.copy_(tensor)
            held.append(hold_whole(f"{DRAFT}{name}", kept, owned_here=is_first))
        return held


def make_overrides(roles: Mapping[str, str]) -> dict[str, Role]:
    """Return `megatron_role_overrides` as patterns of names; upstream has parts of names."""
    return {
        pattern if set(pattern) & set("*?[") else f"*{pattern}*": Role(role)
        for pattern, role in roles.items()
    }


def choose_class(policy: Mapping[str, Any]) -> str:
    """Return the name of the class that NeMo-RL's `Policy` takes for a recipe's policy."""
    if (policy.get("megatron_cfg") or {}).get("enabled"):
        return "MegatronPolicyWorker"
    is_second = (policy.get("dtensor_cfg") or {}).get("_v2")
    return "DTensorPolicyWorkerV2" if is_second else "DTensorPolicyWorker"


def extend_policy(create: Callable[..., Any], policy: Mapping[str, Any]) -> Callable[..., Any]:
    """Return NeMo-RL's `Policy` with workers that publish their shards."""
    name = choose_class(policy)
    full_name = f"{__name__}.{name}"
    register_worker_class(full_name, like=f"{MODULES[name]}.{name}")
    return functools.partial(create, worker_extension_cls_fqn=full_name)


def make_class(name: str) -> type:
    """Return a worker class of NeMo-RL's with the publishing of shards; not an actor class yet."""
    # Actor classes cannot be bases; NeMo-RL keeps what they are made of for that.
    base: type = getattr(importlib.import_module(MODULES[name]), f"{name}Impl")
    mixin = MegatronShardPublishing if name.startswith("Megatron") else ShardPublishing
    return type(name, (mixin, base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Return one of the worker classes, as an actor class of Ray."""
    if name not in MODULES:
        raise AttributeError(f"{__name__} has no {name}")
    import ray

    utils = importlib.import_module("nemo_rl.models.policy.utils")
    settings = utils.get_runtime_env_for_policy_worker(MODULES[name].rpartition(".")[2])
    globals()[name] = ray.remote(runtime_env=settings)(make_class(name))
    return globals()[name]
