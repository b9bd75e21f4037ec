"""Read what a run with the plug-in `verl_record` recorded: requests, samples and weights."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.verl.training import HERE

MODULE = "verl_record"


@dataclass(frozen=True)
class Call:
    """One request for tokens of a trajectory, and its answer."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    step: int | None

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass(frozen=True)
class Sample:
    """A trajectory as the trainer received it."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    steps: list[int]
    """The first and the last step of its tokens, by verl's count."""


@dataclass
class Record:
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """By trajectory, in order."""
    wire: dict[str, list[tuple[list[int], list[int]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By trajectory: the prompts that went to an engine, and its tokens."""
    samples: list[Sample] = field(default_factory=list)

    def trajectory_of(self, sample: Sample) -> list[Call]:
        """Return the calls that a sample came from. Short trajectories may have the same ids; then
        log-probs decide."""
        whole = sample.prompt + sample.response
        matches = [c for c in self.calls.values() if c[-1].sequence[: len(whole)] == whole]
        assert matches, f"no trajectory has these ids: {whole}"
        expected = [
            value for value, counts in zip(sample.logprobs, sample.mask, strict=True) if counts
        ]

        def difference(calls: list[Call]) -> float:
            sampled = [value for call in calls for value in call.logprobs]
            return sum(abs(a - b) for a, b in zip(expected, sampled, strict=False))

        return min(matches, key=difference)


def overrides(directory: Path, sampler: str) -> dict[str, Any]:
    """Return the overrides of a run that records; it needs `MODULE` among its modules."""
    _folder(directory).mkdir()
    return {
        "+actor_rollout_ref.rollout.engine_kwargs.dynamo.affinity": "trajectory",
        "trainer.v1.sampler.custom_sampler.path": HERE / "plugin" / "verl_samples.py",
        "trainer.v1.sampler.custom_sampler.name": sampler,
    }


def read(directory: Path) -> Record:
    record = Record()
    paths = sorted(_folder(directory).glob("*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["kind"] == "call":
            record.calls[line["trajectory"]].append(_make(Call, line))
        elif line["kind"] == "wire":
            record.wire[line["trajectory"]].append((line["prompt"], line["tokens"]))
        else:
            record.samples.append(_make(Sample, line))
    return record


def assert_wire_matches_calls(record: Record) -> None:
    """Assert that nothing is lost or doubled between the engine and verl's client."""
    for trajectory, calls in record.calls.items():
        expected = [(call.prompt, call.tokens) for call in calls if call.tokens]
        assert expected == [piece for piece in record.wire[trajectory] if piece[1]]


def compute_logprobs(directory: Path, step: int | None, calls: Sequence[Call]) -> list[list[float]]:
    """Compute the log-probs of each call's tokens in torch, with the weights of a step."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    loaded = model.load_state_dict(load_file(_folder(directory) / f"{step}.weights"), strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    logprobs = []
    for call in calls:
        with torch.no_grad():
            scores = model(torch.tensor([call.sequence])).logits[0].log_softmax(-1)
        places = range(len(call.prompt) - 1, len(call.sequence) - 1)
        logprobs.append([float(scores[place, call.sequence[place + 1]]) for place in places])
    return logprobs


def _make(kind: type[Any], line: dict[str, Any]) -> Any:
    return kind(**{name: line[name] for name in kind.__dataclass_fields__})


def _folder(directory: Path) -> Path:
    return directory / "record"
