"""The plug against a module with the names of NeMo-RL's trainer, and against one that differs.

The module stands in for `nemo_rl.algorithms.grpo`; `tests/nemo_rl/test_setup.py` has the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

import rollway
from rollway.errors import SpecError, UsageError
from rollway.integrations.nemo_rl import plug, workers
from rollway.integrations.nemo_rl.config import GenerationConfig, WeightSync
from rollway.weights.layout import Role


class AsyncGrpo(BaseModel, extra="allow"):
    enabled: bool = True
    in_flight_weight_updates: bool = False


class Grpo(BaseModel, extra="allow"):
    async_grpo: AsyncGrpo = AsyncGrpo()


class Recipe(BaseModel, extra="allow"):
    """NeMo-RL's MasterConfig, as far as the plug reads it."""

    policy: dict[str, Any]
    cluster: dict[str, Any]
    grpo: Grpo = Grpo()
    env: dict[str, Any] = {}


def make_recipe(
    *, gpus: int = 8, nodes: int = 1, resources: Any = None, backend: str = "dynamo", **cluster: Any
) -> Recipe:
    generation = {
        "backend": backend,
        "temperature": 1.0,
        "top_p": 1.0,
        "val_temperature": 0.0,
        "val_top_p": 1.0,
        "colocated": {"enabled": False, "resources": resources},
        "dynamo_cfg": {"frontend_url": "http://10.0.0.5:8000"},
    }
    where = {"gpus_per_node": gpus, "num_nodes": nodes, **cluster}
    return Recipe.model_validate({"policy": {"generation": generation}, "cluster": where})


class Trainer(ModuleType):
    """A module with the names that NeMo-RL's trainer has, which records what they are given."""

    def __init__(self) -> None:
        super().__init__("trainer_stand_in")
        self.seen: list[Any] = []

        class DynamoConfig:
            model_validate = None

        class DynamoGeneration:
            def __init__(self, cluster, config, tokenizer=None, tokenizer_config=None):  # type: ignore[no-untyped-def]
                raise AssertionError

        def create_weight_synchronizer(  # type: ignore[no-untyped-def]
            policy, generation, generation_backend, colocated, train_cluster=None,
            inference_cluster=None, refit_buffer_size_gb=None,
        ):  # fmt: skip
            return "upstream's own", generation_backend, refit_buffer_size_gb

        def setup(  # type: ignore[no-untyped-def]
            master_config, tokenizer, dataset, val_dataset, processor=None, policy_factory=None
        ):
            # As upstream does: the validated config replaces the recipe's.
            if master_config.policy["generation"]["backend"] == "dynamo":
                config = self.DynamoConfig.model_validate(master_config.policy["generation"])
                master_config.policy["generation"] = config.model_dump()
            self.seen.append(master_config.model_copy(deep=True))
            if tokenizer == "broken":
                raise RuntimeError("no GPU")
            return "thirteen things"

        def print_performance_metrics(  # type: ignore[no-untyped-def]
            train_results, metrics, timing_metrics, master_config, *, num_prompts_per_step
        ):
            self.seen.append(master_config)
            return {
                "gpus": master_config.cluster["num_nodes"] * master_config.cluster["gpus_per_node"]
            }

        names = (DynamoConfig, DynamoGeneration, create_weight_synchronizer, setup)
        for each in (*names, print_performance_metrics):
            setattr(self, each.__name__, each)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield Trainer()
    plug.uninstall()


def test_names_are_rebound_and_bound_back(trainer: Any) -> None:
    before = {name: getattr(trainer, name) for name in plug.EXPECTED}
    plug.install(trainer)
    plug.install(trainer)
    assert all(getattr(trainer, name) is not before[name] for name in plug.EXPECTED)
    config = trainer.DynamoConfig.model_validate(make_recipe().policy["generation"])
    assert isinstance(config, GenerationConfig) and config.engine_world_size == 1
    with pytest.raises(SpecError, match="nothing says"):
        trainer.DynamoConfig.model_validate({"backend": "dynamo", "dynamo_cfg": {}})
    plug.uninstall()
    assert {name: getattr(trainer, name) for name in plug.EXPECTED} == before


