"""Bodies with a trainer's log-probs, good and bad, and the replies that they are compared with."""

from __future__ import annotations

from typing import Any

from rollway.integrations.prime_rl.trainer_logprobs import MAX_VALUES

TRAINER, ENGINE = [-0.1, -2.0, -3.5, -0.2], [-0.1, -2.1, -3.4, -0.9]


def make_sample(trainer: list[float], engine: list[float], **more: Any) -> dict[str, Any]:
    return {"trainer_logprobs": trainer, "inference_logprobs": engine, **more}


def reply(request_id: str, logprobs: list[float] | None) -> dict[str, Any]:
    content = [{"token": f"token_id:{n}", "logprob": lp} for n, lp in enumerate(logprobs or [])]
    entry = {"logprobs": None if logprobs is None else {"content": content}}
    return {"request_id": request_id, "choices": [entry]}


GOOD = make_sample(TRAINER, ENGINE)
BAD_BODIES: dict[str, Any] = {
    "no JSON": b"{",
    "nothing": b"",
    "no object": b"[]",
    "deep nesting": b'{"samples": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep nesting of values": b'{"samples": [{"trainer_logprobs": ' + b"[" * 100_000,
    "not UTF-8": b'{"samples": [{"env": "\xff", "trainer_logprobs": [0]}]}',
    "a lone surrogate": b'{"samples": [{"trainer_logprobs": [0], "env": "\\ud800"}]}',
    "NaN": b'{"samples": [{"trainer_logprobs": [NaN], "inference_logprobs": [0]}]}',
    "Infinity": b'{"samples": [{"trainer_logprobs": [-Infinity], "inference_logprobs": [0]}]}',
    "1e400": b'{"samples": [{"trainer_logprobs": [-1e400], "inference_logprobs": [0]}]}',
    "too many values": b'{"samples": [' + b"0," * (MAX_VALUES + 1) + b"0]}",
    "no samples": {},
    "samples that are empty": {"samples": []},
    "samples that are a text": {"samples": "abc"},
    "an unknown field": {"samples": [GOOD], "version": 1},
    "an unknown field of a sample": {"samples": [{**GOOD, "logprobs": []}]},
    "a step that is a text": {"samples": [GOOD], "step": "step_3"},
    "a step below 0": {"samples": [GOOD], "step": -1},
    "a step beyond 64 bits": {"samples": [GOOD], "step": 2**70},
    "a step that is a flag": {"samples": [GOOD], "step": True},
    "texts as log-probs": {"samples": [make_sample(["-1"], [-1])]},  # type: ignore[list-item]
    "flags as log-probs": {"samples": [make_sample([True], [-1])]},
    "null as a log-prob": {"samples": [make_sample([None], [-1])]},  # type: ignore[list-item]
    "a log-prob above 0": {"samples": [make_sample([0.5], [-1])]},
    "a sampled log-prob above 0": {"samples": [make_sample([-1], [0.5])]},
    "a log-prob too few": {"samples": [make_sample([-1, -1], [-1])]},
    "a mask of another length": {"samples": [{**GOOD, "mask": [1]}]},
    "a mask of other numbers": {"samples": [{**GOOD, "mask": [1, 1, 1, 2]}]},
    "a mask that selects nothing": {"samples": [{**GOOD, "mask": [0, 0, 0, 0]}]},
    "an entropy of another length": {"samples": [{**GOOD, "entropy": [1.0]}]},
    "an entropy below 0": {"samples": [{**GOOD, "entropy": [-1.0] * 4}]},
    "no tokens": {"samples": [make_sample([], [])]},
    "neither log-probs nor an id": {"samples": [{"trainer_logprobs": TRAINER}]},
    "both": {"samples": [{**GOOD, "request_id": "a"}]},
    "an environment called all": {"samples": [{**GOOD, "env": "all"}]},
    "an environment with a line break": {"samples": [{**GOOD, "env": "a\nb"}]},
    "a long environment": {"samples": [{**GOOD, "env": "a" * 101}]},
    "too many environments": {"samples": [{**GOOD, "env": str(n)} for n in range(300)]},
    "too many samples": {"samples": [{"trainer_logprobs": []}] * 65_537},
}  # fmt: skip
