"""A real control plane on this machine: etcd, kube-apiserver, kube-controller-manager.

Binaries come from $KUBEBUILDER_ASSETS, which `setup-envtest` fills with official ones and
`scripts/build_control_plane.sh` with what it builds from Debian's sources. The latter has an old
kube-apiserver (1.20) in front of a current apiextensions-apiserver (1.36):

    client ──► kube-apiserver ──┬─► core, apps, RBAC, proxies: its own
                                └─► CRDs, *.nvidia.com, *.ray.io: apiextensions-apiserver
                                    (API aggregation, as for any extension server)
    kube-controller-manager collects garbage across both.

No kubelet runs, so pods are objects only. Everything listens on loopback.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import secrets
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollway.processes import die_with_parent
from tests.waiting import wait_until

Object = dict[str, Any]
CRDS = Path(__file__).parents[1] / "data" / "crds"
CACHE = Path("~/.cache/rollway/control-plane").expanduser()
START_SECONDS = 240.0
_CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_SERVICES_PATH = "/apis/apiregistration.k8s.io/v1/apiservices"


def find_assets() -> Path | None:
    """Return the folder with the binaries, or None."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or CACHE)
    return folder if (folder / "kube-apiserver").exists() and (folder / "etcd").exists() else None


class ControlPlane:
    """The processes of a control plane; `kill` and `revive` one of them to see who copes."""

    def __init__(self, assets: Path, folder: Path) -> None:
        self._assets = assets
        self._folder = folder
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starter = ThreadPoolExecutor(1)
        self.token = secrets.token_hex(16)
        self._is_composite = (assets / "apiextensions-apiserver").exists()
        self.url = ""
        self.kubeconfig = folder / "kubeconfig"
        self._extension_port = 0

    def __enter__(self) -> ControlPlane:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- for tests ----------------------------------------------------------------------------

    def kill(self, name: str = "kube-apiserver") -> None:
        """End a process at once, as a node that loses its power does."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def revive(self, name: str = "kube-apiserver") -> None:
        """Start a process again, with the same ports and data."""
        self._spawn(name, self._commands[name])
        if name == "kube-apiserver":
            self._wait_for(f"{self.url}/readyz")

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Any:
        """Send a request as the administrator."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        with urllib.request.urlopen(request, context=_trust_all(), timeout=30) as answer:
            return json.loads(answer.read())

    def write_kubeconfig(self, path: Path, token: str, namespace: str = "default") -> Path:
        """Write the kubeconfig of a user with this token."""
        cluster = {"server": self.url, "certificate-authority": str(self._certificate)}
        context = {"cluster": "test", "user": "user", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def make_token(self, namespace: str, account: str) -> str:
        """Return a token of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.request("POST", path, request)["status"]["token"])

    def install_crds(self, names: list[str] | None = None) -> None:
        """Install the CRDs of tests/data/crds, and wait until their objects can be made."""
        files = sorted(CRDS.glob("*.json.xz"))
        crds = [json.loads(lzma.decompress(file.read_bytes())) for file in files]
        crds = [crd for crd in crds if names is None or crd["metadata"]["name"] in names]
        for crd in crds:
            self.request("POST", _CRD_PATH, crd)
        for crd in crds:
            path = f"{_CRD_PATH}/{crd['metadata']['name']}"
            self._wait_for_condition(path, "Established")
        versions = {
            (crd["spec"]["group"], version["name"]): 100 if version["storage"] else 50
            for crd in crds
            for version in crd["spec"]["versions"]
            if version["served"]
        }
        if self._is_composite:
            for (group, version), priority in versions.items():
                body = {
                    "metadata": {"name": f"{version}.{group}"},
                    "spec": self._delegate(group, version, 1000, priority),
                }
                with contextlib.suppress(urllib.error.HTTPError):  # there, for another CRD
                    self.request("POST", _SERVICES_PATH, body)
                self._wait_for_condition(f"{_SERVICES_PATH}/{version}.{group}", "Available")
        wait_until(lambda: all(map(self._serves, crds)), START_SECONDS, every=0.2, what="CRDs")

    # --- start and stop -----------------------------------------------------------------------

    @property
    def _certificate(self) -> Path:
        return self._folder / "certs" / "apiserver.crt"

    def _start(self) -> None:
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        etcd, peer, api, manager, extension = _find_ports(5)
        self.url, self._extension_port = f"https://127.0.0.1:{api}", extension
        key, tokens = folder / "account.key", folder / "tokens.csv"
        _openssl(folder, "genrsa", "-out", str(key), "2048")
        tokens.write_text(f'{self.token},admin,admin,"system:masters"\n')
        tokens.chmod(0o600)
        self._spawn("etcd", [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        ])  # fmt: skip
        self._wait_for(f"http://127.0.0.1:{etcd}/health")
        self._spawn("kube-apiserver", [
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api}",
            f"--cert-dir={folder / 'certs'}",
            "--service-cluster-ip-range=10.0.0.0/16",
            "--authorization-mode=RBAC",
            f"--token-auth-file={tokens}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            *(self._make_front_proxy() if self._is_composite else []),
        ])  # fmt: skip
        self._wait_for(f"{self.url}/readyz")
        self.write_kubeconfig(self.kubeconfig, self.token)
        if (self._assets / "kube-controller-manager").exists():
            self._spawn("kube-controller-manager", [
                f"--kubeconfig={self.kubeconfig}",
                f"--authentication-kubeconfig={self.kubeconfig}",
                f"--authorization-kubeconfig={self.kubeconfig}",
                "--bind-address=127.0.0.1",
                f"--secure-port={manager}",
                f"--cert-dir={folder / 'manager-certs'}",
                f"--service-account-private-key-file={key}",
                f"--root-ca-file={self._certificate}",
                "--leader-elect=false",
                # What needs nodes or a cloud would only log errors.
                "--controllers=*,-nodeipam,-nodelifecycle,-attachdetach,-service,-route,"
                "-cloud-node-lifecycle",
                # 1.20 also has an insecure port, the same for every control plane of a machine.
                *(["--port=0"] if self._is_composite else []),
            ])  # fmt: skip
            self._wait_for(f"https://127.0.0.1:{manager}/healthz")
        if self._is_composite:
            self._start_extension_server(etcd)

    def _make_front_proxy(self) -> list[str]:
        """Make the certificates by which the two API servers know each other."""
        folder = self._folder
        _openssl(
            folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key",
            "-out", "ca.crt", "-days", "30", "-subj", "/CN=test-ca",
        )  # fmt: skip
        (folder / "names.cnf").write_text("[s]\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n")
        for name, subject in (("server", "localhost"), ("proxy", "front-proxy")):
            _openssl(
                folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key",
                "-out", f"{name}.csr", "-subj", f"/CN={subject}",
            )  # fmt: skip
            _openssl(
                folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                "-CAcreateserial", "-days", "30", "-out", f"{name}.crt",
                "-extfile", "names.cnf", "-extensions", "s",
            )  # fmt: skip
        return [
            f"--requestheader-client-ca-file={folder / 'ca.crt'}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={folder / 'proxy.crt'}",
            f"--proxy-client-key-file={folder / 'proxy.key'}",
        ]

    def _start_extension_server(self, etcd: int) -> None:
        folder, port = self._folder, self._extension_port
        self._spawn("apiextensions-apiserver", [
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--etcd-prefix=/registry-crd",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={folder / 'server.crt'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            f"--kubeconfig={self.kubeconfig}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            "--enable-priority-and-fairness=false",
            "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
        ])  # fmt: skip
        self._wait_for(f"https://127.0.0.1:{port}/readyz")
        service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
        body = {"metadata": {"name": "extensions"}, "spec": service}
        self.request("POST", "/api/v1/namespaces/kube-system/services", body)
        # Hand the CRDs themselves over to the newer server.
        hand_over = {
            "metadata": {"labels": {"kube-aggregator.kubernetes.io/automanaged": None}},
            "spec": self._delegate("apiextensions.k8s.io", "v1", 16700, 15),
        }
        path = f"{_SERVICES_PATH}/v1.apiextensions.k8s.io"
        self.request("PATCH", path, hand_over, "application/merge-patch+json")
        self.request("DELETE", f"{_SERVICES_PATH}/v1beta1.apiextensions.k8s.io")
        self._wait_for_condition(path, "Available")

    def _delegate(self, group: str, version: str, group_priority: int, priority: int) -> Object:
        service = {
            "namespace": "kube-system",
            "name": "extensions",
            "port": self._extension_port,
        }
        return {
            "group": group,
            "version": version,
            "service": service,
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": group_priority,
            "versionPriority": priority,
        }

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)  # the data is thrown away
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _spawn(self, name: str, arguments: list[str]) -> None:
        self._commands[name] = arguments
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [str(self._assets / name), *arguments]
            # A process dies with the thread that starts it, and tests revive one from their own.
            self._processes[name] = self._starter.submit(
                subprocess.Popen,
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            ).result()

    # --- wait ---------------------------------------------------------------------------------

    def _wait_for(self, url: str) -> None:
        def answers() -> bool:
            for name, process in self._processes.items():
                log = self._folder / f"{name}.log"
                assert process.poll() is None, f"{name} ended:\n{log.read_text()[-2000:]}"
            headers = {"Authorization": f"Bearer {self.token}"}
            request = urllib.request.Request(url, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=2, context=_trust_all()) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_until(answers, START_SECONDS, every=0.1, what=url)

    def _wait_for_condition(self, path: str, kind: str) -> None:
        wait_until(self._asks(path, kind), START_SECONDS, every=0.2, what=f"{path} {kind}")

    def _asks(self, path: str, kind: str) -> Callable[[], bool]:
        def holds() -> bool:
            conditions = self.request("GET", path).get("status", {}).get("conditions") or []
            return any(c["type"] == kind and c["status"] == "True" for c in conditions)

        return holds

    def _serves(self, crd: Object) -> bool:
        """Whether the API server's lists of resources have a CRD: they trail its conditions."""
        group = crd["spec"]["group"]
        for version in crd["spec"]["versions"]:
            try:
                listed = self.request("GET", f"/apis/{group}/{version['name']}")
            except urllib.error.HTTPError:
                return not version["served"]
            names = {resource["name"] for resource in listed["resources"]}
            if version["served"] and crd["spec"]["names"]["plural"] not in names:
                return False
        return True


def find_own_address() -> str:
    """Return an address of this machine that is not loopback, which the proxy refuses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of the documentation's range; nothing is sent
        return str(probe.getsockname()[0])


def _find_ports(count: int) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [int(each.getsockname()[1]) for each in sockets]
    return iter(ports)


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, cwd=folder, capture_output=True)


def _trust_all() -> ssl.SSLContext:
    return ssl._create_unverified_context()