def _remove_generation(trainer: Any) -> None:
    del trainer.DynamoGeneration


def _rename_parameter(trainer: Any) -> None:
    trainer.setup = lambda config, tokenizer, dataset, val_dataset: None


def _add_parameter(trainer: Any) -> None:
    trainer.DynamoGeneration = lambda cluster, config, tokenizer, tokenizer_config, mesh: None


def _change_config(trainer: Any) -> None:
    trainer.DynamoConfig = object


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_remove_generation, "trainer_stand_in has no DynamoGeneration"),
        (_rename_parameter, "setup has no parameter master_config"),
        (_add_parameter, "DynamoGeneration has the parameter mesh, which is new"),
        (_change_config, "DynamoConfig has no model_validate"),
    ],
)
def test_a_nemo_rl_that_differs_is_refused(
    trainer: Any, change: Callable[[Any], None], words: str
) -> None:
    change(trainer)
    names = dict(vars(trainer))
    with pytest.raises(UsageError) as raised:
        plug.install(trainer)
    assert words in raised.value.message and plug.TESTED in raised.value.hint
    assert vars(trainer) == names  # nothing is rebound


def test_a_registry_of_backends_is_used(trainer: Any) -> None:
    del trainer.DynamoConfig, trainer.DynamoGeneration
    trainer.register_generation_backend = lambda *entry: trainer.seen.append(entry)
    plug.install(trainer)
    ((name, factory, config_type),) = trainer.seen
    assert (name, config_type) == ("dynamo", GenerationConfig) and callable(factory)


def test_nemo_rl_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot be imported here: No module named 'nemo_rl'"):
        plug.install()


# --- setup ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "cluster", "resources"),
    [
        (make_recipe(gpus=8), (9, 1), {"gpus_per_node": 1, "num_nodes": 1}),
        (make_recipe(gpus=8, nodes=4), (8, 5), {"gpus_per_node": 8, "num_nodes": 1}),
        # GPUs that the recipe leaves for generation are left to the stack.
        (
            make_recipe(gpus=8, resources={"gpus_per_node": 2, "num_nodes": 1}),
            (8, 1),
            {"gpus_per_node": 2, "num_nodes": 1},
        ),
    ],
)
def test_the_phantom_gpu_is_there_only_during_setup(
    trainer: Any, recipe: Recipe, cluster: tuple[int, int], resources: dict[str, int]
) -> None:
    plug.install(trainer)
    given = recipe.model_copy(deep=True)
    for tokenizer in ("whole", "broken"):
        if tokenizer == "broken":
            with pytest.raises(RuntimeError, match="no GPU"):
                trainer.setup(recipe, tokenizer, None, None)
        else:
            assert trainer.setup(recipe, tokenizer, None, None) == "thirteen things"
        seen = trainer.seen.pop()
        assert (seen.cluster["gpus_per_node"], seen.cluster["num_nodes"]) == cluster
        assert seen.policy["generation"]["colocated"]["resources"] == resources
        assert recipe.cluster == given.cluster
        left = recipe.policy["generation"]["colocated"]["resources"]
        assert (left or None) == given.policy["generation"]["colocated"]["resources"]


def test_other_backends_are_left_alone(trainer: Any) -> None:
    plug.install(trainer)
    recipe = make_recipe(backend="vllm")
    trainer.setup(master_config=recipe, tokenizer=None, dataset=None, val_dataset=None)
    assert trainer.seen.pop() == recipe
    answer = trainer.create_weight_synchronizer(None, None, "vllm", True, refit_buffer_size_gb=2)
    assert answer == ("upstream's own", "vllm", 2)


