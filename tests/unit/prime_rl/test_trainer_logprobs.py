"""The trainer's log-probs against those that were sampled, in prime-rl's figures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollway.errors import UsageError
from rollway.integrations.prime_rl.trainer_logprobs import MismatchRecord
from tests.unit.prime_rl.trainer_bodies import (
    BAD_BODIES,
    ENGINE,
    GOOD,
    TRAINER,
    make_sample,
    reply,
)


def add(record: MismatchRecord, *samples: dict[str, Any], **more: Any) -> dict[str, Any]:
    raw = json.dumps({"samples": list(samples), **more}).encode()
    return record.add(record.read(raw))


def compute_kl(trainer: list[float], engine: list[float]) -> np.ndarray[Any, Any]:
    """prime-rl's own formula."""
    d = np.array(trainer) - np.array(engine)
    return np.exp(d) - d - 1


def test_figures_are_prime_rls_over_the_selected_tokens() -> None:
    record = MismatchRecord()
    answer = add(record, make_sample(TRAINER, ENGINE, mask=[1, 1, 0, True], env="math"), step=3)
    kl = compute_kl(TRAINER, ENGINE)[[0, 1, 3]]
    expected = {"mean": kl.mean(), "std": kl.std(ddof=1), "max": kl.max()}  # torch's deviation
    assert answer["tokens"] == 3 and answer["step"] == 3
    for env in ("all", "math"):
        for name, value in expected.items():
            assert answer["metrics"][f"mismatch_kl/{env}/{name}"] == pytest.approx(value)
    assert "kl_ent_ratio/mean" not in answer["metrics"]


def test_parts_of_a_step_add_up_to_the_whole() -> None:
    """Ranks of a trainer send what they have; the figures are those of one body."""
    random = np.random.default_rng(0)
    engine = [(-random.exponential(2.0, 50)).tolist() for _ in range(6)]
    trainer = [(np.minimum(np.array(e) + random.normal(0, 0.01, 50), 0)).tolist() for e in engine]
    envs = ["math", "code", ""] * 2
    samples = [
        make_sample(t, e, env=env, entropy=[1.5] * 50)
        for t, e, env in zip(trainer, engine, envs, strict=True)
    ]
    parts, whole = MismatchRecord(), MismatchRecord()
    for sample in samples:
        in_parts = add(parts, sample, step=1)
    at_once = add(whole, *samples, step=1)
    assert in_parts["tokens"] == at_once["tokens"] == 300
    assert in_parts["metrics"] == pytest.approx(at_once["metrics"])
    kl = np.concatenate([compute_kl(t, e) for t, e in zip(trainer, engine, strict=True)])
    assert at_once["metrics"]["mismatch_kl/all/std"] == pytest.approx(kl.std(ddof=1))
    assert at_once["metrics"]["kl_ent_ratio/mean"] == pytest.approx(kl.mean() / 1.5)
    assert set(parts.envs) == {"all", "math", "code"}
    # Another step begins anew, and so does a body without one.
    for more in ({"step": 2}, {}, {}):
        assert add(parts, make_sample(TRAINER, ENGINE), **more)["tokens"] == 4


def test_prometheus_has_the_trainers_names() -> None:
    record = MismatchRecord()
    assert record.format() == ""
    sample = make_sample(TRAINER, ENGINE, env='ma"th', entropy=[1.0, 2.0, 3.0, 2.0])
    add(record, sample)
    lines = record.format().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    mean = compute_kl(TRAINER, ENGINE).mean()
    assert float(values["trainer_mismatch_kl"]) == pytest.approx(mean)
    assert float(values["trainer_kl_ent_ratio"]) == pytest.approx(mean / 2.0)
    assert float(values['mismatch_kl{env="all",stat="mean"}']) == pytest.approx(mean)
    assert 'mismatch_kl{env="ma\\"th",stat="max"}' in values
    assert len([line for line in lines if line.startswith("# TYPE mismatch_kl")]) == 1


def test_replies_are_remembered_by_their_id_and_for_a_bounded_time() -> None:
    record = MismatchRecord(remembered_bytes=1000)
    record.remember(reply("a", ENGINE))
    record.remember(reply("none", None))
    answer = add(record, {"trainer_logprobs": TRAINER, "request_id": "a"})
    mean = compute_kl(TRAINER, ENGINE).mean()
    assert answer["metrics"]["mismatch_kl/all/mean"] == pytest.approx(mean)
    for number in range(100):
        record.remember(reply(f"r{number % 7}", ENGINE))
        assert record._bytes <= 1000
    assert len(record._replies) == 4 and "r1" in record._replies
    for name in ("a", "none", "unknown"):
        with pytest.raises(UsageError, match="remembered"):
            add(record, {"trainer_logprobs": TRAINER, "request_id": name})
    record.remember(reply("huge", [-1.0] * 1000))  # larger than all of it
    assert record._bytes == 0 and not record._replies


@pytest.mark.parametrize("label", BAD_BODIES)
def test_a_bad_body_is_refused_and_changes_nothing(label: str) -> None:
    record = MismatchRecord()
    before = add(record, GOOD, step=1)
    body = BAD_BODIES[label]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(UsageError):
        record.add(record.read(raw))
    assert record.as_json() == before
