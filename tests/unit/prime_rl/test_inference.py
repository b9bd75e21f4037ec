"""prime-rl's resolved inference config as a stack, and what in it is refused."""

from __future__ import annotations

import copy
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.integrations.prime_rl.inference import (
    InferenceConfig,
    find_problems,
    make_stack,
    read_config,
    write_shim,
)
from rollway.stack import preset

# What prime-rl of August 2026 writes for a config that names a model and nothing else.
RESOLVED: dict[str, Any] = {
    "server": {"host": None, "port": 8000, "liveness_timeout_seconds": 30.0},
    "router": {"type": "vllm-router", "policy": "consistent_hash"},
    "backend_port": 8100,
    "vllm": {
        "model": "/models/policy", "dtype": "auto", "max_model_len": None, "enforce_eager": False,
        "trust_remote_code": False, "chat_template": None, "tool_call_parser": None,
        "reasoning_parser": None, "rope_scaling": None, "tensor_parallel_size": 1,
        "data_parallel_size": 1, "data_parallel_size_local": None,
        "data_parallel_rpc_port": 13345, "api_server_count": 1, "seed": 0,
        "gpu_memory_utilization": 0.9, "enable_prefix_caching": None, "quantization": None,
        "enable_lora": False, "max_loras": 8, "max_cpu_loras": 100, "max_lora_rank": None,
        "lora_target_modules": None, "enable_expert_parallel": False,
        "all2all_backend": "allgather_reducescatter", "enable_eplb": False, "enable_dbo": False,
        "enable_return_routed_experts": False,
    },
    "log": {"level": "info", "vf_level": "info", "json_logging": False, "interval": 10.0},
    "env_vars": {}, "use_deep_gemm": False, "weight_broadcast": {"type": "filesystem"},
    "kv_cache_offload": None, "use_pd_kv_transfer": False, "enable_fp32_lm_head": True,
    "enable_fp32_router_logits": True,
}  # fmt: skip


def make_config(**fields: Any) -> InferenceConfig:
    """Return the config with changes; `vllm__x=1` changes a field of a table."""
    raw = copy.deepcopy(RESOLVED)
    for name, value in fields.items():
        table, _, key = name.partition("__")
        if key:
            raw.setdefault(table, {})[key] = value
        else:
            raw[table] = value
    return InferenceConfig(raw)


def make_model(**fields: Any) -> dict[str, Any]:
    (model,) = make_stack(make_config(**fields))["models"]
    return dict(model)


def test_the_default_config_is_one_worker_on_two_ports() -> None:
    config = make_config()
    assert (config.host, config.port, config.admin_port) == ("127.0.0.1", 8000, 8100)
    model = make_model()
    assert (model["path"], model["name"]) == ("/models/policy", "/models/policy")
    assert (model["replicas"], model["tensor_parallel"]) == (1, 1)
    # What prime-rl patches into vLLM, in vLLM's own way.
    assert model["args"] == {"hf-overrides": {"head_dtype": "float32"}}


def test_without_a_router_one_port_serves_all() -> None:
    assert make_config(router=None).admin_port is None


def test_data_parallel_engines_are_workers() -> None:
    model = make_model(vllm__data_parallel_size=4, vllm__tensor_parallel_size=2)
    assert (model["replicas"], model["data_parallel"], model["tensor_parallel"]) == (4, 1, 2)


def test_experts_stay_spread_over_the_ranks_of_one_engine() -> None:
    model = make_model(vllm__data_parallel_size=4, vllm__enable_expert_parallel=True)
    assert (model["replicas"], model["data_parallel"]) == (1, 4)
    assert model["args"]["enable-expert-parallel"] is True


def test_engine_options_keep_their_names() -> None:
    model = make_model(
        vllm__max_model_len=512, vllm__dtype="float32", vllm__enable_prefix_caching=False,
        vllm__enforce_eager=True, vllm__seed=7, env_vars={"NAME": "x"}, use_deep_gemm=True,
    )  # fmt: skip
    assert model["args"] == {
        "max-model-len": 512, "dtype": "float32", "enable-prefix-caching": False,
        "enforce-eager": True,
    }  # fmt: skip
    assert model["seed"] == 7
    assert model["env"]["NAME"] == "x" and model["env"]["VLLM_USE_DEEP_GEMM"] == "1"


