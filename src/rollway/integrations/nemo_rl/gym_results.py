"""What NeMo-RL's actor makes of Gym's results, where NeMo-RL itself would end the run.

It is imported in the environment of that actor, which has torch, but not what the gateway needs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

POSTPROCESS = "_postprocess_nemo_gym_to_nemo_rl_result"


def protect_rollouts(actor_class: Any) -> None:
    """Let NeMo-RL's `NemoGym` actor accept every rollout of Gym's. Call it in the driver, before
    the actor is created: Ray sends the class along.

    Its own method raises for a rollout in which nothing was generated, such as a first prompt that
    fills the context, and ends the run. Such a rollout gets no reward, and is masked from the loss.
    Ids become int64 and log-probs float32 tensors, whatever numbers JSON made of them."""
    owner = getattr(getattr(actor_class, "__ray_metadata__", None), "modified_class", actor_class)
    original = getattr(owner, POSTPROCESS)
    if getattr(original, "is_protected", False):
        return

    @functools.wraps(original)
    def postprocess(
        self: Any, row: Any, result: Any, tokenizer: Any, **options: Any
    ) -> dict[str, Any]:
        if isinstance(result, dict) and not has_tokens(result):
            return make_empty_rollout(result, tokenizer, **options)
        rollout: dict[str, Any] = original(self, row, result, tokenizer, **options)
        for message in rollout["message_log"]:
            message["token_ids"] = message["token_ids"].long()
            if "generation_logprobs" in message:
                message["generation_logprobs"] = message["generation_logprobs"].float()
        return rollout

    postprocess.is_protected = True  # type: ignore[attr-defined]
    setattr(owner, POSTPROCESS, postprocess)


def has_tokens(result: Mapping[str, Any]) -> bool:
    """Return whether a turn of a result has sampled tokens."""
    return any(item.get("generation_token_ids") for item in result["response"]["output"])


def make_empty_rollout(
    result: dict[str, Any], tokenizer: Any, *, include_initial_multimodal_data: bool = True
) -> dict[str, Any]:
    """Return NeMo-RL's form of a rollout without tokens. Batches need one of each role: both have
    a token that nobody sampled, and `mask_sample` keeps them out of the loss."""
    import torch

    ids = torch.tensor([tokenizer.eos_token_id or 0])
    user = {"role": "user", "content": "", "token_ids": ids}
    assistant = {
        "role": "assistant",
        "content": "",
        "token_ids": ids.clone(),
        "generation_logprobs": torch.zeros(1),
        "is_invalid_tool_call": False,
        "has_malformed_thinking": False,
    }
    flags = {**(result.get("instance_config") or {}), "mask_sample": True}
    full = {**result, "reward": 0.0, "instance_config": flags}
    rollout: dict[str, Any] = {
        "message_log": [user, assistant],
        "input_message_log": [user],
        "full_result": full,
    }
    if not include_initial_multimodal_data:
        rollout["_initial_multimodal_data_omitted"] = False
    return rollout
