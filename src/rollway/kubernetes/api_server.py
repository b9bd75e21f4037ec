"""The API server of a cluster: requests to it, their repeats, and what its refusals mean.

The `kubernetes` package reads kubeconfigs and service accounts and refreshes tokens. Requests go to
its connection pool with paths that are made from `ObjectKind`s, so none is spent on discovery.

`explain(refusal)` gives the error to raise. The server's own words are passed on. Errors differ
where a command acts on the difference: an unknown field in an apply is a 500, in a create a 400; a
schema or CEL violation is a 422; a quota, a missing permission and a webhook can all be a 403; a
missing CRD is a 404 without a body that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollway.errors import (
    REPOSITORY,
    ClusterError,
    Conflict,
    Forbidden,
    InvalidObject,
    KindMissing,
    NamespaceMissing,
    RollwayError,
    UsageError,
    require,
)
from rollway.kubernetes.objects import Object, ObjectKind

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod has of its service account."""
PATIENCE_SECONDS = 60.0
"""How long a request is repeated: an API server restarts in less."""
FIRST_SECONDS = 4.0
"""The same if it has never answered: then the address is probably wrong."""
CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})

INSTALL_COMMANDS = {
    "nvidia.com": "helm install dynamo-platform oci://nvcr.io/nvidia/ai-dynamo/dynamo-platform"
    " -n dynamo-system --create-namespace",
    "ray.io": "helm install kuberay-operator kuberay/kuberay-operator"
    " --repo https://ray-project.github.io/kuberay-helm/ --version 1.7.0",
}
"""What installs the CRDs of a group, with their operator."""

_BAD_APPLY = ("failed to create typed", "field not declared in schema", "failed to convert new")
"""In the body of a 500: the applied object does not fit the schema. The object is the user's."""
_VERB = re.compile(r"cannot (\w+) resource")


class ApiServer:
    """An API server with credentials; threads share it."""

    def __init__(self, client: Any, *, in_cluster: bool = False) -> None:
        self._client = client
        self.in_cluster = in_cluster
        self.has_answered = False
        self.served: set[ObjectKind] = set()
        """The kinds that the API server has answered for."""

    @property
    def server(self) -> str:
        return str(self._client.configuration.host)

    def make_auth_headers(self) -> dict[str, str]:
        """Return the headers with the token, refreshed if a pod's or a plug-in's has expired."""
        headers: dict[str, str] = {}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        return headers

    def make_ssl_context(self) -> ssl.SSLContext:
        """Return the trust and the client certificate of the kubeconfig, for another client."""
        settings = self._client.configuration
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        if not settings.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str],
        read_seconds: float = READ_SECONDS,
        preload: bool = True,
    ) -> Any:
        """Send one request, without a retry; return urllib3's response."""
        import urllib3

        with name_lost_connection(self.server):
            response = self._client.rest_client.pool_manager.request(
                method,
                self.server + path,
                body=body,
                headers={"User-Agent": "rollway", **headers, **self.make_auth_headers()},
                preload_content=preload,
                retries=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds),
            )
        self.has_answered = True
        return response

    def ask(
        self, asked: Refusal, method: str, path: str, body: Any, content_type: str
    ) -> Object | None:
        """Send a request and return the JSON of its answer; None if the object does not exist.

        Busy and failing servers and lost connections are asked again, for a while.

        Raises:
            RollwayError: what `explain` makes of the answer.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        begun, pause = time.monotonic(), 1.0
        while True:
            try:
                response = self.send(method, path, body=data, headers=headers)
                if response.status < 300:
                    self.served.add(asked.kind)
                    return json.loads(response.data) if response.data else {}
                refusal = asked.with_answer(response.status, response.data)
                if refusal.says_not_found:
                    self.served.add(asked.kind)
                    return None
                error = explain(refusal)
                # An API server that starts answers 404 for kinds of CRDs that it has not loaded
                # yet: a kind that was served is not missing.
                may_repeat = (
                    asked.kind in self.served
                    if isinstance(error, KindMissing)
                    else response.status in _RETRIED and isinstance(error, ClusterError)
                )
            except Unavailable as lost:
                error, may_repeat = lost, True
            patience = PATIENCE_SECONDS if self.has_answered else FIRST_SECONDS
            if not may_repeat or time.monotonic() - begun + pause > patience:
                raise error
            time.sleep(pause)
            pause = min(pause * 2, 8.0)


class Unavailable(ClusterError):
    """The API server does not answer now; it may answer later."""


@contextlib.contextmanager
def name_lost_connection(server: str) -> Iterator[None]:
    """Raise Unavailable for a connection that fails or breaks inside the block."""
    import urllib3

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        if "certificate" in str(error).lower():
            raise ClusterError(
                f"The certificate of the API server at {server} is not that of your kubeconfig.",
                "Fetch the kubeconfig of this cluster again.",
            ) from error
        raise Unavailable(
            f"The API server at {server} does not answer: {str(error).rsplit(': ', 1)[-1]}.",
            "Is the cluster running, and is the address in the kubeconfig right?",
        ) from error


def open_connection(context: str | None, kubeconfig: str | None) -> tuple[ApiServer, str]:
    """Connect by a kubeconfig, or in a pod by its service account; return also the namespace.

    A pod is recognized by its service account. A kubeconfig that is named, also by $KUBECONFIG,
    comes first.
    """
    require("k8s", "kubernetes")
    from kubernetes.config.incluster_config import InClusterConfigLoader

    from kubernetes import client, config

    # The package reads $KUBECONFIG only once, when it is imported.
    kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")
    named = kubeconfig or context
    if not named and os.environ.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").exists():
        configuration = client.Configuration()
        loader = InClusterConfigLoader(str(ACCOUNT / "token"), str(ACCOUNT / "ca.crt"))
        loader.load_and_set(configuration)
        namespace = (ACCOUNT / "namespace").read_text().strip()
        return ApiServer(client.ApiClient(configuration), in_cluster=True), namespace
    try:
        contexts, active = config.list_kube_config_contexts(kubeconfig)
        names = [entry["name"] for entry in contexts]
        if context is not None and context not in names:
            raise UsageError(
                f"The kubeconfig has no context `{context}`.", f"It has {', '.join(names)}."
            )
        chosen = active if context is None else contexts[names.index(context)]
        api = config.new_client_from_config(kubeconfig, context, persist_config=False)
    except config.ConfigException as error:
        raise UsageError(
            f"No cluster is configured here: {str(error).strip('.')}.",
            "Set $KUBECONFIG or write ~/.kube/config, or run this in a pod with a service account.",
        ) from error
    namespace = (chosen.get("context") or {}).get("namespace") or "default"
    return ApiServer(api), str(namespace)


# --- refusals ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was asked, and an answer of the API server that is no success."""

    verb: str
    """As RBAC has it: get, list, create, patch, delete."""
    kind: ObjectKind
    namespace: str
    name: str = ""
    subresource: str = ""
    status: int = 0
    body: bytes = b""

    def with_answer(self, status: int, body: bytes) -> Refusal:
        return replace(self, status=status, body=body)

    def with_kind(self, kind: ObjectKind) -> Refusal:
        return replace(self, kind=kind)

    @property
    def details(self) -> dict[str, Any]:
        """The server's Status object; empty if the body is none."""
        try:
            status = json.loads(self.body)
        except ValueError:
            return {}
        is_status = isinstance(status, dict) and status.get("kind") == "Status"
        return status if is_status else {}

    @property
    def text(self) -> str:
        message = str(self.details.get("message") or "")
        return message or self.body.decode(errors="replace").strip()[:500]

    @property
    def subject(self) -> str:
        where = f" in namespace {self.namespace}" if self.kind.namespaced else ""
        return f"{self.kind.kind} {self.name}{where}" if self.name else f"{self.kind.kind}s{where}"

    @property
    def says_not_found(self) -> bool:
        """Whether the object is missing, and not its kind or its namespace."""
        if self.status != 404 or self.details.get("reason") != "NotFound":
            return False
        # A kind that is not served is also `NotFound`, in a Status without details of an object.
        details = self.details.get("details") or {}
        is_namespace = details.get("kind") == "namespaces" and self.kind.plural != "namespaces"
        return bool(details.get("name")) and not is_namespace


