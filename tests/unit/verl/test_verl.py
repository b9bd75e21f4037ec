"""verl's words as ours, where verl itself is not needed."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.integrations.verl.forward import forwarded
from rollway.integrations.verl.generation import nothing, output_of, refuse_media, sampling_of
from rollway.integrations.verl.options import (
    WHERE_SEPARATE,
    Options,
    WeightOptions,
    checked,
    read_options,
)
from rollway.integrations.verl.settings import stack_spec
from rollway.integrations.verl.updates import base_of, for_adapters, plain
from rollway.rollout.trajectory import Rollout, Span


def rollout_config(**fields: Any) -> SimpleNamespace:
    given = {
        "tensor_model_parallel_size": 1,
        "prompt_length": 32,
        "response_length": 16,
        "free_cache_engine": True,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "dtype": "bfloat16",
        "seed": 42,
    }
    return SimpleNamespace(**{**given, **fields})


def test_an_unknown_option_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(UsageError, match=r"engine_kwargs\.dynamo\.rooter_mode: there is no such"):
        read_options({"dynamo": {"rooter_mode": "kv"}})


def test_a_directory_is_asked_for_where_weights_are_files() -> None:
    with pytest.raises(UsageError, match="needs a directory"):
        read_options({"dynamo": {"weights": "files"}})


def test_options_of_engines_apart_are_those_about_weights_alone() -> None:
    with pytest.raises(UsageError, match=r"kwargs\.rollway\.python: there is no such option"):
        checked(WeightOptions, {"python": "/bin/python"}, WHERE_SEPARATE)
    with pytest.raises(UsageError, match=r"kwargs\.rollway\.weights=delta needs a directory"):
        checked(WeightOptions, {"weights": "delta"}, WHERE_SEPARATE)
    assert checked(WeightOptions, {"weights": "collective"}, WHERE_SEPARATE).weights_dir is None


def test_replicas_are_workers_of_one_stack_with_verls_engine_settings() -> None:
    model = SimpleNamespace(path="/models/tiny", trust_remote_code=False)
    options = Options(engine_args={"dtype": "float32"}, engine_env={"A": "1"})
    spec = stack_spec(
        rollout_config(), model, options, pool="hybrid", replicas=4, gpus=["0", "1", "2", "3"]
    )
    (served,) = spec.models
    assert (served.replicas, served.seed, served.env) == (4, 42, {"A": "1"})
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert served.args["dtype"] == "float32"  # the user's own outweighs verl's
    assert served.args["max-model-len"] == 48
    assert served.args["enable-sleep-mode"] is True


def test_a_machine_without_gpus_gets_no_settings_for_them() -> None:
    model = SimpleNamespace(path="/models/tiny", trust_remote_code=False)
    spec = stack_spec(
        rollout_config(free_cache_engine=False), model, Options(), pool="p", replicas=1, gpus=[]
    )
    assert not {"gpu-memory-utilization", "enforce-eager", "enable-sleep-mode"} & set(
        spec.models[0].args
    )


@pytest.mark.parametrize("field", ["pipeline_model_parallel_size", "expert_parallel_size"])
def test_what_is_not_done_is_refused(field: str) -> None:
    model = SimpleNamespace(path="/models/tiny")
    with pytest.raises(UsageError, match=field):
        stack_spec(rollout_config(**{field: 2}), model, Options(), pool="p", replicas=1, gpus=[])


@pytest.mark.parametrize(("rank", "room"), [(4, 8), (8, 8), (24, 32)])
def test_adapters_have_room_in_the_engines(rank: int, room: int) -> None:
    model = SimpleNamespace(path="/models/tiny", lora_rank=rank, lora={})
    spec = stack_spec(rollout_config(), model, Options(), pool="p", replicas=1, gpus=[])
    (served,) = spec.models
    assert served.args["enable-lora"] is True and served.args["max-lora-rank"] == room
    assert served.env == {"DYN_LORA_ENABLED": "true"}
    model.lora = {"merge": True}  # the engines see whole weights
    spec = stack_spec(rollout_config(), model, Options(), pool="p", replicas=1, gpus=[])
    assert "enable-lora" not in spec.models[0].args and not spec.models[0].env


def test_a_teachers_stack_has_a_name_whatever_its_key_is() -> None:
    model = SimpleNamespace(path="/models/tiny")
    spec = stack_spec(
        rollout_config(),
        model,
        Options(),
        pool="teacher_gsm8k (main)_0",
        replicas=1,
        gpus=[],
    )
    assert spec.name.startswith("verl-teacher-gsm8k-main-0-")


async def test_an_adapters_base_has_the_names_of_the_checkpoint() -> None:
    given = iter([("model.layers.0.q_proj.base_layer.weight", 1), ("model.norm.weight", 2)])
    found = [one async for one in base_of(given)]
    assert found == [("model.layers.0.q_proj.weight", 1), ("model.norm.weight", 2)]


def test_an_adapters_config_is_plain() -> None:
    class Task(StrEnum):
        CAUSAL = "CAUSAL_LM"

    assert plain({"task_type": Task.CAUSAL, "target_modules": {"q_proj"}}) == {
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj"],
    }


def test_adapters_do_not_go_where_versions_of_the_policy_are_kept(tmp_path: Path) -> None:
    assert for_adapters(Options(weights="delta", weights_dir=tmp_path)).weights == "auto"
    assert for_adapters(Options(weights="nixl")).weights == "nixl"


def test_there_is_one_fallback() -> None:
    assert Options().fallback is None
    with pytest.raises(UsageError, match=r"dynamo\.fallback"):
        read_options({"dynamo": {"fallback": "sglang"}})


def test_an_answer_fits_the_context() -> None:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    wanted = sampling_of(params, 40, rollout_config())
    assert wanted is not None and (wanted.max_tokens, wanted.logprobs) == (8, True)
    assert sampling_of(params, 48, rollout_config()) is None
    few = sampling_of({**params, "max_tokens": 3}, 10, rollout_config())
    assert few is not None and few.max_tokens == 3


def test_a_sampling_parameter_that_would_be_dropped_is_refused() -> None:
    with pytest.raises(UsageError, match="`bad_words`"):
        sampling_of({"bad_words": ["no"]}, 1, rollout_config())
    with pytest.raises(UsageError, match="images"):
        refuse_media(images=[object()])
    refuse_media(images=None, videos=[])


def sampled(finish: Any, *spans: Span) -> Rollout:
    return Rollout([1], [2, 3], [-0.5, -0.25], finish, spans, cached_tokens=0)


def test_an_output_names_the_steps_its_tokens_came_from() -> None:
    steps = {1: 0, 2: 5}
    whole = output_of(sampled("stop", Span(0, 1, 1, 7), Span(1, 2, 2, 7)), steps.get)  # type: ignore[arg-type]
    assert whole["stop_reason"] == "completed"
    assert whole["log_probs"] == [-0.5, -0.25]
    assert whole["extra_fields"] == {
        "num_cached_tokens": 0,
        "global_steps": 5,
        "min_global_steps": 0,
        "max_global_steps": 5,
    }
    cut = output_of(sampled("aborted", Span(0, 2, 1, 7)), steps.get)  # type: ignore[arg-type]
    assert cut["stop_reason"] == "aborted"
    assert "global_steps" not in nothing("aborted")["extra_fields"]


async def test_an_address_leads_to_another() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with forwarded("127.0.0.1", port) as first, forwarded("127.0.0.1", port) as second:
        assert first != second
        reader, writer = await asyncio.open_connection(*first.split(":"))
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        writer.close()
    server.close()
