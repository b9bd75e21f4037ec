"""Rollouts that NeMo-RL's actor would refuse, and the dtypes of those that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollway.integrations.nemo_rl.gym_results import POSTPROCESS, protect_rollouts
from tests.awkward_tokenizer import make


class Actor:
    """As NeMo-RL's: it raises for a result without tokens."""

    def _postprocess_nemo_gym_to_nemo_rl_result(
        self, row: Any, result: Any, tokenizer: Any, **options: Any
    ) -> dict[str, Any]:
        log: list[dict[str, Any]] = []
        for item in result["response"]["output"]:
            log.append({"role": "user", "token_ids": torch.tensor(item["prompt_token_ids"])})
            log.append(
                {
                    "role": "assistant",
                    "token_ids": torch.tensor(item["generation_token_ids"]),
                    "generation_logprobs": torch.tensor(item["generation_log_probs"]),
                }
            )
        if not log:
            raise ValueError("no generation data")
        return {"message_log": log, "input_message_log": log[:1], "full_result": result}


@pytest.fixture
def convert() -> Any:
    actor_class = type("Other", (Actor,), {})
    # Ray keeps the class itself behind the remote one.
    remote = type(
        "Remote", (), {"__ray_metadata__": type("M", (), {"modified_class": actor_class})}
    )
    protect_rollouts(remote)
    protect_rollouts(remote)  # the second does nothing
    return getattr(actor_class(), POSTPROCESS)


def test_ids_are_int64_and_logprobs_float32(convert: Any) -> None:
    item = {"prompt_token_ids": [1.0], "generation_token_ids": [2.0], "generation_log_probs": [0]}
    log = convert({}, {"response": {"output": [item]}}, make())["message_log"]
    assert [message["token_ids"].dtype for message in log] == [torch.int64] * 2
    assert log[1]["generation_logprobs"].dtype == torch.float32


@pytest.mark.parametrize("output", [[], [{"type": "message", "generation_token_ids": []}]])
def test_a_rollout_without_tokens_has_no_reward_and_no_loss(convert: Any, output: Any) -> None:
    result = {"response": {"output": output}, "reward": 1.0, "instance_config": {"a": 1}}
    rollout = convert({}, result, make(), include_initial_multimodal_data=False)
    assert rollout["full_result"]["reward"] == 0.0
    assert rollout["full_result"]["instance_config"] == {"a": 1, "mask_sample": True}
    assert [message["role"] for message in rollout["message_log"]] == ["user", "assistant"]
    assert rollout["input_message_log"] == rollout["message_log"][:1]
    assert all(len(message["token_ids"]) == 1 for message in rollout["message_log"])
    assert rollout["_initial_multimodal_data_omitted"] is False


def test_other_failures_stay_as_they_are(convert: Any) -> None:
    with pytest.raises(KeyError, match="response"):
        convert({}, {}, make())
