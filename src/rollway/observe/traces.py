"""Spans of steps, refits and rollouts, if OpenTelemetry's environment variables name an endpoint.

    rollway.step ─┬─ rollway.rollout ── Dynamo's http-request ── … ── the engine's
                  ├─ rollway.rollout …
                  └─ rollway.refit ─┬─ a worker ─┬─ preflight
                                    └─ a worker  └─ pause, load, open

    span.finish() ──► BatchSpanProcessor: a bounded queue, a thread ──► OTLP by HTTP or gRPC

OpenTelemetry's SDK makes, samples, queues and sends the spans, as its variables say; nothing of it
is loaded unless an endpoint is set. A rollout outside of a step is a child of the caller's own
span, or begins a trace. A receiver that is slow or gone costs spans, and never delays a rollout.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

Attributes = Mapping[str, str | bool | int | float | None]

HEADER = "traceparent"
FLUSH_SECONDS = 5.0
"""How long the end of a stack or of a process waits for a receiver."""
MOST_ROLLOUTS = 100
"""Per second, of which spans are sent, unless the environment has a sampler of its own. A span
takes tens of microseconds of the client, and Dynamo's frontend far more."""
MOST_QUEUED = 16_384
"""Spans, unless the environment says another number: a refit of 1,024 workers has 10,000."""
OUTAGE_SECONDS = 300.0
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HTTP, _GRPC = "http/protobuf", "grpc"
_EXPORTERS = {
    _HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    _GRPC: "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}

_EXPORTER_LOGGERS = (_EXPORTERS[_HTTP], "opentelemetry.exporter.otlp.common.http",
                     "opentelemetry.exporter.otlp.proto.grpc.exporter")  # fmt: skip

_tracer: Tracer | None = None
_lock = threading.Lock()
_parent: TraceSpan | None = None
"""The step of the trainer that is under way."""


# --- what the environment says -------------------------------------------------------------------


def find_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the address of traces; None if none is configured or tracing is disabled."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    own, base = (environment.get(name, "").strip() for name in ENDPOINTS)
    if own or not base or read_protocol(environment) == _GRPC:  # its path is that of the service
        return own or base or None
    return f"{base.rstrip('/')}/v1/traces"


def read_protocol(environment: Mapping[str, str]) -> str:
    """Return the protocol of traces that the environment asks for."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next(filter(None, map(environment.get, names)), _HTTP)


# --- spans ---------------------------------------------------------------------------------------


class TraceSpan:
    """Something that takes time. `Tracer.begin` makes it, `finish` hands it on."""

    __slots__ = ("_tracer", "began", "error", "header", "is_sampled", "otel")

    def __init__(self, tracer: Tracer, otel: Any) -> None:
        self._tracer = tracer
        self.otel = otel
        self.began: int = getattr(otel, "start_time", None) or time.time_ns()
        self.error: str | None = None
        context = otel.get_span_context()
        self.is_sampled: bool = context.trace_flags.sampled
        # Of the flags only this one: Dynamo refuses a parent with others.
        flag = "01" if self.is_sampled else "00"
        self.header = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flag}"
        """The value of `traceparent` for requests that belong to the span."""

    def add_event(self, name: str, **attributes: Any) -> None:
        """Note something that happened meanwhile."""
        self.otel.add_event(name, attributes)

    def add_child(
        self, name: str, began: int, ended: int, attributes: Attributes, error: str | None = None
    ) -> TraceSpan:
        """Add a child that has ended; times are nanoseconds since 1970."""
        child = self._tracer.begin(name, parent=self, began=began)
        child.error = error
        child.finish(attributes, ended=ended)
        return child

    def finish(
        self,
        attributes: Attributes,
        *,
        error: BaseException | None = None,
        ended: int | None = None,
    ) -> None:
        """End the span."""
        if not self.is_sampled:
            return
        self.otel.set_attributes({k: v for k, v in attributes.items() if v is not None})
        if error is not None:
            self.error = str(error) or type(error).__name__
        if self.error is not None:
            self._tracer.set_error(self.otel, self.error)
        self.otel.end(ended)


class _Ids:
    """Makes ids. OpenTelemetry's own generator takes numbers from Python's, which a trainer has
    seeded: its ranks would have the same ids, and its own random numbers would change."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class _Outages(logging.Filter):
    """The filter of an exporter's log, which has two messages for each batch while its receiver is
    gone. The first passes; one that comes long after all others is about another outage."""

    _last = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        before, self._last = self._last, record.created
        return record.created - before > OUTAGE_SECONDS


_outages = _Outages()


class Tracer:
    """Makes the spans of this process. `open_tracer` returns it."""

    def __init__(self, url: str, make_exporter: Any) -> None:
        from opentelemetry import trace

        self.url = url
        self._trace = trace
        self._make_exporter = make_exporter
        # Without a sampler in the environment every trace is sampled.
        self._is_selective = "OTEL_TRACES_SAMPLER" in os.environ
        self._second, self._count = 0, 0
        context = trace.SpanContext(1, 1, is_remote=False)
        self._unsampled = TraceSpan(self, trace.NonRecordingSpan(context))
        """Of all rollouts that are too many; Dynamo does not trace what is not sampled."""
        self._forget()
        # Two processes share no connection, and gRPC's do not live through a fork.
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.flush)

    def begin(
        self,
        name: str,
        *,
        parent: TraceSpan | None = None,
        is_client: bool = False,
        began: int | None = None,
    ) -> TraceSpan:
        """Begin a span: a child of `parent`, of the trainer's step, or of the caller's own span."""
        if is_client and not self._is_selective and self._is_one_too_many():
            return self._unsampled
        parent = parent or _parent
        context = None if parent is None else self._trace.set_span_in_context(parent.otel)
        kind = self._trace.SpanKind.CLIENT if is_client else self._trace.SpanKind.INTERNAL
        otel = self._otel or self._open()
        if otel is None:
            return self._unsampled
        return TraceSpan(self, otel.start_span(name, context, kind, start_time=began))

    def _is_one_too_many(self) -> bool:
        """Count a rollout, and return whether this second has had too many."""
        second = time.time_ns() // 1_000_000_000
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count > MOST_ROLLOUTS

    def set_error(self, otel: Any, text: str) -> None:
        otel.set_status(self._trace.StatusCode.ERROR, text)

    def flush(self) -> None:
        """Send what is queued, and wait for that, but not long for a receiver that is gone. While
        it does not answer, a second call waits for no longer than the first: a stack ends, and
        then its process."""
        if self._otel is not None:
            if self._flushed.is_set():
                self._give_up_at = time.monotonic() + FLUSH_SECONDS
            self._flushed.clear()
            self._flush_asked.set()
            self._flushed.wait(max(0.0, self._give_up_at - time.monotonic()))

    def _forget(self) -> None:
        """Begin with nothing open: at first, and in a child after a fork."""
        self._otel: Any = None
        self._is_refused = False
        self._opening = threading.Lock()
        self._flush_asked, self._flushed = threading.Event(), threading.Event()
        self._flushed.set()
        self._give_up_at = 0.0

    def _open(self) -> Any:
        """Open the connection with the first span: a process may fork before that. None, said once,
        if OpenTelemetry refuses one of its variables: no rollout fails for that."""
        with self._opening:
            if self._otel is None and not self._is_refused:
                try:
                    self._otel = self._make_otel()
                except Exception as error:  # noqa: BLE001 - of a library, about its own settings
                    self._is_refused = True
                    log.warning("rollouts and refits have no spans: OpenTelemetry: %s", error)
            return self._otel

    def _make_otel(self) -> Any:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "unknown")).startswith("unknown"):
            resource = resource.merge(Resource({SERVICE_NAME: "rollway"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=_Ids())
        size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else MOST_QUEUED
        exporter = self._make_exporter(endpoint=self.url)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=size))
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(_outages)
        # Its flush has no limit of time, and no thread can start while Python ends.
        threading.Thread(
            target=self._flush_when_asked, args=(provider,), name="rollway-traces", daemon=True
        ).start()
        return provider.get_tracer("rollway", importlib.metadata.version("rollway"))

    def _flush_when_asked(self, provider: Any) -> None:
        while self._flush_asked.wait():
            self._flush_asked.clear()
            provider.force_flush()
            if not self._flush_asked.is_set():
                self._flushed.set()


