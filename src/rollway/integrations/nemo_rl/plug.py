"""Plugs Rollway into NeMo-RL without a fork: `install()` rebinds names that its trainer looks up.

    nemo_rl.algorithms.grpo              becomes, for `backend: dynamo`
      DynamoConfig                       the keys of config.py
      DynamoGeneration                   Generation
      create_weight_synchronizer         Synchronizer
      setup                              the same, with a recipe that recipe.py has adapted
      print_performance_metrics          the same, counting the GPUs that train

All other backends are left alone. Where NeMo-RL has a registry of generation backends, that is
used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rollway.errors import UsageError
from rollway.integrations.nemo_rl.config import GenerationConfig, parse_generation
from rollway.integrations.nemo_rl.recipe import (
    BACKEND,
    adapt_recipe,
    count_trainer_only,
    is_ours,
    publishes_shards,
)

TESTED = "7ea279abf (2026-08-22)"
"""The commits of NeMo-RL that this was run with."""
_GRPO = "nemo_rl.algorithms.grpo"
_REGISTRY = "register_generation_backend"
_REPLACED = ("DynamoConfig", "DynamoGeneration")
"""What a registry of backends makes needless."""


@dataclass(frozen=True, slots=True)
class Callee:
    """What a rebound name must accept."""

    passed: tuple[str, ...]
    """The parameters that NeMo-RL passes, or that Rollway reads."""
    accepted: tuple[str, ...] | None = None
    """All parameters that Rollway's replacement knows; None where it passes on what comes."""


EXPECTED = {
    "DynamoConfig": Callee(()),
    "DynamoGeneration": Callee(
        ("cluster", "config", "tokenizer", "tokenizer_config"),
        ("cluster", "config", "tokenizer", "tokenizer_config"),
    ),
    "create_weight_synchronizer": Callee(
        ("policy", "generation", "generation_backend", "colocated"),
        (
            *("policy", "generation", "generation_backend", "colocated"),
            *("train_cluster", "inference_cluster", "refit_buffer_size_gb", "refit_timeout_s"),
        ),
    ),
    "setup": Callee(("master_config", "tokenizer", "dataset", "val_dataset")),
    "print_performance_metrics": Callee(("timing_metrics", "master_config")),
}


@dataclass(slots=True)
class _Plug:
    """What is rebound, to undo it."""

    bindings: list[tuple[ModuleType, str, Any]] = field(default_factory=list)

    def bind(self, module: ModuleType, name: str, value: Any) -> None:
        self.bindings.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def undo(self) -> None:
        for module, name, value in reversed(self.bindings):
            setattr(module, name, value)
        self.bindings.clear()


_plug = _Plug()


def install(module: ModuleType | None = None) -> None:
    """Rebind the names of NeMo-RL's trainer; a second call does nothing.

    Raises:
        UsageError: NeMo-RL is not installed, or is not one that Rollway knows.
    """
    if _plug.bindings:
        return
    grpo = module or _import_trainer()
    register = _find_registry(grpo)
    _check_names(grpo, without=_REPLACED if register else ())
    share_package()
    if register is not None:
        register(BACKEND, _open_generation, GenerationConfig)
    else:
        _plug.bind(grpo, "DynamoConfig", _Config)
        _plug.bind(grpo, "DynamoGeneration", _open_generation)
    synchronizers = _wrap_synchronizers(grpo.create_weight_synchronizer)
    _plug.bind(grpo, "create_weight_synchronizer", synchronizers)
    for name, wrap in (("setup", _wrap_setup), ("print_performance_metrics", _wrap_metrics)):
        original = getattr(grpo, name)
        for holder in _list_holders(grpo, name, original):
            _plug.bind(holder, name, wrap(original))


def uninstall() -> None:
    """Bind the names to what they were. A registration in NeMo-RL's registry stays."""
    _plug.undo()


def register_worker_class(name: str, like: str) -> None:
    """Let Ray run policy workers of the class `name` in the environment of the class `like`.

    Both are full names, as in `Policy(worker_extension_cls_fqn=…)`."""
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    environments = registry.ACTOR_ENVIRONMENT_REGISTRY
    if like not in environments:
        raise UsageError(
            f"NeMo-RL has no environment for workers of the class {like}.",
            f"Name one of: {', '.join(sorted(environments))}.",
        )
    environments[name] = environments[like]


# --- checks --------------------------------------------------------------------------------------


def _import_trainer() -> ModuleType:
    try:
        return importlib.import_module(_GRPO)
    except ImportError as error:
        raise UsageError(
            f"NeMo-RL's trainer cannot be imported here: {error}.",
            "Run this in NeMo-RL's own environment (`uv run` in its checkout), with Rollway "
            "installed there, see docs/nemo-rl.md.",
        ) from error


