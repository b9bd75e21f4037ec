"""A stand-in for a ModelExpress server, in memory: the real one is a container image.

It speaks gRPC with the messages of ModelExpress 0.7.0 (`model_express.refit`), by protobuf's own
code, and keeps the rules that are known of the real one: a version is created once for each
idempotency key, becomes READY when it is told so, and is released, never removed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rollway.weights.transports.nixl.modelexpress import SERVICE

_TEXT, _NUMBER, _MESSAGE = 9, 4, 11
_PACKAGE = "model_express.refit"
_VERSION = {
    "uid": (1, _TEXT), "model_name": (2, _TEXT), "idempotency_key": (3, _TEXT),
    "payload_format": (4, _NUMBER), "base_version_id": (5, _TEXT),
    "expected_source_slots": (6, _TEXT), "layout_signature": (7, _TEXT), "state": (8, _NUMBER),
    "created_at_unix_ms": (9, _NUMBER),
}  # fmt: skip
_REQUESTS = {
    "CreateWeightVersion": {
        "model_name": (1, _TEXT), "idempotency_key": (2, _TEXT), "payload_format": (3, _NUMBER),
        "base_version_id": (4, _TEXT), "expected_source_slots": (5, _TEXT), "state": (7, _NUMBER),
        "uid": (8, _TEXT),
    },
    "GetWeightVersion": {"uid": (1, _TEXT)},
    "DeleteWeightVersion": {"uid": (1, _TEXT)},
    "UpdateWeightVersionState": {"uid": (1, _TEXT), "state": (2, _NUMBER)},
}  # fmt: skip
"""Fields by number and type. Enums are numbers: their encoding is the same."""
_STAGING, _READY, _RELEASING = 1, 2, 3
Field = descriptor_pb2.FieldDescriptorProto


def make_messages() -> dict[str, Any]:
    """Return the classes of the messages by their names."""
    file = descriptor_pb2.FileDescriptorProto(name="refit.proto", package=_PACKAGE, syntax="proto3")
    _add_message(file, "WeightVersion", _VERSION)
    for name, fields in _REQUESTS.items():
        _add_message(file, f"{name}Request", fields)
        _add_message(file, f"{name}Response", {"version": (1, _MESSAGE)})
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        each.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{each.name}")
        )
        for each in file.message_type
    }


def _add_message(file: Any, name: str, fields: dict[str, tuple[int, int]]) -> None:
    message = file.message_type.add(name=name)
    for field, (number, kind) in fields.items():
        label = Field.LABEL_REPEATED if field.endswith("_slots") else Field.LABEL_OPTIONAL
        entry = message.field.add(name=field, number=number, type=kind, label=label)
        if kind == _MESSAGE:
            entry.type_name = f".{_PACKAGE}.WeightVersion"


class ModelExpressServer:
    """The server, at `address`; `versions` has all that were created, `requests` all calls."""

    def __init__(self, port: int = 0, *, is_old: bool = False) -> None:
        """With `is_old`, answer as version 0.5 did: with the version itself."""
        self._is_old = is_old
        self._messages = make_messages()
        self.versions: dict[str, Any] = {}
        self.requests: list[tuple[str, bytes]] = []
        self.tokens: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        handlers = {name: self._make_handler(name) for name in _REQUESTS}
        handler = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def list_states(self) -> dict[str, str]:
        names = {_STAGING: "STAGING", _READY: "READY", _RELEASING: "RELEASING"}
        return {uid: names[version.state] for uid, version in self.versions.items()}

    def close(self) -> None:
        self._server.stop(None).wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_handler(self, name: str) -> Any:
        run: Callable[[Any, Any], Any] = getattr(self, f"_{name}")
        request_class = self._messages[f"{name}Request"]
        response_class = self._messages[f"{name}Response"]

        def handle(raw: bytes, context: Any) -> bytes:
            self.requests.append((name, raw))
            metadata = dict(context.invocation_metadata())
            self.tokens.append(metadata.get("authorization", ""))
            version = run(request_class.FromString(raw), context)
            answer = version if self._is_old else response_class(version=version)
            return bytes(answer.SerializeToString())

        return grpc.unary_unary_rpc_method_handler(handle)

    def _CreateWeightVersion(self, request: Any, context: Any) -> Any:
        for field in ("model_name", "idempotency_key", "payload_format"):
            if not getattr(request, field):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{field} is required")
        if not request.expected_source_slots:
            reason = "expected_source_slots must not be empty"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        known = self.versions.get(request.uid)
        if known is not None and known.idempotency_key != request.idempotency_key:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "the UID belongs to another request")
        if known is None:
            known = self.versions[request.uid] = self._messages["WeightVersion"](
                uid=request.uid,
                model_name=request.model_name,
                idempotency_key=request.idempotency_key,
                payload_format=request.payload_format,
                expected_source_slots=request.expected_source_slots,
                state=request.state or _STAGING,
                created_at_unix_ms=1,
            )
        return known

    def _GetWeightVersion(self, request: Any, context: Any) -> Any:
        if request.uid not in self.versions:
            context.abort(grpc.StatusCode.NOT_FOUND, f"weight version {request.uid} not found")
        return self.versions[request.uid]

    def _UpdateWeightVersionState(self, request: Any, context: Any) -> Any:
        version = self._GetWeightVersion(request, context)
        version.state = request.state
        return version

    def _DeleteWeightVersion(self, request: Any, context: Any) -> Any:
        version = self._GetWeightVersion(request, context)
        version.state = _RELEASING
        return version
