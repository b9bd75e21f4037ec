"""Rollouts as NeMo-RL's tensors: nothing is lost, moved or made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import UsageError
from rollway.integrations.nemo_rl.batches import (
    NO_VERSION,
    Prompt,
    choose_expert_dtype,
    make_output,
    make_sampling,
    read_prompts,
)
from rollway.rollout.experts import RoutedExperts
from rollway.rollout.trajectory import Rollout, Span

PAD = 0
ids = st.lists(st.integers(1, 50_000), min_size=1, max_size=12)
CONFIG = {"max_new_tokens": 100, "temperature": 0.7, "top_p": 0.9, "top_k": None}


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    tokens = draw(ids)
    cut = draw(st.integers(0, len(tokens)))
    versions = draw(st.sampled_from([(3, 4), (3, 3), (None, 4), (None, None)]))
    spans = (Span(0, cut, versions[0], 1), Span(cut, len(tokens), versions[1], 1))
    logprobs = [draw(st.floats(-20, 0, width=32)) for _ in tokens]
    finish: Any = draw(st.sampled_from(["stop", "length"]))
    return Rollout(draw(ids), tokens, logprobs, finish, spans, 0)


def pack_prompts(prompts: list[list[int]], dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    rows = torch.full((len(prompts), max(map(len, prompts))), PAD, dtype=dtype)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=dtype)
    return {"input_ids": rows, "input_lengths": torch.tensor([len(p) for p in prompts])}


@given(st.lists(ids, min_size=1, max_size=5))
def test_prompts_come_out_of_a_batch_as_they_went_in(prompts: list[list[int]]) -> None:
    assert [prompt.ids for prompt in read_prompts(pack_prompts(prompts))] == prompts


@given(st.lists(rollouts(), min_size=1, max_size=5), st.sampled_from([torch.int32, torch.int64]))
def test_an_output_has_every_token_and_its_log_prob(
    batch: list[Rollout], dtype: torch.dtype
) -> None:
    output = make_output(batch, torch.zeros(1, 1, dtype=dtype), PAD)
    assert output["output_ids"].dtype == dtype and output["logprobs"].dtype == torch.float32
    for row, rollout in enumerate(batch):
        start, end = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.token_ids)
        assert output["generation_lengths"][row] == len(rollout.token_ids)
        assert output["unpadded_sequence_lengths"][row] == end
        assert output["truncated"][row] == (rollout.finish_reason == "length")
        line, scores = output["output_ids"][row], output["logprobs"][row]
        assert line[:start].tolist() == rollout.prompt_ids
        assert line[start:end].tolist() == rollout.token_ids
        assert scores[start:end].tolist() == pytest.approx(rollout.logprobs)
        # Right-padded, and nothing but 0 where nothing was sampled.
        assert line[end:].tolist() == [PAD] * (line.shape[0] - end)
        assert not scores[:start].any() and not scores[end:].any()
        known = [span.version for span in rollout.spans if span.version is not None]
        versions = [min(known, default=NO_VERSION), max(known, default=NO_VERSION)]
        assert output["weight_versions"][row].tolist() == versions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": torch.zeros(1, 3)}, "torch.float32, which are no token ids"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.bool)}, "torch.bool"),
        ({"input_ids": torch.tensor([[1, -2, 3]])}, "token id -2"),
        ({"input_ids": torch.tensor([[1, 100, 3]])}, "token id 100"),
        ({"input_lengths": torch.tensor([4])}, "length 4"),
        ({"input_lengths": torch.tensor([0])}, "length 0"),
        ({"vllm_content": ["an image"]}, "images or other content"),
        ({"input_lengths": None}, "no input_lengths"),
    ],
)
def test_a_batch_that_is_no_batch_of_ids_is_refused(change: dict[str, Any], words: str) -> None:
    batch = {**pack_prompts([[1, 2, 3]]), **change}
    with pytest.raises(UsageError, match=words):
        read_prompts({key: value for key, value in batch.items() if value is not None}, 100)


def test_stop_strings_of_config_and_sample_are_joined() -> None:
    data = {**pack_prompts([[1], [2], [3]]), "stop_strings": [["b", "a"], "c", None]}
    prompts = read_prompts(data)
    config = {**CONFIG, "stop_strings": ["a"], "stop_token_ids": [7]}
    stops = [make_sampling(config, p, 50, greedy=False, experts=False).stop for p in prompts]
    assert stops == [("a", "b"), ("a", "c"), ("a",)]
    assert make_sampling(config, prompts[0], 50, greedy=False, experts=False).stop_token_ids == (7,)


def test_sampling_follows_the_recipe_and_the_context() -> None:
    prompt = Prompt(list(range(40)))
    sampling = make_sampling(CONFIG, prompt, 50, greedy=False, experts=False)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (10, 0.7, 0.9)
    assert sampling.top_k == -1
    greedy = make_sampling({**CONFIG, "top_k": 5}, prompt, 500, greedy=True, experts=False)
    assert (greedy.max_tokens, greedy.temperature, greedy.top_k) == (100, 0.0, -1)
    with pytest.raises(UsageError, match="40 tokens"):
        make_sampling(CONFIG, prompt, 40, greedy=False, experts=False)


# --- routed experts ------------------------------------------------------------------------------


def test_experts_have_the_narrowest_signed_dtype() -> None:
    chosen = [choose_expert_dtype(count) for count in (8, 128, 129, 32_768, 32_769)]
    assert chosen == [torch.int8, torch.int8, torch.int16, torch.int16, torch.int32]


def test_tokens_without_a_forward_pass_have_the_sentinel() -> None:
    routes = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)
    capture = RoutedExperts(routes, 0)
    span = (Span(0, 2, 1, 1),)
    batch = [Rollout([1, 2, 3], [4, 5], [-1.0, -2.0], "stop", span, 0, capture)]
    packed = make_output(batch, torch.zeros(1, 1, dtype=torch.int64), PAD, 128)["routed_experts"]
    assert packed.dtype == torch.int8 and packed.shape == (1, 5, 2, 2)
    assert packed[0, :4].tolist() == routes.tolist()
    assert (packed[0, 4] == -1).all()


def test_router_replay_without_captures_is_refused() -> None:
    batch = [Rollout([1], [2], [-1.0], "stop", (Span(0, 1, 1, 1),), 0)]
    with pytest.raises(UsageError, match="reports no experts"):
        make_output(batch, torch.zeros(1, 1, dtype=torch.int64), PAD, 8)
