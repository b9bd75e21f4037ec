"""The way to an API server: credentials, one retry policy, a count of requests.

The `kubernetes` package reads kubeconfigs and service accounts and refreshes tokens. Requests go to
its connection pool with paths of our own: no discovery, bytes as they are, streams.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollway.errors import ClusterError, KindMissing, RollwayError, UsageError
from rollway.kubernetes.kinds import Kind
from rollway.kubernetes.refusals import Refusal, explain

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod has of its service account."""
PATIENCE_SECONDS = 60.0
"""How long a request is repeated: an API server restarts in less."""
FIRST_SECONDS = 4.0
"""The same if it has never answered: then the address is probably wrong."""
LONGEST_PAUSE_SECONDS = 8.0
CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})


class Connection:
    """An API server with credentials; threads share it."""

    def __init__(self, client: Any, *, in_cluster: bool = False) -> None:
        self._client = client
        self.in_cluster = in_cluster
        self.requests: Counter[tuple[str, str]] = Counter()
        """How often each (verb, plural) was asked, repeats included."""
        self.has_answered = False
        self.served: set[Kind] = set()
        """The kinds that the API server has answered for."""
        self._lock = threading.Lock()

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

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> Any:
        """Send one request, without a retry; return urllib3's response, whose body is not read."""
        import urllib3

        all_headers = {"Accept": "application/json", "User-Agent": "rollway", **(headers or {})}
        all_headers |= self.make_auth_headers()
        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        with name_lost_connection(self.server):
            response = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=body,
                headers=all_headers,
                preload_content=False,
                retries=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds),
            )
        self.has_answered = True
        return response

    def read(self, response: Any) -> bytes:
        """Return the body of a response, and release its connection."""
        with name_lost_connection(self.server):
            body: bytes = response.read()
            response.release_conn()
        return body

    def read_lines(self, response: Any) -> Iterator[bytes]:
        """Yield the lines of a response that the server may keep open."""
        rest = b""
        with name_lost_connection(self.server), contextlib.closing(response):
            for chunk in response.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from filter(None, lines)
            if rest:
                yield rest

    def may_answer_later(self, status: int, error: RollwayError, kind: Kind) -> bool:
        """Return whether the same request may succeed in a moment.

        An API server that starts answers 404 for kinds of CRDs that it has not loaded yet: a kind
        that was served is not missing.
        """
        if isinstance(error, KindMissing):
            return kind in self.served
        return status in _RETRIED and isinstance(error, ClusterError)

    def count(self, verb: str, kind: Kind) -> None:
        with self._lock:
            self.requests[verb, kind.plural] += 1

    def ask(
        self,
        make_refusal: Callable[[int, bytes], Refusal],
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        wait: Callable[[float], object] = time.sleep,
    ) -> Any:
        """Send a request and return the JSON of its answer; None if the object does not exist.

        Busy and failing servers and lost connections are asked again, within bounds; `wait` ends
        this early if it returns a true value, as the wait for an event does.

        Raises:
            RollwayError: what `refusals.explain` makes of the answer.
        """
        template = make_refusal(0, b"")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type, "Accept": accept}
        pauses = Pauses(self)
        while True:
            self.count(template.verb, template.kind)
            try:
                response = self.send(method, path, query=query, body=data, headers=headers)
                status, answer = response.status, self.read(response)
            except Unavailable:
                pause = pauses.take_next(None)
                if pause is None or wait(pause):
                    raise
                continue
            if status < 300:
                self.served.add(template.kind)
                return json.loads(answer) if answer else {}
            refusal = make_refusal(status, answer)
            if refusal.says_not_found:
                self.served.add(template.kind)
                return None
            refused = explain(refusal)
            may_repeat = self.may_answer_later(status, refused, template.kind)
            pause = pauses.take_next(response.headers.get("Retry-After")) if may_repeat else None
            if pause is None or wait(pause):
                raise refused


class Pauses:
    """The pauses between repeats of a request: 1 s, 2 s, … until patience ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._since = time.monotonic()
        self._next = 1.0

    def take_next(self, retry_after: str | None) -> float | None:
        """Return how long to wait before the next try, or None if this was the last."""
        patience = PATIENCE_SECONDS if self._connection.has_answered else FIRST_SECONDS
        pause = self._next
        if retry_after and retry_after.isdigit():
            pause = min(max(pause, float(retry_after)), LONGEST_PAUSE_SECONDS)
        self._next = min(self._next * 2, LONGEST_PAUSE_SECONDS)
        return None if time.monotonic() - self._since + pause > patience else pause


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


def open_connection(context: str | None, kubeconfig: str | None) -> tuple[Connection, str]:
    """Connect by a kubeconfig, or in a pod by its service account; return also the namespace.

    A pod is recognized by its service account. A kubeconfig that is named, also by $KUBECONFIG,
    comes first.
    """
    try:
        from kubernetes.config.incluster_config import InClusterConfigLoader

        from kubernetes import client, config
    except ImportError as error:
        raise UsageError(
            "Kubernetes needs a package that is not installed: kubernetes.",
            "pip install 'rollway[k8s]'.",
        ) from error
    # The package reads $KUBECONFIG only once, when it is imported.
    kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")
    named = kubeconfig or context
    if not named and os.environ.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").exists():
        configuration = client.Configuration()
        loader = InClusterConfigLoader(str(ACCOUNT / "token"), str(ACCOUNT / "ca.crt"))
        loader.load_and_set(configuration)
        namespace = (ACCOUNT / "namespace").read_text().strip()
        return Connection(client.ApiClient(configuration), in_cluster=True), namespace
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
    return Connection(api), str(namespace)