def open_tracer() -> Tracer | None:
    """Return this process's tracer; None unless OpenTelemetry's variables name an endpoint now."""
    global _tracer
    url = find_endpoint(os.environ)
    if url is None:
        return None
    with _lock:
        if _tracer is None or _tracer.url != url:
            make_exporter = _find_exporter(read_protocol(os.environ))
            if make_exporter is None:
                return None
            _tracer = Tracer(url, make_exporter)
        return _tracer


@cache  # so that it is said once
def _find_exporter(protocol: str) -> Any:
    """Return what makes the exporter of a protocol; None, and say why, if there is none. An
    endpoint may be configured for all programs of a machine, so that is no error."""
    module = _EXPORTERS.get(protocol)
    if module is None:
        known = " or ".join(_EXPORTERS)
        reason = f"their protocol is {protocol}. Set OTEL_EXPORTER_OTLP_PROTOCOL to {known}"
    else:
        try:
            return importlib.import_module(module).OTLPSpanExporter
        except Exception as error:  # noqa: BLE001 - of a package that may be broken
            line = str(error).partition("\n")[0].rstrip(".")
            reason = f"{module}: {line}. pip install 'rollway[otel]'"
    log.warning("rollouts and refits have no spans: %s.", reason)
    return None


def set_parent(span: TraceSpan | None) -> TraceSpan | None:
    """Make a span the parent of all that begin from now on; return the one before."""
    global _parent
    before, _parent = _parent, span
    return before
