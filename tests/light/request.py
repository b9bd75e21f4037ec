"""What a request asks for, out of the dictionary Dynamo's frontend sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.light.cache import FAULT

_DEFAULT_TEMPERATURE = 0.2 if FAULT == "generation config" else 1.0


@dataclass(frozen=True, slots=True)
class Params:
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    named_stops: frozenset[int]
    """Stop tokens that the request named, as opposed to the model's own end."""
    temperature: float
    seed: int | None
    logprobs: int | None
    salt: str

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @classmethod
    def read(cls, request: dict[str, Any], vocab: int, max_length: int) -> Params:
        """A ValueError is the client's 400, as with the real worker."""
        stop = request.get("stop_conditions") or {}
        sampling = request.get("sampling_options") or {}
        prompt = _token_ids(request["token_ids"])
        room = max_length - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"The prompt has {len(prompt)} tokens; at most {max_length - 1} fit.")
        if max(prompt) >= vocab or min(prompt) < 0:
            raise ValueError(f"A token id of the prompt is not in the vocabulary of {vocab}.")
        named = frozenset(stop.get("stop_token_ids") or ())
        ends = () if stop.get("ignore_eos") else request.get("eos_token_ids") or ()
        temperature, seed = sampling.get("temperature"), sampling.get("seed")
        asked = stop.get("max_tokens")
        return cls(
            prompt=prompt,
            max_tokens=room if asked is None else min(asked, room),
            min_tokens=stop.get("min_tokens") or 0,
            stops=named | frozenset(ends),
            named_stops=named,
            temperature=_DEFAULT_TEMPERATURE if temperature is None else float(temperature),
            seed=None if seed is None else seed % 2**64,  # numpy takes no negative ones
            logprobs=(request.get("output_options") or {}).get("logprobs"),
            salt=_cache_salt(request),
        )


def _token_ids(raw: Any) -> list[int]:
    if isinstance(raw, bytes | bytearray):
        return np.frombuffer(raw, "<u4").tolist()
    return [int(token) for token in raw]


def _cache_salt(request: dict[str, Any]) -> str:
    nvext = (request.get("extra_args") or {}).get("nvext") or {}
    return str((request.get("routing") or {}).get("cache_salt") or nvext.get("cache_salt") or "")