def test_segments_of_nodes_are_refused(trainer: Any) -> None:
    plug.install(trainer)
    recipe = make_recipe(segment_size=4)
    with pytest.raises(UsageError, match="segment_size"):
        trainer.setup(recipe, None, None, None)
    assert recipe.cluster["gpus_per_node"] == 8 and not trainer.seen


def test_router_replay_is_refused_before_anything_starts(trainer: Any) -> None:
    plug.install(trainer)
    recipe = make_recipe()
    recipe.policy["router_replay"] = {"enabled": True}
    with pytest.raises(UsageError, match=r"router_replay\.enabled.* vLLM generation alone"):
        trainer.setup(recipe, None, None, None)
    assert not trainer.seen


def test_weight_sync_reaches_generation(trainer: Any) -> None:
    plug.install(trainer)
    recipe = make_recipe(weight_sync={"method": "files"})
    trainer.setup(recipe, None, None, None)
    dynamo = trainer.seen.pop().policy["generation"]["dynamo_cfg"]
    assert dynamo["weight_sync"]["method"] == "files"
    recipe.policy["generation"]["dynamo_cfg"]["weight_sync"] = {"method": "nixl"}
    with pytest.raises(UsageError, match="differ"):
        trainer.setup(recipe, None, None, None)


def test_in_flight_updates_become_a_mode_of_refits(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL's own check refuses them for this backend."""
    collectors: list[bool] = []
    monkeypatch.setattr(plug, "_let_rollouts_run", lambda: collectors.append(True))
    plug.install(trainer)
    recipe = make_recipe()
    recipe.grpo.async_grpo.in_flight_weight_updates = True
    trainer.setup(recipe, None, None, None)
    seen = trainer.seen.pop()
    assert seen.grpo.async_grpo.in_flight_weight_updates is False and collectors == [True]
    assert seen.policy["generation"]["dynamo_cfg"]["refit_mode"] == "in-flight"
    assert recipe.grpo.async_grpo.in_flight_weight_updates is True
    recipe.policy["generation"]["dynamo_cfg"]["refit_mode"] = "pause-all"
    with pytest.raises(UsageError, match="waits for running rollouts"):
        trainer.setup(recipe, None, None, None)
    assert recipe.grpo.async_grpo.in_flight_weight_updates is True


@pytest.mark.parametrize(("gym", "during"), [(True, 1.0), (False, 0.0)])
def test_validation_of_nemo_gym_samples_by_its_own_values(
    trainer: Any, gym: bool, during: float
) -> None:
    """NeMo-RL's check, which allows that for vLLM only, sees equal values."""
    plug.install(trainer)
    recipe = make_recipe()
    recipe.env["should_use_nemo_gym"] = gym
    trainer.setup(recipe, None, None, None)
    assert trainer.seen.pop().policy["generation"]["val_temperature"] == during
    assert recipe.policy["generation"]["val_temperature"] == 0.0


def test_the_refit_is_ours(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Any] = []
    module = ModuleType("rollway.integrations.nemo_rl.synchronizer")
    module.Synchronizer = lambda *args, **kwargs: created.append((args, kwargs))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plug.install(trainer)
    cfg = make_recipe().policy["generation"]
    cfg["dynamo_cfg"]["weight_sync"] = {"method": "files"}
    generation = SimpleNamespace(cfg=cfg)
    for options in ({}, {"refit_timeout_s": 5.0}):
        trainer.create_weight_synchronizer(
            policy="policy",
            generation=generation,
            generation_backend="dynamo",
            colocated=False,
            train_cluster=None,
            inference_cluster=None,
            **options,
        )
        ((policy, used, sync), passed) = created.pop()
        assert (policy, used, sync.method, passed) == ("policy", generation, "files", options)


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [
        (make_recipe(gpus=8), 8),
        (make_recipe(gpus=8, nodes=4), 32),
        (make_recipe(gpus=8, resources={"gpus_per_node": 2, "num_nodes": 1}), 6),
        (make_recipe(gpus=8, nodes=4, resources={"gpus_per_node": 8, "num_nodes": 1}), 24),
    ],
)
def test_figures_count_the_gpus_that_train(trainer: Any, recipe: Recipe, gpus: int) -> None:
    plug.install(trainer)
    given = recipe.model_copy(deep=True)
    figures = trainer.print_performance_metrics({}, {}, {}, recipe, num_prompts_per_step=1)
    assert figures == {"gpus": gpus}
    # With generation on the same GPUs, nothing is divided by the number of its own.
    assert trainer.seen.pop().policy["generation"]["colocated"]["enabled"] is True
    assert recipe == given


