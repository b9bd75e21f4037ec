"""An OTLP receiver that keeps all spans: the HTTP half of an OpenTelemetry collector."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    service: str
    name: str
    trace: str
    span: str
    parent: str
    seconds: float
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: str | None


@dataclass(slots=True)
class Receiver:
    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """What the receiver answers."""

    def find(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]


def decode(body: bytes) -> list[ReceivedSpan]:
    """Decode a request with OpenTelemetry's own messages."""
    spans = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = read_attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                spans.append(
                    ReceivedSpan(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        read_attributes(span.attributes),
                        [(e.name, read_attributes(e.attributes)) for e in span.events],
                        span.status.message if span.status.code == 2 else None,
                    )
                )
    return spans


def read_attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def open_receiver() -> Iterator[Receiver]:
    """Serve on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.paths.add(self.path)
            receiver.headers.append(dict(self.headers))
            if receiver.status == 200 and self.path == "/v1/traces":
                receiver.spans += decode(body)
            self.send_response(receiver.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