def test_captured_experts_need_a_kernel_that_the_capture_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus: list[str] = []
    monkeypatch.setattr(preset, "list_gpus", lambda: gpus)
    model = make_model(vllm__enable_return_routed_experts=True)
    captured = model["args"]
    assert captured["enable-return-routed-experts"] is True
    # vLLM captures with its second model runner alone, which it takes by itself.
    assert "VLLM_USE_V2_MODEL_RUNNER" not in model["env"]
    assert "moe-backend" not in captured  # the CPU's kernel is seen
    gpus.append("0")
    assert make_model(vllm__enable_return_routed_experts=True)["args"]["moe-backend"] == "triton"
    named = {"vllm__enable_return_routed_experts": True, "vllm__moe_backend": "marlin"}
    assert make_model(**named)["args"]["moe-backend"] == "marlin"
    assert "moe-backend" not in make_model()["args"]


def test_lora_options_come_with_lora_alone() -> None:
    model = make_model(vllm__enable_lora=True, vllm__max_lora_rank=16)
    assert model["args"]["enable-lora"] is True and model["args"]["max-lora-rank"] == 16
    assert (model["args"]["max-loras"], model["args"]["max-cpu-loras"]) == (8, 100)
    assert model["env"]["DYN_LORA_ENABLED"] == "true"
    assert "max-loras" not in make_model()["args"]


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("slurm", {"slurm": {"job_name": "x"}}),
        ("deployment.type", {"deployment": {"type": "multi_node"}}),
        ("router.type", {"router": {"type": "llm-d"}}),
        ("router.policy", {"router__policy": "cache_aware"}),
        ("server.liveness_timeout_seconds", {"server__liveness_timeout_seconds": 5.0}),
        ("log.json_logging", {"log__json_logging": True}),
        ("weight_broadcast.type", {"weight_broadcast__type": "nixl"}),
        ("kv_cache_offload", {"kv_cache_offload": {"type": "native", "cpu": {"num_bytes": 1}}}),
        ("use_pd_kv_transfer", {"use_pd_kv_transfer": True}),
        ("enable_fp32_router_logits", {"vllm__model": "deepseek-ai/DeepSeek-V3"}),
        ("vllm.chat_template", {"vllm__chat_template": "{{ x }}"}),
        ("vllm.rope_scaling", {"vllm__rope_scaling": {"rope_type": "yarn"}}),
        (
            "vllm.data_parallel_size_local",
            {"vllm__data_parallel_size": 4, "vllm__data_parallel_size_local": 2},
        ),
        ("vllm.tool_call_parser", {"vllm__tool_call_parser": "no_such_parser"}),
    ],
)
def test_what_cannot_be_honoured_is_named(key: str, fields: dict[str, Any]) -> None:
    config = make_config(**fields)
    assert [problem.what for problem in find_problems(config)] == [key]
    with pytest.raises(UsageError, match=f"inference.{key}:"):
        make_stack(config)


def test_options_of_vllms_http_server_are_refused() -> None:
    pytest.importorskip("vllm")
    config = make_config(vllm__max_num_seqs=64, vllm__uvicorn_log_level="debug")
    assert [problem.what for problem in find_problems(config)] == ["vllm.uvicorn_log_level"]
    assert make_model(vllm__max_num_seqs=64)["args"]["max-num-seqs"] == 64


def test_a_config_is_read_as_json_and_as_toml(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RESOLVED))
    (tmp_path / "b.toml").write_text('[vllm]\nmodel = "/models/policy"\nmax-model-len = 64\n')
    assert read_config(tmp_path / "a.json").raw == RESOLVED
    assert read_config(tmp_path / "b.toml").vllm["max_model_len"] == 64


@pytest.mark.parametrize("text", ["{", "[1]", "no json"])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError):
        read_config(tmp_path / "a.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "b.json")


def test_the_shim_runs_this_installation(tmp_path: Path) -> None:
    file = write_shim(tmp_path / "bin")
    assert file.stat().st_mode & stat.S_IXUSR
    path = {"PATH": f"{file.parent}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(
        ["inference", "@", str(tmp_path / "none.json")],
        env={**os.environ, **path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 2 and "cannot be read" in ran.stderr
    assert write_shim(tmp_path / "bin") == file  # again, over itself


def test_the_shim_replaces_no_other_program(tmp_path: Path) -> None:
    (tmp_path / "inference").write_text("#!/bin/sh\nprime-rl's own\n")
    with pytest.raises(UsageError, match="another program"):
        write_shim(tmp_path)
