"""`rollway nemo-rl check`: recipes are resolved as NeMo-RL does, and each problem is named; and
`rollway nemo-rl run`."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rollway.cli import main
from rollway.errors import UsageError
from rollway.integrations.nemo_rl import plug
from rollway.integrations.nemo_rl.check import find_problems, read_recipe

GOOD: dict[str, Any] = {
    "policy": {
        "model_name": "Qwen/Qwen3-0.6B",
        "generation": {
            "backend": "dynamo",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "val_temperature": 1.0,
            "val_top_p": 1.0,
            "val_top_k": None,
            "vllm_cfg": {"tensor_parallel_size": 1, "expose_http_server": True},
            "dynamo_cfg": {"frontend_url": "http://10.0.0.5:8000"},
            "colocated": {"enabled": False, "resources": {"gpus_per_node": None}},
        },
    },
    "grpo": {"async_grpo": {"enabled": True, "in_flight_weight_updates": False}},
    "loss_fn": {"use_importance_sampling_correction": True},
    "cluster": {"gpus_per_node": 8, "num_nodes": 1, "weight_sync": {"method": "nixl"}},
    "env": {"should_use_nemo_gym": True},
}
GENERATION = "policy.generation"
DYNAMO = f"{GENERATION}.dynamo_cfg"


def change(**values: Any) -> dict[str, Any]:
    """Return the good recipe with other values, by their paths with `__` between the keys."""
    recipe = copy.deepcopy(GOOD)
    for path, value in values.items():
        *parents, last = path.split("__")
        part = recipe
        for key in parents:
            part = part[key]
        part[last] = value
    return recipe


def at(**values: Any) -> dict[str, Any]:
    """Return the good recipe with another `dynamo_cfg`."""
    return change(policy__generation__dynamo_cfg=values)


def test_a_good_recipe_has_no_problem() -> None:
    assert find_problems(GOOD) == []
    assert find_problems(at(stack={"models": [{"replicas": 2}]})) == []
    assert find_problems(at(dgd_name="rl", namespace="team")) == []


@pytest.mark.parametrize(
    ("recipe", "key", "words"),
    [
        (change(policy__generation__backend="vllm"), f"{GENERATION}.backend", "Set it to dynamo"),
        (at(), DYNAMO, "Nothing says where the stack is. Give one of"),
        (at(stack={}, dgd_name="rl"), DYNAMO, "given together. Keep one"),
        (at(dgd_name=""), DYNAMO, "`dgd_name` is empty"),
        (at(frontend_url="http://a:1", nothing=1), f"{DYNAMO}.nothing", "no such key"),
        (at(stack={"modles": []}), f"{DYNAMO}.stack", "no field"),
        (at(stack={"models": [{"path": "/nowhere"}]}), f"{DYNAMO}.stack", "no directory"),
        (
            at(stack={"models": [{"name": "Qwen/Qwen3-0.6b"}]}),
            f"{DYNAMO}.stack.models.0.name",
            "equal to the byte",
        ),
        (
            change(policy__generation__colocated={"enabled": True}),
            GENERATION,
            "set it to false",
        ),
        (change(cluster__weight_sync={"method": "pigeon"}), "cluster.weight_sync.method", "pigeon"),
        (change(cluster__weight_sync={"method": "shm"}), "cluster.weight_sync.method", "10.0.0.5"),
        (
            change(cluster__weight_sync={"method": "nccl", "shards": True}),
            "cluster.weight_sync",
            "whole tensors",
        ),
        (
            change(cluster__weight_sync={"method": "files"}),
            "cluster.weight_sync.directory",
            "all engines see",
        ),
        (
            change(
                policy__generation__dynamo_cfg={
                    "frontend_url": "http://a:1",
                    "weight_sync": {"method": "files", "directory": "/x"},
                }
            ),
            "cluster.weight_sync",
            "Keep one",
        ),
        (change(cluster__segment_size=4), "cluster.segment_size", "null"),
        (
            change(policy__generation__colocated={"resources": {"gpus_per_node": 8}}),
            f"{GENERATION}.colocated.resources.gpus_per_node",
            "leaves 0",
        ),
        (
            change(
                grpo__async_grpo={"enabled": True, "in_flight_weight_updates": True},
                policy__generation__dynamo_cfg={"dgd_name": "rl", "refit_mode": "pause-all"},
            ),
            "grpo.async_grpo.in_flight_weight_updates",
            "waits for running rollouts",
        ),
        (
            change(grpo__async_grpo={"enabled": False, "in_flight_weight_updates": True}),
            "grpo.async_grpo.in_flight_weight_updates",
            "no rollouts in flight",
        ),
        (
            change(
                grpo__async_grpo={"enabled": False},
                policy__generation__vllm_cfg={
                    "expose_http_server": True,
                    "kv_cache_dtype": "fp8_e4m3",
                },
            ),
            f"{GENERATION}.vllm_cfg.kv_cache_dtype",
            "DTensor workers cannot",
        ),
        (
            change(
                policy__draft={"enabled": True},
                policy__generation__dynamo_cfg={"stack": {"python": "/bin/python"}},
            ),
            "policy.draft.enabled",
            "speculative_config",
        ),
        (
            change(policy__router_replay={"enabled": True}),
            "policy.router_replay.enabled",
            "vLLM generation alone",
        ),
        (
            change(loss_fn={"use_importance_sampling_correction": False}),
            "loss_fn.use_importance_sampling_correction",
            "Set it to true",
        ),
        (
            change(policy__generation__vllm_cfg={}),
            f"{GENERATION}.vllm_cfg.expose_http_server",
            "none is served",
        ),
        (
            change(env={}, policy__generation__val_temperature=0.0),
            f"{GENERATION}.val_temperature",
            "NeMo-Gym only",
        ),
        (change(policy__generation__val_top_k=5), f"{GENERATION}.val_top_k", "not at all"),
    ],
)
def test_each_problem_is_named(recipe: dict[str, Any], key: str, words: str) -> None:
    (problem,) = find_problems(recipe)
    assert problem.what == key and words in f"{problem.cause} {problem.fix}"
    assert problem.cause.endswith(".") and problem.fix.endswith(".")


def test_scales_and_draft_models_that_arrive_are_no_problem() -> None:
    cache = {"expose_http_server": True, "kv_cache_dtype": "fp8"}
    recipe = change(
        grpo__async_grpo={"enabled": False},
        policy__megatron_cfg={"enabled": True},
        policy__draft={"enabled": True},
        policy__generation__vllm_cfg=cache,
        policy__generation__vllm_kwargs={"speculative_config": {"method": "eagle3"}},
        policy__generation__dynamo_cfg={"stack": {"python": "/bin/python"}},
    )
    assert find_problems(recipe) == []


MEGATRON = {"enabled": True, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("engine", "shards", "megatron", "words"),
    [
        (1, False, None, ""),
        (2, False, None, "rank 0 publishes everything"),
        (1, True, None, "divide every tensor"),
        (2, True, MEGATRON, ""),
        (1, True, MEGATRON, "its sizes are 2 (tensor) and 1 (pipeline)"),
        (2, True, MEGATRON | {"pipeline_model_parallel_size": 2}, "2 (pipeline)"),
    ],
)
def test_like_ranks_must_be_able_to_read_from_each_other(
    engine: int, shards: bool, megatron: Any, words: str
) -> None:
    sync = {"method": "mx", "shards": shards, "mx_config": {"enabled": True}}
    values = {"policy__megatron_cfg": megatron} if megatron else {}
    recipe = change(cluster__weight_sync=sync, **values)
    recipe["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"] = engine
    problems = find_problems(recipe)
    assert [problem.what for problem in problems] == (
        ["cluster.weight_sync.mx_config.same_rank_only"] if words else []
    )
    assert all(words in problem.cause for problem in problems)
    sync["mx_config"] = {"enabled": True, "same_rank_only": False}
    assert find_problems(recipe) == []


def test_heads_must_divide_over_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    recipe = at(stack={})
    recipe["policy"]["model_name"] = str(tmp_path)
    recipe["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"] = 4
    (problem,) = find_problems(recipe)
    assert "q_proj" in problem.cause and problem.what.endswith("tensor_parallel_size")


# --- resolution ----------------------------------------------------------------------------------


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    return directory / "child.yaml"


def test_recipes_inherit_and_are_overridden(tmp_path: Path) -> None:
    child = write(
        tmp_path,
        parent="a: {x: 1, y: 2}\nb: {z: 1}\nlist: [1, 2]",
        other="a: {x: 5}",
        child="defaults: [parent.yaml, other.yaml]\na: {y: 3}\nb: {_override_: true, w: 1}\n"
        "list: [3]",
    )
    assert read_recipe(child).values == {"a": {"x": 5, "y": 3}, "b": {"w": 1}, "list": [3]}
    # NeMo-RL replaces mappings of the top only.
    deep = write(tmp_path, child="defaults: parent.yaml\nc: {d: {_override_: true}}")
    assert read_recipe(deep).values["c"] == {"d": {"_override_": True}}
    child = write(
        tmp_path, child="defaults: [parent.yaml, other.yaml]\na: {y: 3}\nb: {w: 1}\nlist: [3]"
    )
    overrides = ["a.x=7", "+c.d=[1]", "~a.y", "a.x=null"]
    values = read_recipe(child, overrides).values
    assert values["a"] == {"x": None} and values["c"] == {"d": [1]}


@pytest.mark.parametrize(
    ("files", "overrides", "words"),
    [
        ({"child": "defaults: child.yaml"}, [], "inherits from itself"),
        ({"child": "defaults: nobody.yaml"}, [], "cannot be read"),
        ({"child": "[1]"}, [], "not a mapping"),
        ({"child": "a: 1"}, ["b=1"], r"Write \+b"),
        ({"child": "a: 1"}, ["a.b=1"], "has no fields"),
        ({"child": "a: 1"}, ["a"], "not an override"),
    ],
)
def test_a_recipe_that_cannot_be_resolved_is_refused(
    tmp_path: Path, files: dict[str, str], overrides: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        read_recipe(write(tmp_path, **files), overrides)


def test_interpolations_are_resolved_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this environment or in one with omegaconf; tests/nemo_rl has NeMo-RL's own."""
    part = {"x": 2, "y": "${mul:${a.x},3}", "z": "${oc.env:NOBODY_SETS_THIS}"}
    file = write(tmp_path, child=json.dumps({**GOOD, "a": part}))
    recipe = read_recipe(file)
    names = ["a.y", "a.z"] if importlib.util.find_spec("omegaconf") is None else ["a.z"]
    assert [problem.what for problem in recipe.unresolved] == names
    assert recipe.values["a"] == {"x": 2} | ({} if "a.y" in names else {"y": 6})
    assert main(["nemo-rl", "check", str(file)]) == 1
    output = capsys.readouterr().out
    assert "no problem" not in output and output.count("cannot be resolved") == len(names)


# --- commands ------------------------------------------------------------------------------------


def test_check_prints_each_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(GOOD))
    assert main(["nemo-rl", "check", str(file)]) == 0
    assert capsys.readouterr().out == "no problem found\n"
    assert main(["nemo-rl", "check", "--json", str(file), "cluster.weight_sync.method=shm"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == "cluster.weight_sync.method"


def test_run_runs_a_script_as_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its arguments, its directory on the path, its exit code, and the plug before it."""
    installed: list[bool] = []
    monkeypatch.setattr(plug, "install", lambda: installed.append(True))
    monkeypatch.setattr("sys.argv", ["rollway"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "beside.py").write_text("VALUE = 3")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nassert __name__ == '__main__'\nprint(sys.argv[1:])\n"
        "sys.exit(beside.VALUE)"
    )
    with pytest.raises(SystemExit) as raised:
        main(["nemo-rl", "run", str(script), "--config", "a.yaml", "--json", "+a=1"])
    assert raised.value.code == 3 and installed == [True]
    assert capsys.readouterr().out == "['--config', 'a.yaml', '--json', '+a=1']\n"
    assert main(["nemo-rl", "run", str(tmp_path / "nothing.py")]) == 2
