"""Two wires for rollouts: token ids in, token ids out, one kind of result.

    completions   Dynamo's /v1/completions with `nvext`: taints, stamps, the worker's id, KV hits
    vllm          /v1/completions of a plain vLLM server: it has no router, so no taints

Both send prompts as ids, so no tokenizer touches them, and every sampling parameter, because a
checkpoint's generation_config would fill in missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollway.errors import UsageError
from rollway.rollout.completion import Assembly, Nvext, Usage, only_choice, parse
from rollway.rollout.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Wire:
    """A way to request a rollout."""

    name: str
    path: str
    request: Callable[..., dict[str, Any]]
    """Builds the body: model, prompt ids and sampling; by keyword `cache_salt`, `required_taint`,
    `pin`, `stamped`, `stream` and `prompt_logprobs`, of which a wire ignores those that it does not
    support."""
    assembly: Callable[[Sampling, int], Assembly]
    routed: bool = False
    """Whether it respects taints and pins, and names the worker and its versions."""


# --- Dynamo's completions -----------------------------------------------------------------------

# The plain reason is "stop" for cancelled requests too; the detailed reason tells them apart.
_EXTRA_FIELDS = ["completion_token_ids", "worker_id", "detailed_finish_reason"]
# The frontend ignores the second, by which the worker knows what to put into the first.
STAMP_FIELDS = ["engine_data", "rollway_versions"]


def completion_request(
    model: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    cache_salt: str | None = None,
    required_taint: str | None = None,
    pin: int | None = None,
    stamped: bool = False,
    stream: bool = False,
    prompt_logprobs: bool = False,
) -> dict[str, Any]:
    """Build a request for Dynamo's completions.

    With `nvext.token_data` the worker ignores the checkpoint's generation_config. Dynamo still
    requires a non-empty `prompt`."""
    extra = [*_EXTRA_FIELDS, "routed_experts"] if sampling.routed_experts else _EXTRA_FIELDS
    if stamped:
        extra = [*extra, *STAMP_FIELDS]
    if prompt_logprobs:
        extra = [*extra, "prompt_logprobs"]
    body: dict[str, Any] = {
        "model": model,
        "prompt": "-",
        "stream": stream,
        "nvext": {
            "token_data": list(prompt_ids),
            "extra_fields": extra,
            **routing_fields(cache_salt, required_taint, pin),
        },
        **sampling.to_fields(),
    }
    if prompt_logprobs:
        body["prompt_logprobs"] = 0  # no alternatives: the prompt's own tokens alone
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def routing_fields(
    cache_salt: str | None, required_taint: str | None, pin: int | None = None
) -> dict[str, Any]:
    """Return the nvext fields that limit the workers and the KV cache of a request."""
    nvext: dict[str, Any] = {}
    if cache_salt is not None:
        nvext["cache_salt"] = cache_salt
    if required_taint is not None:
        nvext["routing_constraints"] = {"required_taints": [required_taint]}
    if pin is not None:
        nvext["backend_instance_id"] = pin
    return nvext


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    routed_experts: Any = None
    prompt_logprobs: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    nvext: Nvext | None = None
    usage: Usage | None = None


class DynamoAssembly(Assembly):
    """Collects answers of /v1/completions. Dynamo has ids and all the rest under `nvext`, a plain
    vLLM server in the choice."""

    def add(self, raw: Any) -> list[int]:
        answer = parse(raw, _Answer)
        choice, nvext = only_choice(answer.choices) or _Choice(), answer.nvext or Nvext()
        self._finish = self._finish or choice.finish_reason
        self._experts = choice.routed_experts or self._experts
        self._prompt_logprobs = choice.prompt_logprobs or self._prompt_logprobs
        if choice.logprobs is not None:
            self._logprobs += choice.logprobs.token_logprobs
        self._add_usage(answer.usage)
        tokens = self._add_nvext(nvext)
        return tokens or self._add_ids(choice.token_ids)


COMPLETIONS = Wire(
    "completions", "/v1/completions", completion_request, DynamoAssembly, routed=True
)


# --- a plain vLLM server ------------------------------------------------------------------------


def vllm_request(
    model: str, prompt_ids: Sequence[int], sampling: Sampling, *, cache_salt: str | None = None,
    stream: bool = False, prompt_logprobs: bool = False, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Build a request for a plain vLLM server, which has no router for taints and pins."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_ids),
        "return_token_ids": True,
        "stream": stream,
        **sampling.to_fields(),
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if prompt_logprobs:
        body["prompt_logprobs"] = 0
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


VLLM = Wire("vllm", "/v1/completions", vllm_request, DynamoAssembly)

WIRES = {wire.name: wire for wire in (COMPLETIONS, VLLM)}


# --- choosing -------------------------------------------------------------------------------------


def get_wire(name: str) -> Wire:
    """Return the wire of that name."""
    if name not in WIRES:
        raise UsageError(f"There is no wire `{name}`.", f"Use one of: {', '.join(WIRES)}.")
    return WIRES[name]
