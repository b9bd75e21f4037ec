"""The ranks of a replica: sizes from fields and raw arguments, placed workers, runtime envs."""

from __future__ import annotations

from typing import Any

import pytest

from rollway.errors import SpecError
from rollway.model_spec import merge_runtime_envs
from rollway.spec import StackSpec, load_spec


def make(model: dict[str, Any] | None = None, **fields: Any) -> StackSpec:
    return load_spec({"models": [{"path": "org/m", **(model or {})}], **fields})


@pytest.mark.parametrize(
    "name", ["tensor-parallel-size", "tensor_parallel_size", "tensor-parallel", "tp", "-tp"]
)
def test_a_size_in_raw_arguments_counts_as_the_field(name: str) -> None:
    model = make({"args": {name: "4", "max-model-len": 128}}).models[0]
    assert (model.tensor_parallel, model.ranks) == (4, 4)
    assert model.args == {"max-model-len": 128}, "the plan must not pass it twice"


def test_all_sizes_multiply() -> None:
    fields = {"tensor_parallel": 2, "args": {"pp": 3, "data-parallel-size": 5, "pcp": 2}}
    model = make(fields).models[0]
    assert model.ranks == 2 * 3 * 5 * 2
    assert make({"args": {"tp": 2}, "tensor_parallel": 2}).models[0].ranks == 2
    assert make({"args": {"tp": None}}).models[0].ranks == 1


def test_a_spec_with_sizes_survives_json_and_overrides() -> None:
    spec = make({"args": {"tp": 4}}, launcher="ray", ray={"labels": {"zone": "a"}})
    assert StackSpec.model_validate_json(spec.model_dump_json()) == spec
    assert load_spec(spec, ["models.0.replicas=2"]).models[0].tensor_parallel == 4


def test_raw_arguments_of_other_engines_are_their_own() -> None:
    model = make({"engine": "mocker", "args": {"data-parallel-size": 2}}).models[0]
    assert (model.ranks, model.args) == (1, {"data-parallel-size": 2})


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        (
            {"models": [{"path": "org/m", "tensor_parallel": 2, "args": {"tp": 4}}]},
            "`tensor_parallel` is 2, but `args.tp` is 4; keep one",
        ),
        (
            {"models": [{"path": "org/m", "args": {"tp": 4, "tensor-parallel-size": 2}}]},
            "`tensor_parallel` is 4, but `args.tensor-parallel-size` is 2",
        ),
        ({"models": [{"path": "org/m", "args": {"tp": 0}}]}, "a whole number of 1 or more"),
        ({"models": [{"path": "org/m", "args": {"pcp": "x"}}]}, "a whole number of 1 or more"),
        ({"ray": {"gpus": 2}}, "`ray.gpus`"),
        ({"ray": {"namespace": ""}}, "`ray.namespace`"),
        ({"ray": {"adress": "x"}}, "Did you mean `address`"),
        ({"runtime_env": {"pip": ["a"], "uv": ["b"]}}, "under both `pip` and `uv`"),
        (
            {
                "models": [{"path": "org/m", "runtime_env": {"pip": ["a"]}}],
                "runtime_env": {"uv": ["b"]},
            },
            "the runtime_env of `m` over the stack's: it has packages under both",
        ),
        ({"runtime_env": {"env_vars": ["A"]}}, "`env_vars` must be a mapping"),
        ({"launcher": "ray", "placed": []}, "fills in `join` and `placed` itself"),
        ({"placed": [{"model": "x", "replica": 0}]}, "`x`, which is not served"),
        ({"placed": [{"model": "m", "replica": 0}] * 2}, "replica 0 of `m` twice"),
        ({"placed": [{"model": "m", "replica": 0, "node_rank": 1}]}, "`nodes` is 1"),
        ({"placed": [{"model": "m", "replica": 0, "nodes": 2}]}, "needs `master`"),
        (
            {"placed": [{"model": "m", "replica": 0, "role": "decode"}]},
            "a worker of `m` in the role `decode`; the roles of this model are not apart",
        ),
    ],
)
def test_a_contradiction_is_refused(fields: dict[str, Any], phrase: str) -> None:
    with pytest.raises(SpecError) as failure:
        load_spec({"models": [{"path": "org/m"}], **fields})
    assert phrase in str(failure.value)


@pytest.mark.parametrize(
    ("args", "router", "phrases"),
    [
        (
            {"enable-prefix-caching": False},
            {"args": {"router-kv-events": True}},
            ["`router.args.router-kv-events` is true", "workers of `m` give no KV events",
             "`args.enable-prefix-caching` is false"],
        ),
        (
            {"kv_events_config": '{"enable_kv_cache_events": false}'},
            {"args": {"router-kv-events": True}},
            ["workers of `m`", "does not set `enable_kv_cache_events`"],
        ),
        (
            {},
            {"mode": "random", "args": {"router-kv-events": True}},
            ["`router.mode` is `random`, which uses no events"],
        ),
        ({"enable-prefix-caching": False}, {"args": {"router-kv-events": False}}, []),
        ({"enable-prefix-caching": False}, {}, []),
        ({}, {"args": {"router-kv-events": True}}, []),
    ],
)  # fmt: skip
def test_a_router_that_wants_events_and_a_model_that_gives_none_are_refused(
    args: dict[str, Any], router: dict[str, Any], phrases: list[str]
) -> None:
    data = {"models": [{"path": "org/ok"}, {"path": "org/m", "args": args}], "router": router}
    if not phrases:
        load_spec(data)
        return
    with pytest.raises(SpecError) as failure:
        load_spec(data)
    for phrase in phrases:
        assert phrase in str(failure.value)


def test_a_model_runtime_env_is_merged_over_the_stacks() -> None:
    stack = {
        "env_vars": {"A": "1", "B": "1"},
        "working_dir": "/s",
        "pip": ["x"],
        "config": {"a": 1},
    }
    model = {"env_vars": {"B": "2"}, "working_dir": "/m", "pip": ["y"]}
    assert merge_runtime_envs(stack, model) == {
        "env_vars": {"A": "1", "B": "2"},
        "working_dir": "/m",
        "pip": ["x", "y"],
        "config": {"a": 1},
    }
    assert merge_runtime_envs(stack, {}) == stack
    assert merge_runtime_envs({}, model) == model
    options = {"packages": ["x"], "uv_pip_install_options": ["--a"], "uv_version": "1"}
    assert merge_runtime_envs({"uv": options}, {"uv": ["y"]})["uv"] == {
        **options,
        "packages": ["x", "y"],
    }
    assert merge_runtime_envs({"pip": ["x"]}, {"pip": "requirements.txt"}) == {
        "pip": "requirements.txt"
    }
