"""NeMo-RL's tensors: prompts out of a batch, and rollouts into a batch.

    input_ids [B, S], input_lengths [B], stop_strings     right-padded
    output_ids [B, L], logprobs [B, L], generation_lengths, unpadded_sequence_lengths, truncated

An output has the prompt before the sampled tokens; its log-probs are 0 on the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollway.errors import UsageError
from rollway.rollout.sampling import Sampling
from rollway.rollout.trajectory import Rollout, list_versions

if TYPE_CHECKING:
    import torch

NO_VERSION = -1
"""The weight version of a rollout whose version nobody declared."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a batch."""

    ids: list[int]
    stop: tuple[str, ...] = ()


def read_prompts(data: Mapping[str, Any], vocabulary: int | None = None) -> list[Prompt]:
    """Return the prompts of a batch; raise for what cannot be a list of token ids."""
    for key in ("input_ids", "input_lengths"):
        if key not in data:
            raise UsageError(f"The batch has no {key}.", "Pass NeMo-RL's GenerationDatumSpec.")
    if data.get("vllm_content"):
        raise UsageError(
            "The batch has images or other content besides tokens (vllm_content).",
            "Rollway generates from token ids alone; use NeMo-RL's own vLLM backend for these.",
        )
    rows, lengths = data["input_ids"], data["input_lengths"]
    if rows.is_floating_point() or str(rows.dtype) == "torch.bool":
        raise UsageError(
            f"input_ids are {rows.dtype}, which are no token ids.", "Pass an integer tensor."
        )
    stops = data.get("stop_strings") or [None] * len(rows)
    prompts = []
    for row, length, stop in zip(rows, lengths.tolist(), stops, strict=True):
        if not 0 < length <= len(row):
            raise UsageError(
                f"A prompt has the length {length}, in a batch of rows of {len(row)} tokens.",
                "Set input_lengths to the tokens of each row without its padding.",
            )
        ids = row[:length].tolist()
        limit = math.inf if vocabulary is None else vocabulary
        wrong = next((token for token in ids if not 0 <= token < limit), None)
        if wrong is not None:
            raise UsageError(
                f"A prompt has the token id {wrong}, which the model's vocabulary does not have.",
                "Tokenize with the tokenizer of the served model.",
            )
        words = (stop,) if isinstance(stop, str) else tuple(stop or ())
        prompts.append(Prompt(ids, words))
    return prompts


def make_sampling(
    config: Mapping[str, Any], prompt: Prompt, context_length: int, *, greedy: bool, experts: bool
) -> Sampling:
    """Return how to sample for a prompt; its budget ends with the context."""
    left = context_length - len(prompt.ids)
    if left <= 0:
        raise UsageError(
            f"A prompt has {len(prompt.ids)} tokens, and the context has room for "
            f"{context_length}, with the answer.",
            "Shorten the prompt (data.max_input_seq_length), or raise vllm_cfg.max_model_len.",
        )
    stop = tuple(dict.fromkeys([*(config.get("stop_strings") or ()), *prompt.stop]))
    top_k = config.get("top_k")
    return Sampling(
        max_tokens=min(int(config["max_new_tokens"]), left),
        temperature=0.0 if greedy else float(config["temperature"]),
        top_p=1.0 if greedy else float(config["top_p"]),
        top_k=-1 if greedy or top_k is None else int(top_k),
        stop_token_ids=tuple(config.get("stop_token_ids") or ()),
        stop=stop,
        routed_experts=experts,
    )


def make_output(
    rollouts: Sequence[Rollout], like: torch.Tensor, pad: int, experts: int | None = None
) -> dict[str, Any]:
    """Return the output tensors of some rollouts, right-padded to the longest.

    `like` has the dtype and the device of the ids; `experts` is the number of experts of a model
    whose routing is replayed."""
    import torch

    lengths = [len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in rollouts]
    shape = (len(rollouts), max(lengths))
    ids = torch.full(shape, pad, dtype=like.dtype)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    for row, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt_ids), lengths[row]
        ids[row, :end] = torch.tensor(rollout.prompt_ids + rollout.token_ids, dtype=like.dtype)
        assert (
            rollout.logprobs is not None
        )  # Sampling asks for them, and an answer without is refused
        logprobs[row, start:end] = torch.tensor(rollout.logprobs, dtype=torch.float32)
    output = {
        "output_ids": ids,
        "logprobs": logprobs,
        "generation_lengths": torch.tensor([len(r.token_ids) for r in rollouts]),
        "unpadded_sequence_lengths": torch.tensor(lengths),
        "truncated": torch.tensor([r.finish_reason == "length" for r in rollouts]),
        # Two columns: a rollout that a refit cut has tokens of several versions.
        "weight_versions": torch.tensor([find_versions(r) for r in rollouts]),
    }
    if experts is not None:
        output["routed_experts"] = _pack_experts(rollouts, shape[1], experts)
    return {name: tensor.to(like.device) for name, tensor in output.items()}


def find_versions(rollout: Rollout) -> tuple[int, int]:
    """Return the oldest and the newest weight version of a rollout's tokens."""
    known = list_versions(rollout.spans)
    return min(known, default=NO_VERSION), max(known, default=NO_VERSION)


def _pack_experts(rollouts: Sequence[Rollout], length: int, experts: int) -> torch.Tensor:
    """Return the expert ids [B, L, layers, top_k] in NeMo-RL's dtype: the narrowest signed one,
    with -1 where no forward pass ran (padding, and the last sampled token)."""
    import torch

    captures = [rollout.routed_experts for rollout in rollouts]
    first = next((capture for capture in captures if capture is not None), None)
    if first is None or any(capture is None for capture in captures):
        raise UsageError(
            "Router replay is on, and the engine reports no experts.",
            "Start its workers with `enable-return-routed-experts: true`.",
        )
    dtype = choose_expert_dtype(experts)
    packed = torch.full((len(captures), length, first.layers, first.top_k), -1, dtype=dtype)
    for row, (rollout, capture) in enumerate(zip(rollouts, captures, strict=True)):
        assert capture is not None
        capture.check(len(rollout.prompt_ids) + len(rollout.token_ids), experts)
        packed[row, capture.start : capture.end] = torch.from_numpy(capture.ids.astype("int64")).to(
            dtype
        )
    return packed


def choose_expert_dtype(experts: int) -> torch.dtype:
    """Return the narrowest signed dtype that holds all expert ids and -1."""
    import torch

    for dtype in (torch.int8, torch.int16):
        if experts - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32
