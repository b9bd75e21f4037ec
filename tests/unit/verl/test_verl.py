"""Parts of the verl integration that do not need verl: options, specs, conversions, proxy."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.integrations.verl.generation import (
    make_empty_output,
    make_output,
    make_sampling,
    refuse_media,
)
from rollway.integrations.verl.nodes import open_proxy
from rollway.integrations.verl.spec import (
    WHERE_SEPARATE,
    Options,
    WeightOptions,
    make_stack_spec,
    parse_options,
    read_options,
)
from rollway.integrations.verl.weights import choose_adapter_options, strip_base_layer, to_plain
from rollway.rollout.trajectory import Rollout, Span


def rollout_config(**fields: Any) -> SimpleNamespace:
    defaults = {
        "tensor_model_parallel_size": 1,
        "prompt_length": 32,
        "response_length": 16,
        "free_cache_engine": True,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "dtype": "bfloat16",
        "seed": 42,
    }
    return SimpleNamespace(**{**defaults, **fields})


def test_an_unknown_option_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(UsageError, match=r"engine_kwargs\.dynamo\.rooter_mode: there is no such"):
        read_options({"dynamo": {"rooter_mode": "kv"}})


def test_files_need_a_directory() -> None:
    with pytest.raises(UsageError, match="needs a directory"):
        read_options({"dynamo": {"weights": "files"}})


def test_separate_engines_have_only_the_options_for_weights() -> None:
    with pytest.raises(UsageError, match=r"kwargs\.rollway\.python: there is no such option"):
        parse_options(WeightOptions, {"python": "/bin/python"}, WHERE_SEPARATE)
    with pytest.raises(UsageError, match=r"kwargs\.rollway\.weights=delta needs a directory"):
        parse_options(WeightOptions, {"weights": "delta"}, WHERE_SEPARATE)
    assert (
        parse_options(WeightOptions, {"weights": "collective"}, WHERE_SEPARATE).weights_dir is None
    )


def test_replicas_are_workers_of_one_stack_with_verls_engine_settings() -> None:
    model = SimpleNamespace(path="/models/tiny", trust_remote_code=False)
    options = Options(engine_args={"dtype": "float32"}, engine_env={"A": "1"})
    spec = make_stack_spec(
        rollout_config(), model, options, pool="hybrid", replicas=4, has_gpus=True
    )
    (served,) = spec.models
    assert (served.replicas, served.seed, served.env) == (4, 42, {"A": "1"})
    assert (spec.ray.cpus, spec.ray.gpus) == (0, 0)  # verl's workers hold them
    assert served.args["dtype"] == "float32"  # the user's value overrides verl's
    assert served.args["max-model-len"] == 48
    assert served.args["enable-sleep-mode"] is True


def test_a_machine_without_gpus_gets_no_settings_for_them() -> None:
    model = SimpleNamespace(path="/models/tiny", trust_remote_code=False)
    spec = make_stack_spec(
        rollout_config(free_cache_engine=False),
        model,
        Options(),
        pool="p",
        replicas=1,
        has_gpus=False,
    )
    assert not {"gpu-memory-utilization", "enforce-eager", "enable-sleep-mode"} & set(
        spec.models[0].args
    )


@pytest.mark.parametrize("field", ["pipeline_model_parallel_size", "expert_parallel_size"])
def test_unsupported_parallelism_is_refused(field: str) -> None:
    model = SimpleNamespace(path="/models/tiny")
    with pytest.raises(UsageError, match=field):
        make_stack_spec(
            rollout_config(**{field: 2}), model, Options(), pool="p", replicas=1, has_gpus=False
        )


@pytest.mark.parametrize(("rank", "max_rank"), [(4, 8), (8, 8), (24, 32)])
def test_engines_are_configured_for_adapters(rank: int, max_rank: int) -> None:
    model = SimpleNamespace(path="/models/tiny", lora_rank=rank, lora={})
    spec = make_stack_spec(rollout_config(), model, Options(), pool="p", replicas=1, has_gpus=False)
    (served,) = spec.models
    assert served.args["enable-lora"] is True and served.args["max-lora-rank"] == max_rank
    assert served.env == {"DYN_LORA_ENABLED": "true"}
    model.lora = {"merge": True}  # the engines get whole weights
    spec = make_stack_spec(rollout_config(), model, Options(), pool="p", replicas=1, has_gpus=False)
    assert "enable-lora" not in spec.models[0].args and not spec.models[0].env


def test_any_teacher_key_gives_a_valid_stack_name() -> None:
    model = SimpleNamespace(path="/models/tiny")
    spec = make_stack_spec(
        rollout_config(),
        model,
        Options(),
        pool="teacher_gsm8k (main)_0",
        replicas=1,
        has_gpus=False,
    )
    assert spec.name.startswith("verl-teacher-gsm8k-main-0-")


async def test_an_adapters_base_has_the_names_of_the_checkpoint() -> None:
    weights = iter([("model.layers.0.q_proj.base_layer.weight", 1), ("model.norm.weight", 2)])
    renamed = [pair async for pair in strip_base_layer(weights)]
    assert renamed == [("model.layers.0.q_proj.weight", 1), ("model.norm.weight", 2)]


def test_an_adapters_config_is_converted_to_plain_types() -> None:
    class Task(StrEnum):
        CAUSAL = "CAUSAL_LM"

    assert to_plain({"task_type": Task.CAUSAL, "target_modules": {"q_proj"}}) == {
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj"],
    }


def test_adapters_are_not_stored_among_versions_of_the_policy(tmp_path: Path) -> None:
    assert choose_adapter_options(Options(weights="delta", weights_dir=tmp_path)).weights == "auto"
    assert choose_adapter_options(Options(weights="nixl")).weights == "nixl"


def test_vllm_is_the_only_fallback() -> None:
    assert Options().fallback is None
    with pytest.raises(UsageError, match=r"dynamo\.fallback"):
        read_options({"dynamo": {"fallback": "sglang"}})


def test_an_answer_fits_the_context() -> None:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    sampling = make_sampling(params, 40, rollout_config())
    assert sampling is not None and (sampling.max_tokens, sampling.logprobs) == (8, True)
    assert make_sampling(params, 48, rollout_config()) is None
    few = make_sampling({**params, "max_tokens": 3}, 10, rollout_config())
    assert few is not None and few.max_tokens == 3


def test_unsupported_parameters_and_media_are_refused() -> None:
    with pytest.raises(UsageError, match="`bad_words`"):
        make_sampling({"bad_words": ["no"]}, 1, rollout_config())
    with pytest.raises(UsageError, match="images"):
        refuse_media(images=[object()])
    refuse_media(images=None, videos=[])


def make_rollout(finish: Any, *spans: Span) -> Rollout:
    return Rollout([1], [2, 3], [-0.5, -0.25], finish, spans, cached_tokens=0)


def test_an_output_names_the_steps_its_tokens_came_from() -> None:
    steps = {1: 0, 2: 5}
    whole = make_output(make_rollout("stop", Span(0, 1, 1, 7), Span(1, 2, 2, 7)), steps.get)  # type: ignore[arg-type]
    assert whole["stop_reason"] == "completed"
    assert whole["log_probs"] == [-0.5, -0.25]
    assert whole["extra_fields"] == {
        "num_cached_tokens": 0,
        "global_steps": 5,
        "min_global_steps": 0,
        "max_global_steps": 5,
    }
    cut = make_output(make_rollout("aborted", Span(0, 2, 1, 7)), steps.get)  # type: ignore[arg-type]
    assert cut["stop_reason"] == "aborted"
    assert "global_steps" not in make_empty_output("aborted")["extra_fields"]


async def test_a_proxy_forwards_both_directions() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with open_proxy("127.0.0.1", port) as first, open_proxy("127.0.0.1", port) as second:
        assert first != second
        reader, writer = await asyncio.open_connection(*first.split(":"))
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        writer.close()
    server.close()
