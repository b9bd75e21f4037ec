"""Run NeMo-RL's own conversion of Gym's results over results from stdin; print what it makes of
each. It runs in the environment of NeMo-RL, with a checkout on PYTHONPATH."""

from __future__ import annotations

import json
import sys
import typing
from types import SimpleNamespace
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):  # NeMo-RL itself needs 3.13, whose TypedDict pydantic accepts
    typing.TypedDict = typing_extensions.TypedDict

from nemo_rl.environments.nemo_gym import NemoGym  # type: ignore[import-not-found]
from transformers import AutoTokenizer


def judge(result: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the dtypes and lengths of the messages, or the error."""
    method = NemoGym.__ray_metadata__.modified_class._postprocess_nemo_gym_to_nemo_rl_result
    try:
        rollout = method(
            SimpleNamespace(cfg={}), {"responses_create_params": {}}, result, tokenizer
        )
    except (AssertionError, ValueError) as error:
        return {"error": str(error)[:500]}
    log = rollout["message_log"]
    return {
        "roles": [message["role"] for message in log],
        "lengths": [len(message["token_ids"]) for message in log],
        "dtypes": sorted({str(message["token_ids"].dtype) for message in log}),
        "logprobs": sorted({str(m["generation_logprobs"].dtype) for m in log[1::2]}),
    }


if __name__ == "__main__":
    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    print(json.dumps([judge(result, tokenizer) for result in job["results"]]))
