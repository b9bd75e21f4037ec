"""`rollway prime-rl inference @ inference.json`: be the inference child of prime-rl's `rl` command.

The launcher starts `inference @ FILE` with a resolved config and expects rollouts on `server.port`
and admin calls on `backend_port`. This reads that config and turns it into a stack. An option that
would have no effect here is an error before anything starts, by its name in the config.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollway
from rollway.errors import Problem, UsageError
from rollway.gateway.command import GatewayOptions
from rollway.gateway.tokens import Access
from rollway.integrations.prime_rl.check import read_toml
from rollway.integrations.prime_rl.serve import API_KEY, ServeOptions, serve
from rollway.spec import StackSpec
from rollway.stack import preset

TRANSPORTS = ("filesystem", "nccl")
_ROUTER_MODES = {"consistent_hash": "kv", "round_robin": "round-robin", "random": "random"}
# Of `vllm`, with prime-rl's defaults: what Rollway turns into something else, or decides itself.
_OWN = {
    "model": None, "served_model_name": None, "tensor_parallel_size": 1, "data_parallel_size": 1,
    "data_parallel_size_local": None, "seed": 0, "tool_call_parser": None,
    "reasoning_parser": None, "hf_overrides": None, "additional_config": None,
    # Ports and processes of vLLM's own server, which Dynamo has others for.
    "data_parallel_rpc_port": 13345, "api_server_count": 1, "enable_auto_tool_choice": False,
}  # fmt: skip
# Passed on only where they say more than the engine's default.
_DEFAULTS = {
    "dtype": "auto", "enforce_eager": False, "trust_remote_code": False,
    "gpu_memory_utilization": 0.9, "enable_expert_parallel": False, "enable_eplb": False,
    "all2all_backend": "allgather_reducescatter", "enable_dbo": False, "enable_lora": False,
    "enable_return_routed_experts": False,
}  # fmt: skip
_LORA = ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules")
_FP32_ROUTER_MODELS = ("deepseek", "glm")
_LIVENESS_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """A resolved config of prime-rl, as far as it concerns this server."""

    raw: Mapping[str, Any]

    def get_table(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def vllm(self) -> dict[str, Any]:
        """Engine options under their Python names."""
        return {name.replace("-", "_"): value for name, value in self.get_table("vllm").items()}

    @property
    def host(self) -> str:
        return str(self.get_table("server").get("host") or "127.0.0.1")

    @property
    def port(self) -> int:
        return int(self.get_table("server").get("port", 8000))

    @property
    def admin_port(self) -> int | None:
        """The second port; None without a router in front, where one port serves all."""
        if "router" in self.raw and self.raw["router"] is None:
            return None
        return int(self.raw.get("backend_port", self.port + 100))

    @property
    def broadcast(self) -> Any:
        return self.get_table("weight_broadcast").get("type", "filesystem")


def read_config(file: Path) -> InferenceConfig:
    """Read the file that prime-rl's launcher has written, or a hand-written TOML."""
    if file.suffix == ".toml":
        return InferenceConfig(read_toml(file))
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}.", "Let prime-rl write it again.") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{file} has no table of settings.", "Give prime-rl's inference.json.")
    return InferenceConfig(raw)


def find_problems(config: InferenceConfig) -> list[Problem]:
    """Return what the config asks for and would not get."""
    return [*_check_launch(config), *_check_features(config), *_check_engine(config)]


def make_stack(config: InferenceConfig) -> dict[str, Any]:
    """Return the stack that the config describes; raise if it cannot be had."""
    if problems := find_problems(config):
        first = problems[0]
        others = "".join(f" Also: {problem.what}." for problem in problems[1:])
        raise UsageError(f"inference.{first.what}: {first.cause}", f"{first.fix}{others}")
    vllm = config.vllm
    path = str(vllm.get("model") or "Qwen/Qwen3-0.6B")
    size, tensor_parallel = (
        int(vllm.get(name) or 1) for name in ("data_parallel_size", "tensor_parallel_size")
    )
    # Experts may be spread over the data-parallel ranks of one engine; otherwise such ranks share
    # nothing, and are workers of their own.
    together = bool(vllm.get("enable_expert_parallel"))
    model = {
        "path": path,
        "name": str(vllm.get("served_model_name") or path),
        "replicas": 1 if together else size,
        "data_parallel": size if together else 1,
        "tensor_parallel": tensor_parallel,
        "seed": int(vllm.get("seed") or 0),
        "args": dict(_list_args(config)),
        "env": _make_environment(config),
    }
    policy = str(config.get_table("router").get("policy", "consistent_hash"))
    return {
        "name": f"prime-rl-{config.port}",
        "models": [model],
        "router": {"mode": _ROUTER_MODES[policy]},
        # The launcher's config has no output directory: whoever started this chooses it.
        "checkpoint_roots": ["/"],
    }


