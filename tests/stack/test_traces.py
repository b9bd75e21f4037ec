"""Traces of light workers behind a real frontend, sent to a receiver of OTLP."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollway
from rollway.observe import traces
from tests.light.spec import light
from tests.observe.otlp_receiver import LOGS, TRACES, open_grpc_receiver, open_receiver
from tests.stack.policies import Policy
from tests.waiting import wait_until

PHASES = ("rollway.refit.preflight", "rollway.refit.pause", "rollway.refit.load")


def test_one_trace_has_a_step_with_its_refit_its_rollouts_and_the_frontends_spans(
    base_model: Path, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        with rollway.up({**light(base_model, "traced"), "observe": "off"}) as stack:
            with rollway.observe.step(1):
                before = stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4), n=2)
                report = stack.refit(1, policies[1].path)
                after = stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4), n=2)
            with monkeypatch.context() as limits:  # too many in this second: nobody traces them
                limits.setattr(traces, "MOST_ROLLOUTS", 0)
                stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4), n=2)
            stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4))
            wait_until(lambda: len(receiver.find("http-request")) >= 5)
            wait_until(lambda: len(receiver.find("rollway.rollout")) == 5)
    parents = {span.parent for span in receiver.find("http-request")} - {""}
    assert parents == {span.span for span in receiver.find("rollway.rollout")}
    (step,) = receiver.find("rollway.step")
    own = {span.span: span for span in receiver.spans if span.trace == step.trace}
    rollouts = [span for span in own.values() if span.name == "rollway.rollout"]
    sampled = [*before, *after]
    assert sorted(span.attributes["rollway.version"] for span in rollouts) == [0, 0, 1, 1]
    assert {span.attributes["rollway.worker"] for span in rollouts} == {
        str(rollout.worker_id) for rollout in sampled
    }
    assert sum(span.attributes["rollway.cached_tokens"] for span in rollouts) == sum(
        rollout.cached_tokens for rollout in sampled
    )
    frontend = [span for span in own.values() if span.name == "http-request"]
    assert {span.parent for span in frontend} >= {span.span for span in rollouts}
    (refit,) = [span for span in own.values() if span.name == "rollway.refit"]
    assert refit.parent == step.span and refit.attributes["rollway.version"] == 1
    workers = [span for span in own.values() if span.name == "rollway.refit.worker"]
    assert {span.parent for span in workers} == {refit.span}
    times = {str(worker.instance_id): worker for worker in report.workers}
    assert {span.attributes["rollway.worker"] for span in workers} == set(times)
    for worker in workers:
        told = times[worker.attributes["rollway.worker"]]
        seconds = {s.name: s.seconds for s in own.values() if s.parent == worker.span}
        assert set(PHASES) <= set(seconds)
        assert seconds["rollway.refit.load"] == pytest.approx(told.update_seconds, abs=1e-6)
    assert receiver.paths <= {"/v1/traces", "/v1/logs"}


def test_dynamo_and_rollway_send_one_trace_by_grpc(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_grpc_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        with rollway.up({**light(base_model, "traced-grpc"), "observe": "off"}) as stack:
            stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4))
            wait_until(lambda: len(receiver.find("rollway.rollout")) == 1)
            (rollout,) = receiver.find("rollway.rollout")
            wait_until(lambda: any(
                span.parent == rollout.span for span in receiver.find("http-request")
            ))  # fmt: skip
    assert receiver.paths <= {TRACES, LOGS}


def test_the_engines_spans_are_in_the_trace_of_a_rollout(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real vLLM, which is told where to send them."""
    model = {"path": str(base_model), "name": "tiny", "args": {"max-model-len": 256}}
    with open_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        with rollway.up({"name": "traced-vllm", "models": [model]}) as stack:
            stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4))
            wait_until(lambda: len(receiver.find("rollway.rollout")) == 1)
            (rollout,) = receiver.find("rollway.rollout")
            wait_until(lambda: any(
                span.trace == rollout.trace for span in receiver.find("llm_request")
            ))  # fmt: skip
