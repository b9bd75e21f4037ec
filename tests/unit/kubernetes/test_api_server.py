"""Repeats of requests, and what `check` asks, against a stub API server that answers as tests say.

A real API server does not answer 429 or 503 on demand; tests/kubernetes has the real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import ClusterError, InvalidObject, KindMissing
from rollway.kubernetes import api_server
from rollway.kubernetes.check import check_cluster
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.manifests import render_all
from rollway.kubernetes.objects import DGD, POD, RAYJOB
from rollway.kubernetes.spec import HealthSpec
from rollway.kubernetes.waits import wait_for_answer
from tests.unit.kubernetes.objects import make_infra

POD_BODY = {"metadata": {"name": "pod", "resourceVersion": "1"}}


class StubServer:
    """Answers with the scripted (status, body), the last of them for ever."""

    def __init__(self) -> None:
        self.script: list[tuple[int, Any]] = [(200, POD_BODY)]
        self.paths: list[str] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                stub.paths.append(f"{self.command} {self.path}")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = stub.script.pop(0) if len(stub.script) > 1 else stub.script[0]
                if status == 0:
                    self.connection.close()
                    return
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def cluster(stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    host, port = stub.server.server_address[:2]
    server = f"http://{host!s}:{port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "stub",
        "clusters": [{"name": "stub", "cluster": {"server": server}}],
        "users": [{"name": "user", "user": {"token": "t"}}],
        "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "user"}}],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    monkeypatch.setattr(api_server, "PATIENCE_SECONDS", 2.5)
    return Cluster.connect(kubeconfig=path, namespace="rl")


def make_status(code: int, message: str, **more: Any) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message, **more}


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(
    cluster: Cluster, stub: StubServer, status: int
) -> None:
    stub.script = [(status, make_status(status, "try again")), (200, POD_BODY)]
    assert cluster.get(POD, "pod") == POD_BODY
    assert len(stub.paths) == 2


def test_a_server_that_stays_busy_is_reported(cluster: Cluster, stub: StubServer) -> None:
    stub.script = [(503, make_status(503, "etcd is down"))]
    with pytest.raises(ClusterError, match="503 to get Pod pod in namespace rl: etcd is down"):
        cluster.get(POD, "pod")
    assert len(stub.paths) == 2


def test_an_api_server_that_restarts_does_not_end_a_wait_for_a_service(
    cluster: Cluster, stub: StubServer
) -> None:
    stub.script = [(0, b""), (404, b"")]
    wait_for_answer(cluster, "gym", HealthSpec(port=80, timeout=5))
    assert len(stub.paths) == 2


def test_an_object_that_does_not_fit_is_not_tried_twice(cluster: Cluster, stub: StubServer) -> None:
    words = (
        "failed to create typed patch object (rl/g; nvidia.com/v1beta1, Kind=D):"
        " .spec.replicsa: field not declared in schema"
    )
    stub.script = [(500, make_status(500, words))]
    with pytest.raises(InvalidObject, match=r"spec.replicsa: field not declared"):
        cluster.apply(DGD, {"metadata": {"name": "g"}, "spec": {}}, dry_run=True)
    assert len(stub.paths) == 1


def test_a_webhook_is_named_with_its_words(cluster: Cluster, stub: StubServer) -> None:
    words = 'admission webhook "vdgd.nvidia.com" denied the request: image has no semver tag'
    stub.script = [(403, make_status(403, words, reason="Forbidden"))]
    with pytest.raises(InvalidObject, match=r"vdgd.nvidia.com.*no semver tag"):
        cluster.apply(DGD, {"metadata": {"name": "g"}, "spec": {}}, dry_run=True)


def test_a_kind_is_missing_unless_it_was_served(cluster: Cluster, stub: StubServer) -> None:
    missing = (404, b"404 page not found\n")
    stub.script = [missing]
    with pytest.raises(KindMissing):
        cluster.get(RAYJOB, "g")
    assert len(stub.paths) == 1
    # An API server that starts has not loaded its CRDs yet.
    stub.script = [(200, POD_BODY), missing, (200, POD_BODY)]
    assert cluster.get(RAYJOB, "g") == POD_BODY
    assert cluster.get(RAYJOB, "g") == POD_BODY


LWS = ["leaderworkerset.x-k8s.io", "scheduling.volcano.sh"]


@pytest.mark.parametrize(
    ("ranks", "groups", "is_ok"),
    [
        (16, [], False),
        (16, LWS[:1], False),
        (16, LWS, True),
        (16, ["grove.io"], True),
        (8, [], None),
    ],
)
def test_what_runs_workers_over_several_nodes_is_asked_for(
    cluster: Cluster, stub: StubServer, ranks: int, groups: list[str], is_ok: bool | None
) -> None:
    """The operator accepts such a graph and makes no pods: only the graph's status says why."""
    answer = {
        "metadata": {"name": "rl", "resourceVersion": "1"}, "items": [],
        "status": {"allowed": True}, "groups": [{"name": name} for name in groups],
    }  # fmt: skip
    stub.script = [(200, answer)]  # to every question
    stack = {"models": [{"path": "Qwen/Qwen3-0.6B", "name": "policy", "tensor_parallel": ranks}]}
    rendered = render_all(make_infra(dynamo={"policy": {"stack": stack}}))
    findings = [each for each in check_cluster(cluster, rendered) if each.what == "multinode"]
    assert [finding.level == "ok" for finding in findings] == ([] if is_ok is None else [is_ok])
    if is_ok is False:
        assert "Grove" in findings[0].cause and "global.grove.install: true" in findings[0].fix
