"""Changes a recipe of NeMo-RL so that its `setup` accepts a backend with a stack of its own.

`setup` places generation on GPUs of the trainer's cluster, and refuses a recipe that gives it none.
So while it runs, the cluster has one GPU (or node) more, which nobody ever reserves. `setup` also
refuses for `backend: dynamo` what NeMo-RL's own Dynamo cannot do and Rollway can: those fields are
hidden from its checks.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollway.errors import UsageError
from rollway.integrations.nemo_rl.config import NO_REPLAY, WHERE, parse_generation

BACKEND = "dynamo"


def is_ours(recipe: Any) -> bool:
    """Return whether a recipe generates with this backend."""
    return (recipe.policy.get("generation") or {}).get("backend") == BACKEND


def publishes_shards(recipe: Any) -> bool:
    """Return whether the trainer's ranks publish their shards, each its own."""
    return parse_generation(recipe.policy["generation"]).dynamo_cfg.weight_sync.shards


@contextlib.contextmanager
def adapt_recipe(recipe: Any, let_rollouts_run: Callable[[], None]) -> Iterator[None]:
    """Change a recipe for NeMo-RL's `setup`, and undo it when that returns or raises.

    `let_rollouts_run` is called for a recipe whose refits do not wait for running rollouts."""
    cluster, generation = recipe.cluster, recipe.policy["generation"]
    if (recipe.policy.get("router_replay") or {}).get("enabled"):
        cause, fix = NO_REPLAY
        raise UsageError(f"policy.router_replay.enabled is true. {cause}", fix)
    share_weight_sync(cluster, generation)
    with contextlib.ExitStack() as undo:
        _allow_in_flight(recipe, let_rollouts_run, undo)
        _protect_gym(recipe)
        _hide_validation_sampling(recipe, undo)
        _add_phantom(recipe, undo)
        yield


def share_weight_sync(cluster: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Copy `cluster.weight_sync` to where `Generation` reads it."""
    sync, dynamo = cluster.get("weight_sync"), generation.get("dynamo_cfg")
    if sync is None or not isinstance(dynamo, dict):
        return
    if dynamo.get("weight_sync") not in (None, sync):
        raise UsageError(
            f"cluster.weight_sync and {WHERE}.weight_sync differ.", "Keep one of them."
        )
    dynamo["weight_sync"] = sync


def _allow_in_flight(
    recipe: Any, let_rollouts_run: Callable[[], None], undo: contextlib.ExitStack
) -> None:
    """Map NeMo-RL's in-flight updates to Rollway's; its own check refuses them for Dynamo."""
    settings = recipe.grpo.async_grpo
    if not settings.in_flight_weight_updates:
        return
    dynamo = recipe.policy["generation"]["dynamo_cfg"]
    if dynamo.get("refit_mode", "in-flight") != "in-flight":
        raise UsageError(
            "grpo.async_grpo.in_flight_weight_updates is true, and "
            f"{WHERE}.refit_mode is {dynamo['refit_mode']}, which waits for running rollouts.",
            "Set refit_mode to in-flight, or remove it.",
        )
    dynamo["refit_mode"] = "in-flight"
    let_rollouts_run()
    settings.in_flight_weight_updates = False
    undo.callback(setattr, settings, "in_flight_weight_updates", True)


def _protect_gym(recipe: Any) -> None:
    """Let a rollout of NeMo-Gym in which nothing was generated end as zero reward."""
    if not recipe.env.get("should_use_nemo_gym"):
        return
    from rollway.integrations.nemo_rl.gym_results import protect_rollouts

    with contextlib.suppress(ImportError):  # NeMo-RL itself says that Gym is missing
        protect_rollouts(importlib.import_module("nemo_rl.environments.nemo_gym").NemoGym)


def _hide_validation_sampling(recipe: Any, undo: contextlib.ExitStack) -> None:
    """Sample validations of NeMo-Gym by their own values; NeMo-RL's check allows them for vLLM."""
    if not recipe.env.get("should_use_nemo_gym"):
        return
    generation = recipe.policy["generation"]
    for name in ("temperature", "top_p"):
        value = generation.get(f"val_{name}")
        if value is not None and value != generation.get(name):
            generation[f"val_{name}"] = generation[name]
            # `setup` replaces the dictionary, so it is looked up again.
            undo.callback(_set_generation, recipe, f"val_{name}", value)


def _set_generation(recipe: Any, name: str, value: Any) -> None:
    recipe.policy["generation"][name] = value


def _add_phantom(recipe: Any, undo: contextlib.ExitStack) -> None:
    """Give generation a GPU, or a node, that the cluster does not have and nobody reserves.

    A recipe that names resources for generation keeps them: they are left to the stack."""
    cluster, generation = recipe.cluster, recipe.policy["generation"]
    colocated = generation.setdefault("colocated", {"enabled": False})
    given = dict(colocated.get("resources") or {})
    if given.get("gpus_per_node") or given.get("num_nodes"):
        return
    if cluster.get("segment_size") is not None:
        raise UsageError(
            "cluster.segment_size is set; NeMo-RL then counts nodes for generation that this "
            "backend does not use.",
            "Set it to null.",
        )
    if cluster["num_nodes"] == 1:
        key, resources = "gpus_per_node", {"gpus_per_node": 1, "num_nodes": 1}
    else:
        key = "num_nodes"
        resources = {"gpus_per_node": cluster["gpus_per_node"], "num_nodes": 1}
    real = cluster[key]
    cluster[key] = real + 1
    colocated["resources"] = resources

    def remove() -> None:
        cluster[key] = real
        recipe.policy["generation"]["colocated"]["resources"] = given

    undo.callback(remove)


def count_trainer_only(recipe: Any) -> Any:
    """Return a copy of a recipe for NeMo-RL's figures per GPU: all GPUs in it train.

    Where generation has GPUs, they divide by the number of those, which is not the cluster's."""
    generation, cluster = recipe.policy["generation"], dict(recipe.cluster)
    resources = generation["colocated"].get("resources") or {}
    if cluster["num_nodes"] == 1:
        cluster["gpus_per_node"] -= resources.get("gpus_per_node") or 0
    else:
        cluster["num_nodes"] -= resources.get("num_nodes") or 0
    shared = {**generation, "colocated": {**generation["colocated"], "enabled": True}}
    policy = {**recipe.policy, "generation": shared}
    return recipe.model_copy(update={"policy": policy, "cluster": cluster})