async def run(config: InferenceConfig, spec: StackSpec, access: Access) -> None:
    """Start the stack and serve until a signal; every process ends before this does."""
    if not access.operators and os.environ.get(API_KEY, "EMPTY") in ("", "EMPTY"):
        raise UsageError(
            f"{API_KEY} is not set, so the orchestrator could not prove that it may change the "
            "workers.",
            f"Before `rl`, run: export {API_KEY}=$(openssl rand -hex 32)",
        )
    for port in filter(None, (config.port, config.admin_port)):
        _check_port(config.host, port)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)  # until the server has its own
    gateway = GatewayOptions(
        stack=spec.name,
        host=config.host,
        port=config.port,
        routed_experts=bool(config.vllm.get("enable_return_routed_experts")),
    )
    options = ServeOptions(
        gateway,
        admin_host=config.host,
        admin_port=config.admin_port,
        output_dir=Path.cwd(),
        weight_broadcast=config.broadcast,
    )
    try:
        async with rollway.up(spec) as stack:
            await stack.unwatch()  # the server looks after workers that join
            await serve(options, access)
    except asyncio.CancelledError:
        print("stopped before the server was ready", file=sys.stderr)


def write_shim(directory: Path) -> Path:
    """Write the executable `inference` that prime-rl's launcher finds on PATH."""
    command = f'exec "{sys.executable}" -m rollway.cli prime-rl inference "$@"\n'
    file = directory / "inference"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if file.exists() and "-m rollway.cli prime-rl" not in file.read_text(errors="replace"):
            raise UsageError(
                f"{file} exists and is another program.",
                "Choose a directory of its own, and put it first on PATH.",
            )
        file.write_text(f"#!/bin/sh\n{command}")
        file.chmod(0o755)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error.strerror}.", "Choose another directory."
        ) from error
    return file


# --- what cannot be honoured ---------------------------------------------------------------------


def _check_launch(config: InferenceConfig) -> Iterator[Problem]:
    raw = config.raw
    if raw.get("slurm") is not None:
        cause = "This starts a stack on this machine, and submits nothing."
        yield Problem("slurm", "error", cause, "Start it in the job, without this block.")
    kind = config.get_table("deployment").get("type", "single_node")
    if kind != "single_node":
        cause = f'"{kind}" spreads engines over nodes by Slurm.'
        fix = "Start the stack by `rollway up` (docs/ray.md), and give prime-rl its address."
        yield Problem("deployment.type", "error", cause, fix)
    router = config.get_table("router")
    if router.get("type", "vllm-router") != "vllm-router":
        cause = f'"{router["type"]}" is another router; Dynamo has its own.'
        yield Problem("router.type", "error", cause, 'Use "vllm-router", or router = "None".')
    elif (policy := router.get("policy", "consistent_hash")) not in _ROUTER_MODES:
        cause = f'"{policy}" has no counterpart in Dynamo.'
        yield Problem("router.policy", "error", cause, f"Use one of {', '.join(_ROUTER_MODES)}.")
    seconds = config.get_table("server").get("liveness_timeout_seconds", _LIVENESS_SECONDS)
    if seconds != _LIVENESS_SECONDS:
        cause = f"/liveness answers within {_LIVENESS_SECONDS:g} s."
        yield Problem("server.liveness_timeout_seconds", "error", cause, "Leave the default.")
    if config.get_table("log").get("json_logging"):
        cause = "Dynamo's processes write their own lines."
        yield Problem("log.json_logging", "error", cause, "Use false.")


def _check_features(config: InferenceConfig) -> Iterator[Problem]:
    if config.broadcast not in TRANSPORTS:
        cause = f'"{config.broadcast}" of prime-rl\'s own trainer is not available.'
        yield Problem(
            "weight_broadcast.type", "error", cause, f"Use one of {', '.join(TRANSPORTS)}."
        )
    if config.raw.get("kv_cache_offload") is not None:
        cause = "A refit does not reach KV blocks outside the engine, and old ones would be read."
        yield Problem("kv_cache_offload", "error", cause, "Remove it.")
    if config.raw.get("use_pd_kv_transfer"):
        cause = "prefill and decode workers are part of a stack, not of an engine."
        yield Problem(
            "use_pd_kv_transfer", "error", cause, "Use `serving: disaggregated` (docs/stack.md)."
        )
    name = str(config.vllm.get("model", "")).lower()
    if config.raw.get("enable_fp32_router_logits") and any(
        part in name for part in _FP32_ROUTER_MODELS
    ):
        cause = "prime-rl patches its own vLLM for it, and these workers run plain vLLM."
        yield Problem(
            "enable_fp32_router_logits", "error", cause, "Use false, and the same in the trainer."
        )


