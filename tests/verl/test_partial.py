"""Weights arrive in the middle of long answers: verl trains on trajectories of several versions.

Answers take longer than a step of the trainer and are more than the engine runs at once, so every
update interrupts some. verl's client continues them from the tokens so far, with the new weights.
The plug-in `verl_record` records every request, every sample and the weights of every step; torch
then recomputes the log-probs of each piece with the weights of the step it names.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import Footprint
from tests.verl import recording
from tests.verl.recording import Call, Record, assert_wire_matches_calls
from tests.verl.test_modes import STEPS, separate_engines
from tests.verl.training import Training, prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

ANSWER = 384
ROUNDING = 1e-3
TELLING = 8
"""Tokens that suffice to tell weights apart."""


def run(directory: Path, base_model: Path) -> Training:
    prepare(directory, base_model)
    rollout = "actor_rollout_ref.rollout"
    overrides = {
        **settings(directory, trainer_gpus=1, ray_gpus=2, ray_cpus=40),
        **separate_engines(),
        **recording.overrides(directory, "Async"),
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "data.max_response_length": ANSWER,
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.max_num_seqs": 8,
    }
    return train(directory, overrides, [recording.MODULE])


def test_trajectories_of_several_versions_are_exact(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    training = run(tmp_path, base_model)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS
    spans = [step["training/off_policy/trajectory_spans/max"] for step in training.steps]
    assert max(spans) >= 2, spans
    record = recording.read(tmp_path)
    assert_wire_matches_calls(record)
    assert_samples_are_their_pieces(record)
    assert_logprobs_are_of_their_step(tmp_path, record)
    assert footprint.settle() == {}


def assert_samples_are_their_pieces(record: Record) -> None:
    assert record.samples
    cut = 0
    for sample in record.samples:
        calls = record.trajectory_of(sample)
        *before, _ = calls
        assert all(call.stop_reason == "aborted" for call in before)
        for call, after in pairwise(calls):
            assert after.prompt == call.sequence
        pieces = [call for call in calls if call.tokens]
        assert sample.prompt == calls[0].prompt
        assert sample.response == [token for call in pieces for token in call.tokens]
        assert sample.mask == [1] * len(sample.response)
        sampled = [value for call in pieces for value in call.logprobs]
        assert sample.logprobs == pytest.approx(sampled, abs=1e-6)  # verl keeps them in float32
        assert sample.steps == [pieces[0].step, pieces[-1].step]
        cut += sample.steps[0] != sample.steps[1]
    assert cut, "no trajectory that was trained on spans two versions"


def assert_logprobs_are_of_their_step(directory: Path, record: Record) -> None:
    """Assert that log-probs match the weights of their step, and of no other step."""
    trained = [record.trajectory_of(sample) for sample in record.samples]
    pieces = [call for calls in trained for call in calls if call.tokens and len(calls) > 1]
    steps = {call.step for call in pieces}
    assert None not in steps
    for step in steps:
        of_step = [call for call in pieces if call.step == step]
        others = [call for call in pieces if call.step != step and len(call.tokens) >= TELLING]
        assert all(error < ROUNDING for error in errors(directory, step, of_step))
        assert all(error > 10 * ROUNDING for error in errors(directory, step, others))


def errors(directory: Path, step: int | None, calls: list[Call]) -> list[float]:
    """Return the largest difference in each piece between the engine's log-probs and torch's."""
    computed = recording.compute_logprobs(directory, step, calls)
    return [
        max(abs(a - b) for a, b in zip(call.logprobs, values, strict=True))
        for call, values in zip(calls, computed, strict=True)
    ]