def explain(refusal: Refusal) -> RollwayError:
    """Make the error for a refusal: the server's words, and what to do."""
    text, status = refusal.text, refusal.status
    is_write = refusal.verb in ("create", "patch")
    if (
        "admission webhook" in text
        or (status == 500 and any(part in text for part in _BAD_APPLY))
        or (status in (400, 422) and is_write)
    ):
        return InvalidObject(
            f"The cluster refuses {refusal.subject}: {text}",
            "Correct the field in the manifest or in the infra file.",
        )
    if status == 401:
        return ClusterError(
            f"The cluster does not accept your credentials: {text}",
            "Log in again; a token or certificate of the kubeconfig has probably expired.",
        )
    if status == 403:
        return _explain_forbidden(refusal)
    if status == 404:
        return _explain_missing(refusal)
    if status == 409:
        return Conflict(
            f"{refusal.subject}: {text}",
            "It exists, or somebody changed it meanwhile: look at it, then try again.",
        )
    return ClusterError(
        f"The API server answered {status} to {refusal.verb} {refusal.subject}: {text}",
        "It was asked again for a while; look at the API server's health, then try again.",
    )


def make_rule(verb: str, kind: ObjectKind, subresource: str = "") -> dict[str, list[str]]:
    """Return the RBAC rule for one verb on one kind."""
    resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
    return {"apiGroups": [kind.group], "resources": [resource], "verbs": [verb]}


def _explain_forbidden(refusal: Refusal) -> RollwayError:
    text = refusal.text
    if "being terminated" in text:
        return NamespaceMissing(
            f"Namespace {refusal.namespace} is being deleted.",
            "Wait until it is gone and create it again, or use another namespace.",
        )
    if "cannot " not in text:  # a quota, a limit range, a policy
        return ClusterError(
            f"The cluster does not admit {refusal.subject}: {text}",
            "Ask for less, or ask the cluster's administrator to raise the limit.",
        )
    # An apply that creates needs `create` as well; the server names the verb that is missing.
    named = _VERB.search(text)
    rule = make_rule(named[1] if named else refusal.verb, refusal.kind, refusal.subresource)
    role = "Role" if refusal.kind.namespaced else "ClusterRole"
    return Forbidden(
        f"You may not do this: {text}",
        f"Add this rule to your {role} (see deploy/rbac of {REPOSITORY}): {json.dumps(rule)}",
        rule=rule,
    )


def _explain_missing(refusal: Refusal) -> RollwayError:
    details = refusal.details.get("details") or {}
    if details.get("kind") == "namespaces" or "namespaces" in refusal.text:
        return NamespaceMissing(
            f"Namespace {refusal.namespace} does not exist.",
            f"Create it with `kubectl create namespace {refusal.namespace}`, or set `namespace`.",
        )
    if details.get("name"):
        return ClusterError(
            f"{refusal.subject} does not exist (any more).",
            "Somebody deleted it, or it was never created; see `rollway k8s status`.",
        )
    command = INSTALL_COMMANDS.get(refusal.kind.group)
    return KindMissing(
        f"The cluster does not serve {refusal.kind.kind} {refusal.kind.api_version}.",
        f"Install its operator: {command}" if command else "Use a newer cluster.",
    )
