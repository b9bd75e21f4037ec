"""A request of verl as a rollout of ours, and the rollout as verl's `TokenOutput`.

Ids and log-probs are what the engine sampled, or it is an error: an answer without them would train
on something else and every metric would look fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollway.errors import UsageError
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Scores
from rollway.rollout.trajectory import Rollout
from rollway.weights.adapter import version_of

_TAKEN = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "ignore_eos", "seed"),
}
_OURS = {"max_tokens", "max_new_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "n"}
StepOf = Callable[[int | None], int | None]
"""The trainer's step whose weights a version is."""


def sampling_of(
    params: Mapping[str, Any], prompt_tokens: int, rollout: Any, *, routed_experts: bool = False
) -> Sampling | None:
    """None when the prompt leaves no room for an answer."""
    unknown = sorted(params.keys() - _TAKEN - _OURS)
    if unknown:
        raise UsageError(
            f"rollout.name=dynamo does not know the sampling parameter `{unknown[0]}`.",
            "Leave it out; what is known is in docs/verl.md.",
        )
    if params.get("n") not in (None, 1):
        raise UsageError("verl asks for one answer at a time, not n of them.")
    most = int(rollout.prompt_length + rollout.response_length) - prompt_tokens
    asked = params.get("max_tokens", params.get("max_new_tokens"))
    max_tokens = min(int(rollout.response_length), most) if asked is None else min(int(asked), most)
    if max_tokens < 1:
        return None
    given = {name: params[name] for name in _TAKEN & params.keys() if params[name] is not None}
    # verl's own servers read True and 0 alike: of the sampled token.
    logprobs = params.get("logprobs")
    return Sampling(
        max_tokens=max_tokens,
        logprobs=logprobs is not None and logprobs is not False,
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        routed_experts=routed_experts,
        **given,
    )


def refuse_media(**media: Any) -> None:
    for name, value in media.items():
        if value is not None and len(value):
            raise UsageError(
                f"A request has {name}, and rollout.name=dynamo takes token ids alone.",
                "Train this model with rollout.name=vllm.",
            )


def output_of(rollout: Rollout, step_of: StepOf) -> dict[str, Any]:
    """The fields of a `TokenOutput`. No engine tells how often it preempted a request, so
    `num_preempted` stays None."""
    aborted = rollout.finish_reason == "aborted"
    if aborted and not rollout.token_ids:
        return nothing("aborted")
    versions = [span.version for span in rollout.spans if span.end > span.start]
    if rollout.adapter is not None:  # one adapter made all tokens, whatever was refitted below it
        versions = [version_of(rollout.adapter)] * len(versions)
    steps = [step_of(version) for version in versions]
    extra: dict[str, Any] = {"num_cached_tokens": rollout.cached_tokens}
    if steps:
        known = [step for step in steps if step is not None]
        extra["global_steps"] = steps[-1]
        extra["min_global_steps"] = min(known, default=None)
        extra["max_global_steps"] = max(known, default=None)
    return {
        "token_ids": rollout.token_ids,
        "log_probs": rollout.logprobs,
        "routed_experts": experts_of(rollout),
        "stop_reason": "aborted" if aborted else "completed",
        "extra_fields": extra,
    }


def experts_of(rollout: Rollout) -> Any:
    """[tokens - 1, layers, top_k] of prompt and answer. verl's client appends to the rows of a cut
    answer as many as its continuation has tokens: they meet only if both lack the last."""
    if rollout.routed_experts is None:
        return None
    return rollout.routed_experts.ids[: len(rollout.prompt_ids) + len(rollout.token_ids) - 1]


def nothing(stop_reason: str, step: int | None = None) -> dict[str, Any]:
    """An answer without a token. An aborted one has no step, since nothing was sampled; a whole
    one, which verl counts with the others, has that of the weights it did not need."""
    extra = {} if step is None else {"global_steps": step}
    return {"token_ids": [], "log_probs": [], "stop_reason": stop_reason, "extra_fields": extra}


def scores_of(scores: Scores, step_of: StepOf) -> dict[str, Any]:
    """A teacher's answer: a row for each prompt token but the first, and one of zeros at the end,
    as verl's own servers give it."""
    rows = [[float(value or 0.0)] for value in scores.logprobs[1:]] + [[0.0]]
    ids = [[token] for token in scores.token_ids[1:]] + [[0]]
    return {
        "token_ids": [],
        "log_probs": [],
        "stop_reason": "completed",
        "extra_fields": {
            "prompt_ids": ids,
            "prompt_logprobs": rows,
            "global_steps": step_of(scores.weight_version),
        },
    }
