"""The keys of a recipe: what each becomes, and what is refused, with cause and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollway.api import make_spec
from rollway.errors import RollwayError, SpecError, UsageError
from rollway.fleet.workers import HealthListing, RlListing
from rollway.integrations.nemo_rl.config import (
    MxConfig,
    WeightSync,
    find_deployment_url,
    find_namespace,
    make_stack_fields,
    parse_generation,
    returns_experts,
)
from rollway.integrations.nemo_rl.connection import choose_listing

URL = "http://10.0.0.5:8000"


def make(dynamo: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"backend": "dynamo", "dynamo_cfg": dynamo or {"frontend_url": URL}, **fields}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (make({"engine": "vllm"}), "nothing says where the stack is; give one of `stack`"),
        (make({"stack": {}, "frontend_url": URL}), "`stack` and `frontend_url` are given together"),
        (make({"frontend_url": URL, "dgd_name": "rl"}), "`frontend_url` and `dgd_name`"),
        (make({"frontend_url": ""}), "`frontend_url` is empty"),
        (make({"dgd_name": ""}), "`dgd_name` is empty"),
        (make({"frontend_url": "10.0.0.5:8000"}), "write http://HOST:PORT"),
        (make({"frontend_url": URL, "workers": 2}), "`workers` is the size of a `stack`"),
        (make({"frontend_url": URL, "frontend": 1}), "there is no such field. Did you mean"),
        (make({"frontend_url": URL, "engine": "sglang"}), "dynamo_cfg.engine"),
        (make({"frontend_url": URL, "request_timeout_s": 0}), "greater than 0"),
        (make({"frontend_url": URL, "refit_mode": "rolling"}), "dynamo_cfg.refit_mode"),
        (make({"frontend_url": URL, "weight_sync": {"method": "carrier"}}), "weight_sync.method"),
        (
            make({"frontend_url": URL, "weight_sync": {"method": "nccl", "shards": True}}),
            "nccl sends whole tensors",
        ),
        (make(sglang_cfg={"a": 1}), "`sglang_cfg` is of another engine"),
        (make(trtllm_cfg={"a": 1}), "`trtllm_cfg` is of another engine"),
        (make(colocated={"enabled": True}), "so set it to false"),
        (make(colocated="no"), "`colocated` is no mapping"),
        (
            make(vllm_cfg={"tensor_parallel_size": "two"}),
            "`vllm_cfg.tensor_parallel_size` is 'two'",
        ),
        (make(vllm_cfg={"pipeline_parallel_size": -1}), "give a whole number of ranks"),
        (make(refit_transport="nixl"), "by cluster.weight_sync.method"),
        (make(stop_strings=["x"] * 33), "more than 32"),
        (make(vllm_cfg={"tensor_parallel_size": 2, "expert_parallel_size": 4}), "1 or to tensor"),
        ({**make(), "backend": "vllm"}, "backend"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_reason(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_generation(recipe)
    assert words in raised.value.message
    assert raised.value.message.startswith("policy.generation: ")
    assert "the stack`:" not in raised.value.message


def test_other_keys_of_a_recipe_stay_as_they_are() -> None:
    """NeMo-RL reads the dumped config, and validates it again."""
    recipe = make(max_new_tokens=5, top_k=None, colocated={"enabled": False, "resources": {}})
    dumped = parse_generation(recipe).model_dump()
    assert dumped["max_new_tokens"] == 5 and dumped["top_k"] is None
    assert dumped["colocated"] == {"enabled": False, "resources": {}}
    assert parse_generation(dumped).model_dump() == dumped


def test_an_engines_world_is_tensor_by_pipeline() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert parse_generation(make(vllm_cfg=sizes)).engine_world_size == 6
    assert parse_generation(make()).engine_world_size == 1


def test_mx_is_nixl_with_upstreams_defaults() -> None:
    sync = WeightSync.model_validate({"method": "mx", "mx_config": {"enabled": True}})
    assert sync.method == "nixl" and sync.mx_config.enabled
    assert MxConfig().model_dump() == {
        "enabled": False,
        "mx_server_url": "modelexpress-server:8001",
        "timeout_seconds": 300.0,
        "same_rank_only": True,
        "tree_scale_out": True,
        "moe_expert_filter": True,
        "nic_pin": "auto",
        "retain_latest_k": 2,
        "register_self_buffers": True,
        "megatron_role_overrides": {},
    }


# --- a stack that Rollway starts -----------------------------------------------------------------


def test_engine_options_of_a_recipe_are_the_stacks() -> None:
    recipe = make(
        {"stack": {}, "workers": 3, "worker_args": {"tool_call_parser": "hermes"}},
        model_name="Qwen/Qwen3-0.6B",
        vllm_cfg={
            "tensor_parallel_size": 2,
            "expert_parallel_size": 2,
            "precision": "bf16",
            "gpu_memory_utilization": 0.6,
            "load_format": "dummy",
            "enable_return_routed_experts": True,
            "env_vars": {"A": "1"},
            "async_engine": True,
        },
        vllm_kwargs={"max_num_seqs": 16, "hf_overrides": {}},
    )
    fields = make_stack_fields(parse_generation(recipe))
    (model,) = fields["models"]
    assert (model["path"], model["name"]) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert (model["replicas"], model["tensor_parallel"]) == (3, 2)
    assert model["args"] == {
        "gpu-memory-utilization": 0.6,
        "dtype": "bfloat16",
        "enable-expert-parallel": True,
        "enable-return-routed-experts": True,
        "max-num-seqs": 16,
        "dyn-tool-call-parser": "hermes",
    }
    assert fields["router"] == {"mode": "kv"} and fields["env"] == {"A": "1"}
    make_spec(fields)
    assert returns_experts(recipe) and returns_experts(
        {"vllm_kwargs": {"enable_return_routed_experts": True}}
    )
    assert not returns_experts({"vllm_cfg": {}})


def test_options_of_the_managed_mode_reach_workers_and_frontend() -> None:
    worker_args = {
        "reasoning_parser": "qwen3",
        "exclude_tools_when_tool_choice_none": False,
        "enable_structural_tag": True,
        "structural_tag_schema": "strict",
        "endpoint_types": ["completions"],
        "extra_cli_args": ["--max-num-seqs", "16", "--block_size=32", "--no-async-scheduling"],
    }
    frontend_args = {
        "tokenizer": "fastokens",
        "tokenizer_cache_bytes": 1000,
        "router_mode": "least-loaded",
        "extra_cli_args": ["--trust-remote-code"],
    }
    stack = {"frontend": {"port": 8123, "args": {"tokenizer": "default"}}}
    dynamo = {"stack": stack, "worker_args": worker_args, "frontend_args": frontend_args}
    fields = make_stack_fields(parse_generation(make(dynamo, model_name="Qwen/Qwen3-0.6B")))
    assert fields["models"][0]["args"] == {
        "dyn-reasoning-parser": "qwen3",
        "exclude-tools-when-tool-choice-none": False,
        "dyn-structural-tag": {"scope": "auto", "schema": "strict"},
        "endpoint-types": "completions",
        "max-num-seqs": "16",
        "block-size": "32",
        "no-async-scheduling": True,
    }
    assert fields["router"] == {"mode": "least-loaded"}
    assert fields["frontend"] == {
        "port": 8123,
        "args": {"tokenizer": "default", "trust-remote-code": True},  # the stack's own counts
        "env": {"DYN_TOKENIZER_CACHE_BYTES": "1000"},
    }
    make_spec(fields)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["16"], "'16', which belongs to no option"),
        (["--a=1", "2"], "'2', which belongs to no option"),
        (["--a", "1", "--a", "2"], "sets --a, which is set already"),
        (["--dtype", "float32"], "sets --dtype, which is set already"),
    ],
)
def test_command_lines_in_a_recipe_that_mean_nothing(words: list[str], cause: str) -> None:
    dynamo = {"stack": {}, "worker_args": {"extra_cli_args": words}}
    recipe = make(dynamo, model_name="org/m", vllm_cfg={"precision": "bf16"})
    with pytest.raises(UsageError, match=cause):
        make_stack_fields(parse_generation(recipe))


def test_what_the_stack_says_itself_counts() -> None:
    stack = {"models": [{"path": "/a", "args": {"dtype": "float32"}}], "router": {"mode": "random"}}
    fields = make_stack_fields(
        parse_generation(make({"stack": stack}, model_name="m", vllm_cfg={"precision": "bf16"}))
    )
    assert fields["models"][0]["path"] == "/a" and fields["models"][0]["name"] == "m"
    assert fields["models"][0]["args"]["dtype"] == "float32"
    assert fields["router"] == {"mode": "random"}


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ({"models": [{}, {}]}, "has 2 models"),
        ({"modles": []}, "stack.modles is no field"),
        ("/nowhere/stack.yaml", "no file"),
    ],
)
def test_a_wrong_stack_is_refused(stack: Any, words: str) -> None:
    with pytest.raises(RollwayError, match=words):
        make_stack_fields(parse_generation(make({"stack": stack}, model_name="/models/policy")))


# --- deployments ---------------------------------------------------------------------------------


def test_a_deployment_is_found_by_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    dynamo = {"dgd_name": "RL.policy", "namespace": "team", "frontend_port": 8080}
    config = parse_generation(make(dynamo)).dynamo_cfg
    url = find_deployment_url(config)
    assert url == "http://rl-policy-frontend.team.svc.cluster.local:8080"
    assert choose_listing(config, url) == HealthListing(url, ("team-RL-policy",), 9090)


def test_a_deployment_outside_a_pod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="no pod of Kubernetes") as raised:
        find_deployment_url(parse_generation(make({"dgd_name": "rl"})).dynamo_cfg)
    assert "frontend_url" in raised.value.hint


def test_the_namespace_is_the_service_accounts_or_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "namespace"
    monkeypatch.setattr("rollway.integrations.nemo_rl.config._NAMESPACE_FILE", file)
    config = parse_generation(make({"dgd_name": "rl"})).dynamo_cfg
    with pytest.warns(UserWarning, match="`default` is used"):
        assert find_namespace(config) == "default"
    file.write_text("team\n")
    assert find_namespace(config) == "team"


def test_where_workers_are_listed() -> None:
    def choose(**keys: Any) -> Any:
        return choose_listing(parse_generation(make({"frontend_url": URL, **keys})).dynamo_cfg, URL)

    assert choose() is None
    assert choose(rl_url="http://a:1") == RlListing("http://a:1", URL)
    pools = choose(refit_worker_namespaces=["team-a", "team-b"], dyn_system_port=9191)
    assert pools == HealthListing(URL, ("team-a", "team-b"), 9191)
    assert pools.covers("team-a-0123abcd") and not pools.covers("team-a-2")