# --- other processes -----------------------------------------------------------------------------


def test_actors_can_import_rollway_and_nothing_else_of_ours(trainer: Any) -> None:
    plug.install(trainer)
    first, *_ = os.environ["PYTHONPATH"].split(os.pathsep)
    assert [path.name for path in Path(first).iterdir()] == ["rollway"]
    code = "import rollway; print(rollway.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": first}, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).resolve() == Path(rollway.__file__).resolve()
    plug.share_package()
    assert os.environ["PYTHONPATH"].split(os.pathsep).count(first) == 1


def test_worker_classes_run_in_the_environment_of_their_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("nemo_rl.distributed.ray_actor_environment_registry")
    module.ACTOR_ENVIRONMENT_REGISTRY = {"nemo_rl.Worker": "uv run"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    plug.register_worker_class("mine.Worker", like="nemo_rl.Worker")
    assert module.ACTOR_ENVIRONMENT_REGISTRY["mine.Worker"] == "uv run"
    with pytest.raises(UsageError, match=r"no environment for workers of the class nemo_rl\.Other"):
        plug.register_worker_class("mine.Worker", like="nemo_rl.Other")


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ({"dtensor_cfg": {"enabled": True}}, "DTensorPolicyWorker"),
        ({"dtensor_cfg": {"enabled": True, "_v2": True}}, "DTensorPolicyWorkerV2"),
        ({"megatron_cfg": {"enabled": True}, "dtensor_cfg": None}, "MegatronPolicyWorker"),
    ],
)
def test_workers_that_publish_shards_are_chosen_by_the_recipe(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], name: str
) -> None:
    module = ModuleType("nemo_rl.distributed.ray_actor_environment_registry")
    theirs = {f"{module_name}.{key}": key for key, module_name in workers.MODULES.items()}
    module.ACTOR_ENVIRONMENT_REGISTRY = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for package in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(globals(), "Policy", lambda **options: options)
    factories: list[Any] = []

    def setup(master_config, tokenizer, dataset, val_dataset, policy_factory=None):  # type: ignore[no-untyped-def]
        factories.append(policy_factory)

    trainer.setup = setup
    plug.install(trainer)
    gathered, sharded = make_recipe(), make_recipe(weight_sync={"method": "shm", "shards": True})
    sharded.policy |= policy
    trainer.setup(gathered, None, None, None)
    trainer.setup(sharded, None, None, None)
    trainer.setup(sharded, None, None, None, policy_factory=len)
    own = f"rollway.integrations.nemo_rl.workers.{name}"
    assert [factories[0], factories[2]] == [None, len]  # the caller's own is left alone
    assert factories[1](cluster=1) == {"cluster": 1, "worker_extension_cls_fqn": own}
    assert module.ACTOR_ENVIRONMENT_REGISTRY[own] == name
    with pytest.raises(AttributeError, match="has no Other"):
        _ = workers.Other


def test_roles_of_a_recipe_are_patterns_of_names() -> None:
    sync = WeightSync(mx_config={"megatron_role_overrides": {"adapter.": "row", "*.x": "column"}})
    roles = sync.mx_config.megatron_role_overrides
    assert workers.make_overrides(roles) == {"*adapter.*": Role.ROW, "*.x": Role.COLUMN}
    with pytest.raises(ValueError, match="qkv_column"):
        WeightSync(mx_config={"megatron_role_overrides": {"adapter.": "diagonal"}})