def _check_engine(config: InferenceConfig) -> Iterator[Problem]:
    vllm = config.vllm
    if vllm.get("chat_template"):
        cause = "Evals use the template of the model's tokenizer."
        yield Problem(
            "vllm.chat_template", "error", cause, "Put it into the checkpoint's directory."
        )
    if vllm.get("rope_scaling"):
        cause = "vLLM takes it from the model's config."
        fix = "Use vllm.hf_overrides with rope_parameters."
        yield Problem("vllm.rope_scaling", "error", cause, fix)
    local, size = vllm.get("data_parallel_size_local"), vllm.get("data_parallel_size", 1)
    if local not in (None, size):
        cause = f"{local} of {size} engines would run here, and nobody starts the others."
        yield Problem("vllm.data_parallel_size_local", "error", cause, "Give both the same value.")
    for name in ("tool_call_parser", "reasoning_parser"):
        parser = vllm.get(name)
        if parser and parser not in _list_parsers(name):
            cause = f'Dynamo has no parser "{parser}". It matters for evals by chat alone.'
            fix = f'Use "None", or one of {", ".join(_list_parsers(name))}.'
            yield Problem(f"vllm.{name}", "error", cause, fix)
    others = {name for name, value in vllm.items() if value is not None}
    others -= {*_OWN, *_DEFAULTS, *_LORA, "chat_template", "rope_scaling"}
    typed = {"max_model_len", "enable_prefix_caching", "quantization"}
    if unknown := sorted(others - typed):
        known = _list_engine_options()
        for name in (name for name in unknown if name not in known):
            cause = "This is no option of vLLM's engine; its HTTP server's have no effect here."
            yield Problem(f"vllm.{name}", "error", cause, "Remove it.")


def _list_parsers(kind: str) -> list[str]:
    """Return the names that Dynamo knows."""
    from dynamo import _core

    if kind == "tool_call_parser":
        return sorted(_core.get_tool_parser_names())
    return sorted(_core.get_reasoning_parser_names())


def _list_engine_options() -> set[str]:
    """Return the options of vLLM's engine. The import takes seconds, so only where one is asked."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in fields(AsyncEngineArgs)}


# --- what becomes of the rest --------------------------------------------------------------------


def _list_args(config: InferenceConfig) -> Iterator[tuple[str, Any]]:
    """Yield the options of the engine under the names of its command line."""
    vllm = config.vllm
    for name, value in vllm.items():
        is_default = name in _DEFAULTS and value == _DEFAULTS[name]
        needs_lora = name in _LORA and not vllm.get("enable_lora")
        if value is not None and name not in _OWN and not is_default and not needs_lora:
            yield name.replace("_", "-"), value
    for name in ("tool_call_parser", "reasoning_parser"):
        if vllm.get(name):
            yield f"dyn-{name.replace('_', '-')}", vllm[name]
    overrides = dict(vllm.get("hf_overrides") or {})
    if config.raw.get("enable_fp32_lm_head", True) and vllm.get("dtype") != "float32":
        overrides.setdefault("head_dtype", "float32")  # vLLM's own option for what prime-rl patches
    if overrides:
        yield "hf-overrides", overrides
    if (
        vllm.get("enable_return_routed_experts")
        and "moe_backend" not in vllm
        and preset.list_gpus()
    ):
        yield "moe-backend", "triton"  # other kernels pass by the hook that captures the experts
    extra = {
        name: value
        for name, value in dict(vllm.get("additional_config") or {}).items()
        if name not in ("fp32_lm_head", "fp32_router_logits")
    }
    if extra:
        yield "additional-config", extra


def _make_environment(config: InferenceConfig) -> dict[str, str]:
    env = {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}  # as prime-rl does: it changes the sampling
    if config.raw.get("use_deep_gemm"):
        env |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    if config.vllm.get("enable_lora"):
        env["DYN_LORA_ENABLED"] = "true"
    return env | {name: str(value) for name, value in config.get_table("env_vars").items()}


def _check_port(host: str, port: int) -> None:
    """Raise before the engines start if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"Nothing can listen on {host}, port {port}: {error.strerror}.",
                "Change inference.server.port or inference.backend_port.",
            ) from error
