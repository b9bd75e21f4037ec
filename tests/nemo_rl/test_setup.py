"""NeMo-RL's own trainer, from a checkout, with Rollway plugged in: `setup`, the refit's call, its
batches, its figures; and its interfaces and recipes against ours."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.integrations.nemo_rl.generation import Generation
from tests.children import find_processes_in
from tests.light.spec import light
from tests.nemo_rl.environment import RECIPE, ROOT, find_python, find_source, run_script
from tests.waiting import wait_until

OURS = {"weight_versions"}
EXAMPLES = ROOT / "examples" / "nemo_rl"
NO_RECIPES = ("base", "deployments")


@pytest.fixture(scope="module")
def seen(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What NeMo-RL's process saw of a run on light workers, which this interpreter runs."""
    spec = light(base_model, "nemo-setup", LIGHT_STEP_SECONDS="0.005")
    spec |= {"python": sys.executable}
    question = {"config": str(find_source() / RECIPE), "stack": spec, "in_flight": True}
    home = tmp_path_factory.mktemp("home")
    seen = run_script("drive_setup.py", question, home)
    wait_until(lambda: not find_processes_in(home))
    return seen


@pytest.mark.stack
def test_setup_trains_on_all_gpus_and_generates_on_the_stack(seen: Any) -> None:
    assert seen["training_gpus"] == 4 and seen["clusters"] == [4, 1]
    assert not seen["reserved"]  # the phantom GPU
    assert seen["cluster_after"] == {"gpus_per_node": 4, "num_nodes": 1}
    assert seen["resources_after"] == {"gpus_per_node": None, "num_nodes": None}


@pytest.mark.stack
def test_a_refit_of_nemo_rl_is_the_synchronizers(seen: Any) -> None:
    assert seen["sync_method"] == "files" and seen["communicator"]
    assert seen["synced"] == [None] and seen["figures"] == {"refit/seconds": 1.0}


@pytest.mark.stack
def test_in_flight_updates_do_not_wait_for_rollouts(seen: Any) -> None:
    """NeMo-RL's collector waits for them with this backend, whatever the recipe says."""
    assert seen["in_flight_after"] and seen["refit_mode"] == "in-flight"
    assert seen["collector"] == {"is_waiting": False, "is_paused": True, "is_done": True}


@pytest.mark.stack
def test_batches_are_nemo_rls(seen: Any) -> None:
    batch = seen["batch"]
    assert batch["class"] == "BatchedDataDict" and batch["is_right_padded"], batch["reason"]
    assert [row[:3] for row in batch["ids"]] == [[1, 2, 3], [4, 5, 6]]
    assert batch["versions"] == [[0, 0], [0, 0]]
    for index, length in enumerate((3, 4)):
        single = seen["singles"][str(index)]
        end = length + batch["lengths"][index]
        assert single["ids"][0][:end] == batch["ids"][index][:end]
        assert single["is_right_padded"], single["reason"]


@pytest.mark.stack
def test_a_pickled_copy_generates_and_has_no_refit(seen: Any) -> None:
    assert seen["copy"] == seen["batch"] and seen["copys_synchronizer"] is None


@pytest.mark.stack
def test_figures_of_nemo_rl_count_the_gpus_that_train(seen: Any) -> None:
    """1000 tokens in 10 s on 4 GPUs; the generation's share is divided by no zero."""
    metrics = seen["metrics"]
    assert metrics["tokens_per_sec_per_gpu"] == pytest.approx(25.0)
    assert metrics["policy_training_tokens_per_sec_per_gpu"] == pytest.approx(50.0)
    assert metrics["generation_tokens_per_sec_per_gpu"] > 0


# --- interfaces and recipes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source, home = find_source(), tmp_path_factory.mktemp("interfaces")
    examples = [str(file) for file in EXAMPLES.glob("*.yaml") if file.stem not in NO_RECIPES]
    question = {"configs": str(source / "examples" / "configs"), "examples": examples}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_RL_DIR", str(source))
        return run_script("drive_interfaces.py", question, home)


def check_methods(ours: type, theirs: dict[str, Any]) -> None:
    """Assert that every call of the interface is one of ours."""
    for name, parameters in theirs.items():
        mine = list(inspect.signature(getattr(ours, name)).parameters.values())[1:]
        if any(each.kind is each.VAR_KEYWORD for each in mine):
            continue
        names = {each.name: each for each in mine}
        for each, kind, has_default in parameters:
            assert each in names, f"{name} has no {each}"
            assert names[each].kind.name == kind, f"{name}.{each}"
            if has_default:
                assert names[each].default is not inspect.Parameter.empty, f"{name}.{each}"
        given = {each for each, *_ in parameters}
        required = {n for n, p in names.items() if p.default is p.empty}
        assert required <= given, f"{name} wants {required - given}"


def test_the_real_generation_interface_is_ours(upstream: Any) -> None:
    assert len(upstream["generation"]) >= 17
    check_methods(Generation, upstream["generation"])
    assert {"output_ids", "logprobs", "truncated", "routed_experts"} <= set(upstream["output"])
    assert not OURS & set(upstream["output"])


def test_the_real_synchronizer_interface_is_ours(upstream: Any) -> None:
    try:
        module = importlib.import_module("rollway.integrations.nemo_rl.synchronizer")
    except ImportError:
        pytest.skip("there is no synchronizer")
    assert "sync_weights" in upstream["synchronizer"]
    check_methods(module.Synchronizer, upstream["synchronizer"])


def test_recipes_are_resolved_as_nemo_rl_resolves_them(upstream: Any) -> None:
    """Those of its examples whose variables are set here."""
    assert upstream["loaders"]["different"] == []
    assert len(upstream["loaders"]["equal"]) > 50


def test_check_resolves_a_recipe_in_nemo_rls_environment(tmp_path: Path) -> None:
    """Its omegaconf has two ways to register a function, one of which gets numbers as text."""
    recipe = tmp_path / "recipe.yaml"
    values = {
        "policy": {
            "model_name": "m",
            "generation": {
                "backend": "${backend}",
                "vllm_cfg": {"tensor_parallel_size": "${mul:2,${max:1,2}}", "precision": "bf16"},
                "dynamo_cfg": {"frontend_url": "http://127.0.0.1:8000"},
            },
        },
        "backend": "dynamo",
    }

    def check(*overrides: str) -> str:
        command = [find_python().with_name("rollway"), "nemo-rl", "check", recipe, *overrides]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert not done.stderr, done.stderr
        return done.stdout

    recipe.write_text(yaml.safe_dump(values))
    assert check() == "no problem found\n"
    missing = check("policy.generation.vllm_cfg.precision=${oc.env:NOBODY_SETS_THIS}")
    assert missing.startswith("policy.generation.vllm_cfg.precision: `${oc.env:NOBODY_SETS_THIS}`")
    assert "cannot be resolved" in missing and "no problem" not in missing


def test_our_recipes_inherit_from_nemo_rls_own(upstream: Any) -> None:
    deployments = yaml.safe_load((EXAMPLES / "deployments.yaml").read_text())
    assert len(upstream["examples"]) == 12
    for recipe, (deployment, model, problems) in upstream["examples"].items():
        assert problems == [], recipe
        if deployment is not None:
            assert deployments[deployment]["model"]["name"] == model, recipe
