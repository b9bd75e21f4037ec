"""OTLP receivers that keep all spans: what an OpenTelemetry collector has on its two ports."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
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
    """Serve HTTP on a free port of this machine."""
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


TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"


@contextmanager
def open_grpc_receiver(certificate: tuple[bytes, bytes] | None = None) -> Iterator[Receiver]:
    """Serve gRPC on a free port of this machine; with a key and its certificate by TLS. A status
    other than 200 refuses requests."""
    receiver = Receiver()

    def accept(body: bytes, context: grpc.ServicerContext) -> bytes:
        if receiver.status != 200:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        receiver.spans += decode(body)
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            receiver.paths.add(details.method)
            receiver.headers.append(dict(details.invocation_metadata))
            if details.method == LOGS:
                return grpc.unary_unary_rpc_method_handler(lambda _, __: b"")
            return grpc.unary_unary_rpc_method_handler(accept) if details.method == TRACES else None

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
    if certificate is None:
        receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        credentials = grpc.ssl_server_credentials([certificate])
        receiver.url = f"https://localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()
