"""Spans: OpenTelemetry's own messages read what is sent; nothing is loaded without an endpoint."""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway.errors import RolloutError
from rollway.http import Http
from rollway.observe import traces
from rollway.observe.traces import (
    FLUSH_SECONDS,
    MOST_ROLLOUTS,
    Tracer,
    find_endpoint,
    open_tracer,
)
from rollway.rollout.client import Rollouts
from rollway.rollout.sampling import Sampling
from rollway.stack.commands import make_traces_env
from rollway.versions import FleetVersions
from tests.observe.otlp_receiver import Receiver, open_grpc_receiver, open_receiver
from tests.waiting import wait_until

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with open_receiver() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.url)
        yield receiver


def open_now() -> Tracer:
    tracer = open_tracer()
    assert tracer is not None
    return tracer


def test_nothing_of_opentelemetry_is_loaded_without_an_endpoint() -> None:
    script = (
        "import os, sys, rollway, rollway.aio\n"
        "from rollway.observe.traces import open_tracer\n"
        "assert open_tracer() is None\n"
        "os.environ |= {'OTEL_SDK_DISABLED': 'true', 'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'}\n"
        "assert open_tracer() is None\n"
        "heavy = ('opentelemetry', 'requests', 'grpc')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_endpoint_of_traces_is_taken_as_it_is() -> None:
    own, base = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/"
    assert find_endpoint({ENDPOINT: base}) == "http://collector:4318/v1/traces"
    assert find_endpoint({ENDPOINT: base, own: "http://tempo/spans"}) == "http://tempo/spans"
    assert find_endpoint({own: "http://x", "OTEL_TRACES_EXPORTER": "none"}) is None
    assert make_traces_env({}) == {}
    env = make_traces_env({ENDPOINT: base})
    assert env["OTEL_EXPORT_ENABLED"] == "true"
    assert env["OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"] == "http://collector:4318/v1/logs"


def test_a_protocol_that_is_not_spoken_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert open_tracer() is None and open_tracer() is None
    assert caplog.text.count("their protocol is http/json") == 1


@pytest.mark.parametrize("error", [TypeError, ImportError, RuntimeError])
def test_a_broken_package_costs_spans_and_nothing_else(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As protobuf's, when another package has brought a version that does not fit."""

    def fail(_: str) -> None:
        raise error("Descriptors cannot be created directly.\nDowngrade the package.")

    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setattr(traces.importlib, "import_module", fail)
    monkeypatch.setattr(traces, "_tracer", None)
    traces._find_exporter.cache_clear()
    try:
        assert open_tracer() is None and open_tracer() is None
    finally:
        traces._find_exporter.cache_clear()
    (message,) = caplog.messages
    assert "Descriptors cannot be created directly. pip install" in message and "\n" not in message


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_receiver_that_is_gone_is_said_once(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(traces, "_tracer", None)
    monkeypatch.setattr(traces._outages, "_last", -math.inf)
    tracer = open_now()
    for _ in range(3):
        tracer.begin("lost").finish({})
        tracer.flush()
    names = [record.name for record in caplog.records]
    assert sum(name.startswith("opentelemetry.exporter") for name in names) == 1, caplog.text


@pytest.mark.parametrize(("given", "size"), [(None, 16_384), ("512", 512)])
def test_the_spans_of_a_large_refit_fit_into_the_queue(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, given: str | None, size: int
) -> None:
    if given is not None:
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", given)
    monkeypatch.setattr(traces, "_tracer", None)
    tracer = open_now()
    receiver.status = 503  # nothing is taken out of the queue for good
    for number in range(3_000):
        tracer.begin(f"{number}").finish({})
    receiver.status = 200
    tracer.flush()
    wait_until(lambda: bool(receiver.find("2999")))
    # One batch of 512 is in the exporter's hands, which tries again; the queue has the others.
    received = {span.name for span in receiver.spans}
    assert (len(received) > 2_000) is (size > 3_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999"), ("OTEL_SPAN_EVENT_COUNT_LIMIT", "many")],
)
def test_a_variable_that_opentelemetry_refuses_costs_spans_and_nothing_else(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    tracer = Tracer(open_now().url, open_now()._make_exporter)
    for _ in range(2):
        sample(CannedHttp(ANSWER), tracer)
        tracer.begin("rollway.refit").add_child("a worker", 1, 2, {}).finish({})
    assert caplog.text.count("have no spans: OpenTelemetry") == 1
    tracer.flush()


@pytest.fixture
def grpc_receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with open_grpc_receiver() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        yield receiver


def test_spans_go_by_grpc_where_the_environment_says_so(
    grpc_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20t,x-a=b")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    env = make_traces_env(os.environ)
    assert env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == grpc_receiver.url
    assert env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "grpc"
    tracer = open_now()
    tracer.begin("n").finish({"rollway.tokens": 3})
    tracer.flush()
    (span,) = grpc_receiver.spans
    assert (span.service, span.name, span.attributes) == ("rollway", "n", {"rollway.tokens": 3})
    headers = grpc_receiver.headers[-1]
    assert headers["authorization"] == "Bearer t" and headers["x-a"] == "b"


def test_grpc_by_https_checks_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; it makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with open_grpc_receiver((key.read_bytes(), certificate.read_bytes())) as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.url)
        for trusts in (False, True):
            monkeypatch.setattr(traces, "_tracer", None)
            if trusts:
                monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate))
            tracer = open_now()
            tracer.begin("n").finish({})
            tracer.flush()
            assert [span.name for span in receiver.spans] == ["n"] * trusts


def test_a_forked_child_sends_its_own_spans(grpc_receiver: Receiver) -> None:
    """Trainers fork before their first rollout."""
    script = (
        "import os\n"
        "from rollway.observe.traces import open_tracer\n"
        "tracer = open_tracer()\n"
        "child = os.fork()\n"
        "tracer.begin('parent' if child else 'child').finish({})\n"
        "tracer.flush()\n"
        "if not child: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert {span.name for span in grpc_receiver.spans} == {"parent", "child"}


def test_a_step_is_the_parent_of_what_happens_in_it(receiver: Receiver) -> None:
    tracer = open_now()
    with rollway.observe.step(7):
        tracer.begin("inside").finish({})
    tracer.begin("outside").finish({"missing": None})
    tracer.flush()
    (step,), (inside,), (outside,) = map(receiver.find, ("rollway.step", "inside", "outside"))
    assert step.attributes == {"rollway.step": 7} and step.service == "rollway"
    assert (inside.trace, inside.parent) == (step.trace, step.span)
    assert outside.trace != step.trace and outside.parent == "" and outside.attributes == {}


def test_the_callers_own_span_is_the_parent(receiver: Receiver) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    own = TracerProvider().get_tracer("trainer")
    tracer = open_now()
    with own.start_as_current_span("train") as span:
        child = tracer.begin("child")
    child.finish({})
    tracer.flush()
    context = span.get_span_context()
    (received,) = receiver.spans
    assert received.trace == f"{context.trace_id:032x}"
    assert received.parent == f"{context.span_id:016x}"


def test_spans_go_to_the_endpoint_of_the_tracer(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable may be gone by the first span, which opens the connection."""
    tracer = open_now()
    monkeypatch.delenv(ENDPOINT)
    tracer.begin("late").finish({})
    tracer.flush()
    assert [span.name for span in receiver.spans] == ["late"]


def test_the_sampler_of_the_environment_decides(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = open_now()
    span = tracer.begin("n")
    span.finish({})
    tracer.flush()
    assert span.header.endswith("-00") and receiver.spans == []


def test_headers_and_compression_are_those_of_the_environment(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t,x-a=b")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    tracer = open_now()
    tracer.begin("n").finish({})
    tracer.flush()
    assert [span.name for span in receiver.spans] == ["n"]
    headers = {name.lower(): value for name, value in receiver.headers[-1].items()}
    assert headers["authorization"] == "Bearer t" and headers["x-a"] == "b"


def test_a_receiver_that_refuses_costs_spans_and_nothing_else(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never waited for while spans begin and end, and only briefly at the end."""
    monkeypatch.setattr(traces, "FLUSH_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    receiver.status = 503
    tracer = open_now()
    began = time.monotonic()
    for _ in range(100):
        tracer.begin("lost").finish({})
    tracer.flush()
    assert time.monotonic() - began < 10.0  # half of what one export may take
    receiver.status = 200
    wait_until(lambda: bool(receiver.spans))  # the queue holds the newest
    assert len(receiver.spans) <= 12


def test_a_process_ends_soon_without_its_receiver() -> None:
    script = (
        "from rollway.observe import traces\n"
        "tracer = traces.open_tracer()\n"
        "tracer.begin('lost').finish({})\n"
        "tracer.flush()\n"  # a stack has ended
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60,
                       env={**os.environ, ENDPOINT: url})  # fmt: skip
    assert time.monotonic() - began < 2 * FLUSH_SECONDS  # as OpenTelemetry's own end would take


def test_a_trainers_random_numbers_are_its_own(receiver: Receiver) -> None:
    """Its ranks have one seed; their spans must not have one id, nor change its numbers."""
    tracer, headers = open_now(), set()
    for _ in range(2):
        random.seed(7)
        headers.add(tracer.begin("n").header)
        assert random.random() == random.Random(7).random()
    assert len(headers) == 2


def test_of_very_many_rollouts_some_are_traced(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others carry a parent that is not sampled, so that Dynamo traces none of them."""
    clock = [5 * 10**9]
    monkeypatch.setattr(traces.time, "time_ns", lambda: clock[0])
    tracer = open_now()
    for second in (1, 2):
        clock[0] += 10**9
        spans = [tracer.begin("r", is_client=True) for _ in range(MOST_ROLLOUTS + 50)]
        for span in spans:
            span.add_event("retry", cause="status 503")
            span.finish({})
        assert [span.header[-2:] for span in spans] == ["01"] * MOST_ROLLOUTS + ["00"] * 50
        tracer.begin("refit").finish({})
        tracer.flush()
        assert len(receiver.find("r")) == second * MOST_ROLLOUTS
    assert len(receiver.find("refit")) == 2
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setattr(traces, "_tracer", None)
    everything = [open_now().begin("s", is_client=True) for _ in range(2 * MOST_ROLLOUTS)]
    assert all(span.is_sampled for span in everything)


# --- rollouts ------------------------------------------------------------------------------------


class CannedHttp(Http):
    """Answers at once; a mock, because a failure must come at a chosen attempt."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.answers, self.headers = list(answers), []  # type: ignore[var-annotated]

    async def post(self, url: str, body: Any, *, headers: Any = None, **_: Any) -> Any:
        self.headers.append(dict(headers))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


ANSWER = {
    "choices": [{"index": 0, "finish_reason": "length", "text": ""}],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
    "nvext": {"completion_token_ids": [5, 6], "worker_id": {"decode_worker_id": 2**60 + 1}},
}


def sample(http: CannedHttp, tracer: Tracer | None) -> Any:
    client = Rollouts(http, "http://frontend", "tiny", FleetVersions())
    client.tracer = tracer
    sampling = Sampling(max_tokens=2, logprobs=False)
    return asyncio.run(client.generate([1, 2, 3], sampling))


def test_a_rollout_has_a_span_and_the_frontend_hears_of_it(receiver: Receiver) -> None:
    from rollway.errors import RequestFailed

    tracer = open_now()
    http = CannedHttp(RequestFailed("busy", status=503), ANSWER)
    sample(http, tracer)
    tracer.flush()
    (span,) = receiver.find("rollway.rollout")
    assert span.attributes == {
        "rollway.model": "tiny",
        "rollway.worker": str(2**60 + 1),
        "rollway.tokens": 2,
        "rollway.prompt_tokens": 3,
        "rollway.cached_tokens": 1,
        "rollway.finish_reason": "length",
        "rollway.spans": 1,
    }
    assert span.events == [("retry", {"cause": "status 503", "detail": "busy"})]
    header = f"00-{span.trace}-{span.span}-01"
    assert [headers["traceparent"] for headers in http.headers] == [header] * 2


def test_a_rollout_that_fails_has_a_span_with_its_error(receiver: Receiver) -> None:
    from rollway.errors import RequestFailed

    tracer = open_now()
    with pytest.raises(RolloutError):
        sample(CannedHttp(RequestFailed("no such token", status=400)), tracer)
    tracer.flush()
    (span,) = receiver.find("rollway.rollout")
    assert span.error is not None and "no such token" in span.error


def test_without_traces_no_header_is_sent() -> None:
    http = CannedHttp(ANSWER)
    sample(http, None)
    assert "traceparent" not in http.headers[0]