def _check_names(grpo: ModuleType, without: tuple[str, ...] = ()) -> None:
    """Raise for a NeMo-RL that calls other functions, or calls them otherwise."""
    differences = []
    for name, callee in EXPECTED.items():
        if name in without:
            continue
        target = getattr(grpo, name, None)
        if target is None:
            differences.append(f"{grpo.__name__} has no {name}")
            continue
        if name == "DynamoConfig":
            if not hasattr(target, "model_validate"):
                differences.append("DynamoConfig has no model_validate")
            continue
        parameters = inspect.signature(target).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            continue
        missing = [each for each in callee.passed if each not in parameters]
        unknown = [each for each in parameters if callee.accepted and each not in callee.accepted]
        differences += [f"{name} has no parameter {each}" for each in missing]
        differences += [f"{name} has the parameter {each}, which is new" for each in unknown]
    if differences:
        raise UsageError(
            f"This NeMo-RL is not one that Rollway knows: {'; '.join(differences)}.",
            f"Use NeMo-RL at {TESTED}, with which Rollway was tested, or a Rollway that knows "
            "yours.",
        )


def _find_registry(grpo: ModuleType) -> Callable[..., Any] | None:
    """Return NeMo-RL's function that registers generation backends, if it has one."""
    modules = [grpo]
    if grpo.__name__ == _GRPO:
        modules.append(importlib.import_module("nemo_rl.models.generation"))
    return next((f for m in modules if (f := getattr(m, _REGISTRY, None)) is not None), None)


def _list_holders(grpo: ModuleType, name: str, original: Any) -> list[ModuleType]:
    """Return the modules that have imported a function by its name: the trainer's, the script that
    runs, and others of NeMo-RL."""
    loaded = [
        module
        for key, module in list(sys.modules.items())
        if (key == "__main__" or key.startswith("nemo_rl.")) and module is not grpo
    ]
    return [grpo, *(m for m in loaded if getattr(m, "__dict__", {}).get(name) is original)]


# --- Ray's other processes -----------------------------------------------------------------------


def share_package() -> None:
    """Let Ray's actors import this Rollway, in whichever environment NeMo-RL runs them.

    NeMo-RL passes its environment variables on to every actor. A directory that has this package
    and nothing else goes on PYTHONPATH: site-packages would bring packages of another Python."""
    import rollway
    from rollway.private_files import make_directory
    from rollway.stack.state import make_home

    package = Path(rollway.__file__).resolve().parent
    name = hashlib.sha256(os.fsencode(package)).hexdigest()[:12]
    directory = make_directory(make_home() / "nemo-rl" / name)
    with contextlib.suppress(FileExistsError):  # of a run before
        (directory / "rollway").symlink_to(package, target_is_directory=True)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(directory) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), *paths]))


def _let_rollouts_run() -> None:
    """Have NeMo-RL's collector start refits without waiting for running rollouts.

    For this backend it waits whatever the recipe says, because its own way of loading weights
    cannot run beside requests. The class is pickled by value into its actor."""
    import ray

    module = importlib.import_module("nemo_rl.algorithms.async_utils")
    base: Any = module.AsyncTrajectoryCollector.__ray_metadata__.modified_class

    class AsyncTrajectoryCollector(base):  # type: ignore[misc]
        def prepare_for_refit(self) -> None:
            self._rollway_refits = True
            try:
                super().prepare_for_refit()
            finally:
                self._rollway_refits = False

        def wait_for_pending_generations(self) -> None:
            if not getattr(self, "_rollway_refits", False):
                super().wait_for_pending_generations()

    _plug.bind(module, "AsyncTrajectoryCollector", ray.remote(AsyncTrajectoryCollector))


# --- replacements --------------------------------------------------------------------------------


class _Config:
    """Stands for NeMo-RL's DynamoConfig."""

    @staticmethod
    def model_validate(config: Mapping[str, Any]) -> GenerationConfig:
        return parse_generation(config)


def _open_generation(
    cluster: Any, config: Mapping[str, Any], tokenizer: Any = None, tokenizer_config: Any = None
) -> Any:
    from rollway.integrations.nemo_rl.generation import Generation

    return Generation(cluster, config, tokenizer, tokenizer_config)


def _wrap_synchronizers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_weight_synchronizer(
        policy: Any,
        generation: Any,
        generation_backend: str,
        colocated: bool,
        *rest: Any,
        refit_timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        if generation_backend != BACKEND:
            if refit_timeout_s is not None:
                options["refit_timeout_s"] = refit_timeout_s
            return original(policy, generation, generation_backend, colocated, *rest, **options)
        from rollway.integrations.nemo_rl.synchronizer import Synchronizer

        sync = parse_generation(generation.cfg).dynamo_cfg.weight_sync
        if refit_timeout_s is None:
            return Synchronizer(policy, generation, sync)
        return Synchronizer(policy, generation, sync, refit_timeout_s=refit_timeout_s)

    return create_weight_synchronizer


def _wrap_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        recipe = bound.arguments["master_config"]
        if not is_ours(recipe):
            return original(*args, **kwargs)
        with adapt_recipe(recipe, _let_rollouts_run):
            if bound.arguments.get("policy_factory") is None and publishes_shards(recipe):
                from rollway.integrations.nemo_rl.workers import extend_policy

                create = original.__globals__["Policy"]  # what it would take itself
                bound.arguments["policy_factory"] = extend_policy(create, recipe.policy)
            return original(*bound.args, **bound.kwargs)

    return setup


def _wrap_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def print_performance_metrics(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        if is_ours(bound.arguments["master_config"]):
            bound.arguments["master_config"] = count_trainer_only(bound.arguments["master_config"])
        return original(*bound.args, **bound.kwargs)

    return print_performance_metrics
