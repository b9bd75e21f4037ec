"""Spans of steps, refits and rollouts, if OpenTelemetry's environment variables name an endpoint.

    rollway.step ─┬─ rollway.rollout ── Dynamo's http-request ── … ── the engine's
                  ├─ rollway.rollout …
                  └─ rollway.refit ─┬─ a worker ─┬─ preflight
                                    └─ a worker  └─ pause, load, open

    span.finish() ──► a bounded queue ──► a thread, every two seconds ──► POST /v1/traces, or gRPC

A rollout outside of a step is a child of the caller's own span, or begins a trace. Nothing of
OpenTelemetry is loaded unless an endpoint is set. Finishing a span costs an entry in a queue; a
receiver that is slow or gone costs the spans that do not fit, and nothing else.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from rollway.observe.otlp import (
    GRPC,
    HTTP,
    Attributes,
    encode_request,
    encode_span,
    find_endpoint,
    make_poster,
    read_protocol,
)

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADER = "traceparent"
LARGEST_QUEUE = 16_384
FLUSH_SECONDS = 2.0
MOST_ROLLOUTS = 100
"""Per second, of which spans are sent, unless the environment has a sampler of its own. A span
takes 6 µs of the client, sending them a millisecond each time, and Dynamo's frontend far more."""
_BATCH = 1024
_INTERNAL, _CLIENT = 1, 3
_NEEDED = ("opentelemetry", "opentelemetry.sdk")
_TRANSPORTS = {HTTP: "requests", GRPC: "grpc"}
"""What speaks each protocol."""

_tracer: Tracer | None = None
_lock = threading.Lock()
_parent: Span | None = None
"""The step of the trainer that is under way."""


class Span:
    """Something that takes time. `Tracer.begin` makes it, `finish` hands it on."""

    __slots__ = (
        "_tracer",
        "attributes",
        "began",
        "ended",
        "error",
        "events",
        "header",
        "is_sampled",
        "kind",
        "name",
        "parent_id",
        "span_id",
        "trace_id",
    )  # fmt: skip

    def __init__(
        self, tracer: Tracer, name: str, ids: tuple[int, int, int], kind: int, is_sampled: bool
    ) -> None:
        self._tracer = tracer
        self.name = name
        self.trace_id, self.span_id, self.parent_id = ids
        self.kind = kind
        self.is_sampled = is_sampled
        self.began = time.time_ns()
        self.ended = 0
        self.attributes: Attributes = {}
        self.events: tuple[tuple[str, int, Attributes], ...] = ()
        self.error: str | None = None
        flag = "01" if is_sampled else "00"
        self.header = f"00-{self.trace_id:032x}-{self.span_id:016x}-{flag}"
        """The value of `traceparent` for requests that belong to the span."""

    def add_event(self, name: str, **attributes: Any) -> None:
        """Note something that happened meanwhile."""
        if self.is_sampled:
            self.events = (*self.events, (name, time.time_ns(), attributes))

    def add_child(
        self, name: str, began: int, ended: int, attributes: Attributes, error: str | None = None
    ) -> Span:
        """Add a child that has ended; times are nanoseconds since 1970."""
        child = self._tracer.begin(name, parent=self)
        child.began, child.error = began, error
        child.finish(attributes, ended=ended)
        return child

    def finish(
        self, attributes: Attributes, *, error: BaseException | None = None, ended: int = 0
    ) -> None:
        """End the span."""
        if not self.is_sampled:
            return
        self.attributes = attributes
        self.ended = ended or time.time_ns()
        if error is not None:
            self.error = str(error) or type(error).__name__
        self._tracer.put(self)

    def encode(self) -> bytes:
        """Return the span as OTLP has it."""
        ids = (self.trace_id, self.span_id, self.parent_id)
        times = (self.began, self.ended)
        return encode_span(
            self.name, self.kind, ids, times, self.attributes, self.events, self.error
        )


