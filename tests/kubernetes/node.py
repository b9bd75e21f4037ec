"""A stand-in for a node with its kubelet. Pods are objects; what they serve runs on this machine.

It makes pods and reports their status, puts local ports behind real Services and Endpoints, ends
pods that are to be deleted (a kubelet's part, without which they would stay), and serves their logs
on a port of its own, which the API server asks as it asks any kubelet. All pods have this machine's
address, so their ports differ.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rollway.errors import Conflict, RollwayError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import EVENT, POD, SERVICE, Object
from tests.kubernetes.control_plane import find_own_address
from tests.kubernetes.kinds import ENDPOINTS, NODE

STAND_IN = {"tests/stand-in": "true"}
"""The label of all pods that this node runs."""


class TestNode:
    """One node of a test, for one namespace."""

    __test__ = False

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.address = find_own_address()
        self.name = f"node-{secrets.token_hex(4)}"
        self.logs: dict[str, Callable[[], Sequence[str]]] = {}
        """What to answer for a pod's log, by the pod's name."""
        self._server = ThreadingHTTPServer((self.address, 0), self._make_handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_make_certificate(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._statuses: dict[str, Object] = {}

    def __enter__(self) -> TestNode:
        self.cluster.create(NODE, {"metadata": {"name": self.name}})
        status = {
            "addresses": [{"type": "InternalIP", "address": self.address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_address[1]}},
        }
        self.cluster.patch(NODE, self.name, {"status": status}, subresource="status")
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(RollwayError):
            self.cluster.delete(NODE, self.name)

    def make_pod(
        self,
        name: str,
        labels: Mapping[str, str],
        owner: Object,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Create a pod that runs here, unless it exists."""
        variables = [{"name": key, "value": value} for key, value in (env or {}).items()]
        body = {
            "metadata": {
                "name": name,
                "labels": {**STAND_IN, **labels},
                "ownerReferences": [make_reference(owner)],
            },
            "spec": {
                "nodeName": self.name,
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "main", "image": "stand-in:1.0.0", "env": variables}],
            },
        }
        with contextlib.suppress(Conflict):
            self.cluster.create(POD, body)

    def report(self, name: str, *, ready: bool, waiting: str = "") -> None:
        """Write a pod's status, if it differs from what was written last."""
        state = {"waiting": {"reason": waiting}} if waiting else {"running": {"startedAt": now()}}
        container = {
            "name": "main",
            "ready": ready,
            "restartCount": 0,
            "image": "stand-in:1.0.0",
            "imageID": "",
            "state": state,
        }
        status = {
            "phase": "Pending" if waiting else "Running",
            "podIP": self.address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [container],
        }
        key = {"ready": ready, "waiting": waiting}
        if self._statuses.get(name) != key and self._update(POD, name, {"status": status}):
            self._statuses[name] = key

    def remove_pod(self, name: str) -> None:
        """Delete a pod at once, as a kubelet does when its processes have ended."""
        self._statuses.pop(name, None)
        delete_now(self.cluster, name)

    def expose(
        self, service: str, owner: Object, pods: Sequence[str], ports: Mapping[int, int]
    ) -> None:
        """Put local ports behind a Service: `ports` has the local one for each of the Service's."""
        meta = {"name": service, "ownerReferences": [make_reference(owner)]}
        named = {port: f"p{port}" for port in ports}
        listed = [{"name": named[port], "port": port, "targetPort": port} for port in ports]
        with contextlib.suppress(Conflict):
            self.cluster.create(SERVICE, {"metadata": meta, "spec": {"ports": listed}})
        # Without `targetRef` the API server's proxy says that there are no endpoints.
        addresses = [
            {
                "ip": self.address,
                "targetRef": {"kind": "Pod", "name": pod, "namespace": self.cluster.namespace},
            }
            for pod in pods[:1]
        ]
        subsets = [
            {"addresses": addresses, "ports": [{"name": named[port], "port": local}]}
            for port, local in ports.items()
        ]
        body = {"metadata": meta, "subsets": subsets if addresses else []}
        try:
            self.cluster.create(ENDPOINTS, body)
        except Conflict:
            self._update(ENDPOINTS, service, {"subsets": body["subsets"]}, subresource="")

    def tell(self, pod: str, reason: str, message: str) -> None:
        """Write a warning about a pod, as a scheduler or a kubelet does."""
        live = self.cluster.get(POD, pod) or {"metadata": {"name": pod, "uid": ""}}
        subject = {
            "kind": "Pod",
            "name": pod,
            "namespace": self.cluster.namespace,
            "uid": live["metadata"]["uid"],
            "apiVersion": "v1",
        }
        body = {
            "metadata": {"name": f"{pod}.{secrets.token_hex(6)}"},
            "involvedObject": subject,
            "reason": reason,
            "message": message,
            "type": "Warning",
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
            "source": {"component": "stand-in"},
        }
        self.cluster.create(EVENT, body)

    def _update(self, kind: Any, name: str, body: Object, subresource: str = "status") -> bool:
        try:
            self.cluster.patch(kind, name, body, subresource=subresource)
        except RollwayError:  # it is gone
            return False
        return True

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        logs = self.logs

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                _, kind, _, pod, *_ = [*url.path.split("/"), "", "", ""]
                lines = list(logs[pod]()) if kind == "containerLogs" and pod in logs else []
                tail = parse_qs(url.query).get("tailLines")
                lines = lines[-int(tail[0]) :] if tail else lines
                body = "".join(f"{line}\n" for line in lines).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def make_reference(owner: Object, *, controller: bool = True) -> Object:
    """Return the owner reference to an object."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": controller,
        "blockOwnerDeletion": controller,
    }


def delete_now(cluster: Cluster, pod: str) -> None:
    """Delete a pod without a grace period, at whose end a kubelet would delete it."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
    cluster._ask("DELETE", POD, pod, body=options)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _make_certificate(folder: Path) -> tuple[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = folder / "node.crt", folder / "node.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key),
            "-out", str(certificate), "-days", "30", "-subj", "/CN=test-node",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)
