"""Curator's configs as the spec of a stack: every field, and what contradicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemo_curator.core.serve import (
    DynamoRoleConfig,
    DynamoRouterConfig,
    DynamoServerConfig,
    DynamoVLLMModelConfig,
)

from rollway.integrations.curator.translate import (
    ConfigError,
    choose_router,
    make_fields,
    make_stack_name,
)
from rollway.spec import parse_spec
from rollway.stack.ray.node_check import check_runtime_envs, list_packages

NO_EVENTS = {"enable_kv_cache_events": False}


def fields_of(
    model: DynamoVLLMModelConfig | None = None,
    backend: DynamoServerConfig | None = None,
    **options: Any,
) -> dict[str, Any]:
    models = [model or DynamoVLLMModelConfig("org/m")]
    return make_fields(models, backend or DynamoServerConfig(), name="x", **options)


def model_of(**config: Any) -> dict[str, Any]:
    model: dict[str, Any] = fields_of(DynamoVLLMModelConfig("org/m", **config))["models"][0]
    return model


@pytest.mark.parametrize(
    ("kwargs", "fields", "args"),
    [
        ({"tensor_parallel_size": 4}, {"tensor_parallel": 4}, {}),
        ({"tensor-parallel-size": 4}, {"tensor_parallel": 4}, {}),
        ({"tensor_parallel_size": 1}, {"tensor_parallel": 1}, {}),
        ({"pipeline_parallel_size": 2}, {"pipeline_parallel": 2}, {}),
        ({"data_parallel_size": 8}, {"data_parallel": 8}, {}),
        ({"max_model_len": 2048}, {}, {"max-model-len": 2048}),
        ({"enforce_eager": True}, {}, {"enforce-eager": True}),
        ({"enable_prefix_caching": False}, {}, {"enable-prefix-caching": False}),
        ({"limit_mm_per_prompt": {"image": 1}}, {}, {"limit-mm-per-prompt": {"image": 1}}),
        ({"served_model_name": "org/m"}, {}, {}),
    ],
)
def test_engine_kwargs(
    kwargs: dict[str, Any], fields: dict[str, Any], args: dict[str, Any]
) -> None:
    model = model_of(engine_kwargs=kwargs)
    sizes = {key: value for key, value in model.items() if key.endswith("_parallel")}
    assert sizes == fields
    assert model["args"] == {**args, "kv-events-config": NO_EVENTS}


def test_dynamo_kwargs_come_after_engine_kwargs() -> None:
    model = model_of(engine_kwargs={"dtype": "float16"}, dynamo_kwargs={"dtype": "float32"})
    assert model["args"]["dtype"] == "float32"


def test_names_and_replicas() -> None:
    model = model_of(model_name="public", num_replicas=3)
    assert (model["path"], model["name"], model["replicas"]) == ("org/m", "public", 3)
    assert model_of()["name"] == "org/m"


@pytest.mark.parametrize(
    ("router", "mode", "flag"),
    [
        (DynamoRouterConfig(), "round-robin", None),
        (DynamoRouterConfig(mode="round_robin"), "round-robin", None),
        (DynamoRouterConfig(mode="random"), "random", None),
        (DynamoRouterConfig(mode="direct"), "direct", None),
        (DynamoRouterConfig(mode="kv"), "kv", False),
        (DynamoRouterConfig(mode="kv", kv_events=True), "kv", True),
        (DynamoRouterConfig(kv_events=True), "round-robin", None),
    ],
)
def test_router(router: DynamoRouterConfig, mode: str, flag: bool | None) -> None:
    fields = fields_of(backend=DynamoServerConfig(router=router))
    assert fields["router"]["mode"] == mode
    assert fields["frontend"]["args"].get("router-kv-events") == flag
    # With events the plan gives every worker an address; without, they are switched off.
    assert ("kv-events-config" in fields["models"][0]["args"]) == (flag is not True)
    parse_spec(fields)


def test_router_kwargs_reach_the_frontend() -> None:
    router = DynamoRouterConfig(router_kwargs={"dyn_chat_processor": "vllm", "migration_limit": 0})
    fields = fields_of(backend=DynamoServerConfig(router=router))
    assert fields["frontend"]["args"] == {"dyn-chat-processor": "vllm", "migration-limit": 0}
    assert "migration_limit" not in fields


def test_an_unknown_router_mode_is_refused_before_anything_starts() -> None:
    router = DynamoRouterConfig(mode="fastest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"router.mode"):
        try:
            parse_spec(fields_of(backend=DynamoServerConfig(router=router)))
        except Exception as error:
            raise ValueError(str(error)) from error


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, {"request_plane": "nats", "event_plane": "nats"}),
        ({"request_plane": "tcp", "event_plane": "zmq"}, {"request_plane": "tcp"}),
        (
            {"etcd_endpoint": "http://etcd:2379/v3"},
            {"discovery": "etcd", "etcd_endpoints": "http://etcd:2379/v3"},
        ),
        ({"nats_url": "nats://u:p@n:4222/x"}, {"nats_server": "nats://u:p@n:4222/x"}),
    ],
)
def test_planes_and_services(config: dict[str, Any], fields: dict[str, Any]) -> None:
    result = fields_of(backend=DynamoServerConfig(**config))
    assert {key: result.get(key) for key in fields} == fields
    parse_spec(result)


def test_a_nats_that_no_plane_uses_is_left_out() -> None:
    config = DynamoServerConfig(nats_url="nats://n:1", request_plane="tcp", event_plane="zmq")
    spec = parse_spec(fields_of(backend=config))
    assert spec.nats_server is None and not spec.needs_nats


def test_many_workers_get_etcd() -> None:
    assert fields_of(DynamoVLLMModelConfig("m", num_replicas=17))["discovery"] == "etcd"
    assert "discovery" not in fields_of(DynamoVLLMModelConfig("m", num_replicas=16))


def test_managed_variables_win_over_subprocess_env() -> None:
    env = {"ETCD_ENDPOINTS": "x", "NATS_SERVER": "y", "DYN_NAMESPACE": "z", "OWN": "1"}
    fields = fields_of(backend=DynamoServerConfig(subprocess_env=env))
    assert fields["env"]["OWN"] == "1"
    assert not {"ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE"} & fields["env"].keys()


def test_a_servers_variable_overrides_a_models() -> None:
    model = DynamoVLLMModelConfig("m", runtime_env={"env_vars": {"A": "model", "B": "model"}})
    fields = fields_of(model, DynamoServerConfig(subprocess_env={"A": "server"}))
    assert fields["models"][0]["env"] == {"B": "model"}
    assert fields["env"]["A"] == "server"


def test_packages_stay_in_the_models_runtime_env() -> None:
    model = model_of(runtime_env={"uv": {"packages": ["x"]}, "env_vars": {"A": "1"}})
    assert model["runtime_env"] == {"uv": {"packages": ["x"]}}


def test_py_executable_is_the_spec_s_python(tmp_path: Path) -> None:
    model = DynamoVLLMModelConfig("m", runtime_env={"py_executable": "/opt/e/bin/python"})
    fields = fields_of(model, python="/other")
    assert fields["python"] == "/opt/e/bin/python"
    assert "runtime_env" not in fields["models"][0]
    assert fields_of(python="/other")["python"] == "/other"


def test_disaggregated_roles() -> None:
    model = DynamoVLLMModelConfig(
        "m",
        mode="disagg",
        engine_kwargs={"max_model_len": 2048, "tensor_parallel_size": 1},
        dynamo_kwargs={"dtype": "float32"},
        prefill=DynamoRoleConfig(2, {"tensor_parallel_size": 2, "dtype": "float16"}),
        decode=DynamoRoleConfig(1, {"max_num_seqs": 8}),
    )
    fields = fields_of(model)
    (entry,) = fields["models"]
    assert entry["serving"] == "disaggregated" and "replicas" not in entry
    assert entry["tensor_parallel"] == 1
    assert entry["prefill"] == {"replicas": 2, "tensor_parallel": 2, "args": {}}
    assert entry["decode"] == {"replicas": 1, "args": {"max-num-seqs": 8}}
    # Events are the plan's: on for prefill, off for decode.
    assert entry["args"] == {"max-model-len": 2048, "dtype": "float32"}
    assert fields["router"]["mode"] == "kv"
    assert fields["frontend"]["args"]["router-kv-events"] is True
    prefill, decode = (
        parse_spec({**fields, "models": [{**entry, "path": "org/m"}]}).models[0].roles.values()
    )
    assert (prefill.replicas, prefill.ranks, decode.replicas, decode.ranks) == (2, 2, 1, 1)


def test_an_unknown_mode_is_refused() -> None:
    """Curator serves it whole, without a word."""
    with pytest.raises(ConfigError, match=r"'disaggregated'.*mode='disagg'"):
        model_of(mode="disaggregated")


def test_settings_of_the_instance_reach_the_worker() -> None:
    model = DynamoVLLMModelConfig("m")
    model.kv_transfer_config = {"kv_connector": "X"}
    model.kv_events_config = {"topic": "t", "endpoint": "tcp://*:1"}
    args = fields_of(model)["models"][0]["args"]
    assert args["kv-transfer-config"] == {"kv_connector": "X"}
    assert args["kv-events-config"] == {"topic": "t", **NO_EVENTS}


def test_the_nemotron_parse_server_translates() -> None:
    from nemo_curator.stages.interleaved.pdf.nemotron_parse.server import (
        create_nemotron_parse_inference_server,
    )

    server = create_nemotron_parse_inference_server(num_replicas=2, request_timeout_s=180)
    fields = make_fields(server.models, server.backend, name="parse")
    (model,) = fields["models"]
    assert model["args"]["enable-multimodal"] is True
    assert model["args"]["disable-hybrid-kv-cache-manager"] is False
    assert model["runtime_env"] == {"uv": {"packages": ["albumentations==2.0.8"]}}
    assert fields["env"]["DYN_TCP_REQUEST_TIMEOUT"] == "180"
    assert fields["frontend"]["args"] == {"trust-remote-code": True}
    # Its start is not refused: the nodes are asked for the package.
    spec = parse_spec({**fields, "launcher": "ray"})
    check_runtime_envs(spec)
    assert list_packages(spec) == ["albumentations==2.0.8"]


def test_stack_names() -> None:
    name = make_stack_name("curator", "default", "0a1b2c3d")
    assert name == "curator-default-0a1b2c3d"
    long = make_stack_name("Name Space", "My_Server." * 9, "0a1b2c3d")
    assert len(long) <= 40 and long.endswith("-0a1b2c3d")
    parse_spec({"name": long, "models": [{"path": "org/m"}]})


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "At least one DynamoVLLMModelConfig is required"),
        (["m", "m"], "Duplicate model name 'm' at index 1"),
        (["Qwen.3", "Qwen-3"], "both sanitize to component"),
        (["///"], "empty component slug"),
    ],
)
def test_names_that_cannot_be_told_apart(models: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_fields([DynamoVLLMModelConfig(m) for m in models], DynamoServerConfig(), name="x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "disagg"}, "'prefill' is not configured"),
        ({"engine_kwargs": {"served_model_name": "other"}}, "never served"),
        ({"runtime_env": {"pip": ["a"], "uv": ["b"]}}, "both `pip` and `uv`"),
        ({"runtime_env": {"py_executable": "uv run python"}}, "command with arguments"),
    ],
)
def test_configs_that_cannot_work(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fields_of(DynamoVLLMModelConfig("m", **config))


def test_two_interpreters_are_refused() -> None:
    models = [
        DynamoVLLMModelConfig(name, runtime_env={"py_executable": f"/{name}/python"})
        for name in ("a", "b")
    ]
    with pytest.raises(ConfigError, match="different interpreters"):
        make_fields(models, DynamoServerConfig(), name="x")


def test_events_with_options_of_their_own_are_refused() -> None:
    model = DynamoVLLMModelConfig("m")
    model.kv_events_config = {"buffer_steps": 5}
    router = DynamoRouterConfig(mode="kv", kv_events=True)
    with pytest.raises(ConfigError, match="options of its own"):
        fields_of(model, DynamoServerConfig(router=router))


def test_an_explicit_hybrid_cache_manager_does_not_hinder_events() -> None:
    """vLLM 0.22 refused the two together, and so does Curator; that of Dynamo 1.6.1 does not."""
    model = DynamoVLLMModelConfig("m", engine_kwargs={"disable_hybrid_kv_cache_manager": False})
    assert choose_router([model], DynamoRouterConfig(mode="kv", kv_events=True)) == ("kv", True)