class Tracer:
    """Makes the spans of this process and sends them. `open_tracer` returns it."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import Decision

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "unknown")).startswith("unknown"):
            resource = resource.merge(Resource({SERVICE_NAME: "rollway"}))
        # Only asked what the environment says: spans are made and sent by this class.
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._resource = {
            name: value if isinstance(value, str | bool | int | float) else str(value)
            for name, value in resource.attributes.items()
        }
        # Without a sampler in the environment every trace is sampled.
        self._is_selective = "OTEL_TRACES_SAMPLER" in os.environ
        self._sampled = Decision.RECORD_AND_SAMPLE
        self._get_current_span = trace.get_current_span
        self._unsampled = Span(self, "", (1, 1, 0), _CLIENT, is_sampled=False)
        """Of all rollouts that are too many; Dynamo does not trace what is not sampled."""
        self.url = url
        self._environment = dict(environment)
        self.dropped = 0
        """How many spans were not sent."""
        self._has_told = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.flush)

    def _begin(self) -> None:
        """Begin with an empty queue and no thread: at first, and in a child after a fork."""
        self._random = random.Random()  # the trainer's seed must not repeat ids
        self._poster = make_poster(self.url, self._environment)  # two processes share no connection
        self._queue: deque[bytes] = deque()
        self._second, self._count = 0, 0
        self._starting = threading.Lock()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, name: str, *, parent: Span | None = None, is_client: bool = False) -> Span:
        """Begin a span: a child of `parent`, of the trainer's step, or of the caller's own span."""
        if is_client and not self._is_selective and self._is_one_too_many():
            return self._unsampled
        parent = parent or _parent
        kind, get_bits = _CLIENT if is_client else _INTERNAL, self._random.getrandbits
        span_id = get_bits(64) or 1
        if parent is not None:
            ids = (parent.trace_id, span_id, parent.span_id)
            return Span(self, name, ids, kind, parent.is_sampled)
        context = self._get_current_span().get_span_context()
        if context.is_valid:
            ids = (context.trace_id, span_id, context.span_id)
            return Span(self, name, ids, kind, context.trace_flags.sampled)
        trace_id = get_bits(128) or 1
        is_sampled = not self._is_selective
        if self._is_selective:
            decision = self._sampler.should_sample(None, trace_id, name).decision
            is_sampled = decision is self._sampled
        return Span(self, name, (trace_id, span_id, 0), kind, is_sampled)

    def _is_one_too_many(self) -> bool:
        """Count a rollout, and return whether this second has had too many."""
        second = time.time_ns() // 1_000_000_000
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count > MOST_ROLLOUTS

    def put(self, span: Span) -> None:
        """Queue a span that has ended. It neither waits nor raises."""
        if len(self._queue) >= LARGEST_QUEUE:
            self.dropped += 1
            return
        try:
            # Now: the collector of garbage would visit spans that wait, and does not visit bytes.
            self._queue.append(span.encode())
        except Exception:  # noqa: BLE001 - an attribute of another type must not end a rollout
            self.dropped += 1
        if self._thread is None:
            self._start()

    def flush(self) -> None:
        """Send what is queued, in this thread."""
        with self._sending:
            while self._queue:
                spans = [self._queue.popleft() for _ in islice(range(len(self._queue)), _BATCH)]
                self._send(spans)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rollway-traces", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            self.flush()

    def _send(self, spans: list[bytes]) -> None:
        scope = ("rollway", _read_version())
        try:
            self._poster.post(encode_request(self._resource, scope, spans))
            self._has_told = False
        except OSError as error:
            self.dropped += len(spans)
            if not self._has_told:  # once per outage
                log.warning("spans are not accepted by %s: %s", self.url, error)
            self._has_told = True


def open_tracer(environment: Mapping[str, str] = os.environ) -> Tracer | None:
    """Return this process's tracer; None unless OpenTelemetry's variables name an endpoint now."""
    global _tracer
    url = find_endpoint(environment)
    if url is None:
        return None
    with _lock:
        if (_tracer is None or _tracer.url != url) and not _explain_refusal(environment):
            _tracer = Tracer(url, environment)
        return _tracer


def _explain_refusal(environment: Mapping[str, str]) -> bool:
    """Say why an endpoint that is configured gets no spans. It may be configured for all programs
    of a machine, so it is no error."""
    protocol = read_protocol(environment)
    needed = (*_NEEDED, _TRANSPORTS.get(protocol, "requests"))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if protocol not in _TRANSPORTS:
        known = " or ".join(_TRANSPORTS)
        reason = f"their protocol is {protocol}. Set OTEL_EXPORTER_OTLP_PROTOCOL to {known}"
    elif missing:
        reason = f"{missing[0]} is not installed. pip install 'rollway[otel]'"
    else:
        return False
    log.warning("rollouts and refits have no spans: %s.", reason)
    return True


def set_parent(span: Span | None) -> Span | None:
    """Make a span the parent of all that begin from now on; return the one before."""
    global _parent
    before, _parent = _parent, span
    return before


@lru_cache  # it reads a file
def _read_version() -> str:
    return importlib.metadata.version("rollway")
