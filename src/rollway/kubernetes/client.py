"""Calls to the API server of a cluster: everything that Rollway asks of Kubernetes.

    cluster = Cluster.connect(namespace="rl")
    cluster.apply(DGD, graph)                      # server-side apply as `rollway`
    graphs = cluster.list(DGD, labels=select_run("grpo"))

Rollway knows graphs of v1beta1 only. A server that has nothing but v1alpha1 gets them converted,
and what it answers is converted back, here and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollway.errors import ClusterError, Conflict, Gone, KindMissing
from rollway.kubernetes.api_server import (
    READ_SECONDS,
    ApiServer,
    Refusal,
    Unavailable,
    explain,
    name_lost_connection,
    open_connection,
)
from rollway.kubernetes.conversion import convert, raise_live
from rollway.kubernetes.objects import (
    DGD,
    DGD_ALPHA,
    FIELD_MANAGER,
    POD,
    RUN_LABEL,
    SERVICE,
    Object,
    ObjectKind,
)

_ACCESS_REVIEW = ObjectKind(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False
)
_ATTEMPTS, _SERVICE_SECONDS = 8, 10.0
_GROUPS = ObjectKind("", "", "apis", "APIGroupList", False)
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
Objects = list[Object]
Change = Callable[[Object], Object | None]
"""Returns what is to be merged into an object; None if it is as it should be."""


class Cluster:
    """One namespace of a cluster, with the caller's credentials. Threads may share it."""

    def __init__(
        self, connection: ApiServer, namespace: str, fence: Callable[[], object] = lambda: None
    ) -> None:
        self.connection = connection
        self.namespace = namespace
        self.check_fence = fence

    @classmethod
    def connect(
        cls,
        *,
        context: str | None = None,
        namespace: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> Cluster:
        """Use a kubeconfig, or in a pod its service account. Sends no request yet.

        Raises:
            UsageError: there is neither, or no such context.
        """
        path = None if kubeconfig is None else str(kubeconfig)
        connection, default = open_connection(context, path)
        return cls(connection, namespace or default)

    def in_namespace(self, namespace: str) -> Cluster:
        """Return the same cluster with another namespace; both share connections."""
        return Cluster(self.connection, namespace)

    def add_fence(self, fence: Callable[[], object]) -> Cluster:
        """Return the same cluster, which calls `fence` before every write, and in waits. It
        raises if this command may not write any more."""
        return Cluster(self.connection, self.namespace, fence)

    @property
    def in_cluster(self) -> bool:
        """Whether this process runs in a pod, where Services have addresses."""
        return self.connection.in_cluster

    @property
    def has_old_graphs(self) -> bool:
        """Whether graphs were found to be served in v1alpha1 alone."""
        return DGD_ALPHA in self.connection.served and DGD not in self.connection.served

    # --- read ---------------------------------------------------------------------------------

    def get(self, kind: ObjectKind, name: str) -> Object | None:
        """Return an object, or None if there is none of that name."""
        return self._ask("GET", kind, name)

    def list(self, kind: ObjectKind, *, labels: str = "", fields: str = "") -> Objects:
        """Return the objects that match."""
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {key: value for key, value in selectors.items() if value}
        answer = self._ask("GET", kind, verb="list", query=query) or {}
        return answer.get("items") or []

    def read_log(
        self, pod: str, container: str = "", *, follow: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        """Yield the lines of a container's log."""
        options = {"follow": "true" if follow else "", "container": container, "tailLines": tail}
        query = urlencode({key: value for key, value in options.items() if value not in ("", None)})
        response = self.connection.send(
            "GET",
            f"{POD.make_path(self.namespace, pod, 'log')}?{query}",
            headers={"Accept": "*/*"},
            read_seconds=24 * 3600.0 if follow else READ_SECONDS,
            preload=False,
        )
        with name_lost_connection(self.connection.server), contextlib.closing(response):
            if response.status != 200:
                asked = Refusal("get", POD, self.namespace, pod, "log")
                raise explain(asked.with_answer(response.status, response.read()))
            rest = b""
            for chunk in response.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines if line)
            if rest:
                yield rest.decode(errors="replace")

    def list_groups(self) -> set[str]:
        """Return the API groups that the cluster serves; every user may read them."""
        asked = Refusal("get", _GROUPS, self.namespace)
        answer = self.connection.ask(asked, "GET", "/apis", None, "application/json") or {}
        return {group["name"] for group in answer["groups"]}

    def may(self, verb: str, kind: ObjectKind, subresource: str = "") -> bool:
        """Ask the API server whether this user has a permission in this namespace."""
        wanted = {
            "verb": verb, "group": kind.group, "version": kind.version, "resource": kind.plural,
            "subresource": subresource, "namespace": self.namespace,
        }  # fmt: skip
        body = {
            "apiVersion": _ACCESS_REVIEW.api_version,
            "kind": _ACCESS_REVIEW.kind,
            "spec": {"resourceAttributes": wanted},
        }
        answer = self._ask("POST", _ACCESS_REVIEW, body=body) or {}
        return bool(answer["status"].get("allowed"))

    def ask_service(
        self,
        service: str,
        port: int | str,
        path: str,
        *,
        method: str = "GET",
        body: bytes | None = None,
    ) -> tuple[int, bytes]:
        """Send a request to a Service; return the status and the body of its answer.

        In a pod it goes to the Service itself, elsewhere through the API server's proxy. A Service
        that does not answer is 502 or 503, as the proxy says it; so is the API server itself.

        Raises:
            Forbidden: the proxy may not be used.
        """
        import urllib3

        if method != "GET":
            self.check_fence()
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if self.in_cluster:
            url = f"http://{service}.{self.namespace}.svc:{port}{path}"
            try:
                direct = urllib3.request(
                    method, url, body=body, headers=headers, timeout=_SERVICE_SECONDS, retries=False
                )
            except urllib3.exceptions.HTTPError as error:
                return 502, str(error).encode()
            return direct.status, direct.data
        root = SERVICE.make_path(self.namespace) + f"/{service}:{port}/proxy"
        try:
            response = self.connection.send(
                method, root + path, body=body, headers=headers, read_seconds=_SERVICE_SECONDS
            )
        except Unavailable as error:
            return 503, error.message.encode()
        verb = "get" if method == "GET" else "create"
        asked = Refusal(verb, SERVICE, self.namespace, service, "proxy")
        refusal = asked.with_answer(response.status, response.data)
        if response.status in (401, 403) and refusal.details:  # the API server's own answer
            raise explain(refusal)
        return response.status, response.data

    # --- write --------------------------------------------------------------------------------

    def apply(self, kind: ObjectKind, body: Object, *, dry_run: bool = False) -> Object:
        """Create or change an object by server-side apply; the same body again changes nothing.

        An object that exists must belong to the same run, by its label. A dry run changes nothing,
        so it asks neither for that nor for who has set a field.

        Raises:
            Conflict: another run or somebody else has the object or a field, or the old object of
                that name is not gone yet.
            InvalidObject: the API server refuses the object.
        """
        name = body["metadata"]["name"]
        if not dry_run and (live := self.get(kind, name)) is not None:
            self.check_owner(kind, body, live)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All", "force": "true"} if dry_run else {}
        body = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        content_type = "application/apply-patch+yaml"
        applied = self._ask("PATCH", kind, name, body=body, query=query, content_type=content_type)
        return applied or {}

    def check_owner(self, kind: ObjectKind, body: Object, live: Object) -> None:
        """Raise Conflict unless `live` belongs to the run of `body` and will stay."""
        meta = live["metadata"]
        subject = f"{kind.kind} {meta['name']} in namespace {self.namespace}"
        run = (body["metadata"].get("labels") or {}).get(RUN_LABEL)
        owner = (meta.get("labels") or {}).get(RUN_LABEL)
        if owner is None or owner != run:
            whose = f"belongs to run {owner}" if owner else "was not created by Rollway"
            raise Conflict(
                f"{subject} exists and {whose}.",
                "Choose another name, or remove it yourself if nobody needs it.",
            )
        if meta.get("deletionTimestamp"):
            raise Conflict(
                f"{subject} is still being deleted{name_finalizers(meta)}.",
                "Wait until it is gone, then run the command again.",
            )

    def create(self, kind: ObjectKind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object that must not exist yet; unknown fields are refused.

        Raises:
            Conflict: there is one of that name; also if the answer to a create that succeeded was
                lost, and the request was repeated.
        """
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        return self._ask("POST", kind, body=body, query=query) or {}

    def patch(
        self,
        kind: ObjectKind,
        name: str,
        body: Mapping[str, Any],
        *,
        resource_version: str | None = None,
        subresource: str = "",
    ) -> Object:
        """Merge `body` into an object (RFC 7386).

        Raises:
            Conflict: the object is no longer at `resource_version`. Also possible if the answer to
                a patch that succeeded was lost: read the object again.
            Gone: there is no such object.
        """
        merged: dict[str, Any] = dict(body)
        if resource_version is not None:
            merged["metadata"] = {**merged.get("metadata", {}), "resourceVersion": resource_version}
        answer = self._ask(
            "PATCH",
            kind,
            name,
            subresource=subresource,
            body=merged,
            query={"fieldManager": FIELD_MANAGER},
            content_type="application/merge-patch+json",
        )
        if answer is None:
            raise Gone(
                f"{kind.kind} {name} in namespace {self.namespace} does not exist (any more).",
                "Somebody deleted it; `rollway k8s status` shows what is left.",
            )
        return answer

    def change(self, kind: ObjectKind, live: Object, make: Change) -> Object:
        """Merge what `make` returns for an object into it, unless that is None, and only into the
        version that it was made from. Others write at any time, so it is tried several times.

        Raises:
            ClusterError: the object is gone or another one, or others write all the time.
        """
        name, uid = live["metadata"]["name"], live["metadata"]["uid"]
        for _ in range(_ATTEMPTS):
            if (body := make(live)) is None:
                return live
            try:
                version = live["metadata"]["resourceVersion"]
                return self.patch(kind, name, body, resource_version=version)
            except Conflict:
                current = self.get(kind, name)
            if current is None or current["metadata"]["uid"] != uid:
                raise make_deleted_error(kind, name)
            live = current
        raise ClusterError(
            f"{kind.kind} {name} was changed by others {_ATTEMPTS} times in between.",
            "Find out who writes to it all the time (metadata.managedFields), then run again.",
        )

    def delete(
        self,
        kind: ObjectKind,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> bool:
        """Delete an object; return False if there is none. With `uid`, only that very object, with
        `resource_version` only if nobody has changed it.

        Raises:
            Conflict: the object of that name is another one, or has changed.
        """
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        expected = {"uid": uid, "resourceVersion": resource_version}
        expected = {key: value for key, value in expected.items() if value}
        body: Object = {**options, **({"preconditions": expected} if expected else {})}
        return self._ask("DELETE", kind, name, body=body) is not None

    def find_drift(self, kind: ObjectKind, body: Object) -> tuple[str, ...]:
        """Return the paths of the fields that applying `body` would change.

        The API server applies it as a dry run, so defaults and fields of others are no drift.
        """
        live = self.get(kind, body["metadata"]["name"])
        if live is None:
            return ("metadata.name",)
        wanted = self.apply(kind, body, dry_run=True)
        return tuple(_compare(_select(live), _select(wanted), ""))

    # --- inside -------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        kind: ObjectKind,
        name: str = "",
        *,
        subresource: str = "",
        verb: str = "",
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Object | None:
        if method != "GET" and "dryRun" not in (query or {}):
            self.check_fence()
        subject = name or ((body or {}).get("metadata") or {}).get("name") or ""
        asked = Refusal(verb or _VERBS[method], kind, self.namespace, subject, subresource)
        path = f"{kind.make_path(self.namespace, name, subresource)}?{urlencode(query or {})}"
        if kind != DGD:
            return self.connection.ask(asked, method, path, body, content_type)
        missing: KindMissing | None = None
        if not self.has_old_graphs:
            try:
                return self.connection.ask(asked, method, path, body, content_type)
            except KindMissing as error:
                missing = error
        old = asked.with_kind(DGD_ALPHA)
        path = path.replace(DGD.api_version, DGD_ALPHA.api_version, 1)
        if body is not None and body.get("apiVersion") == DGD.api_version:
            body = convert(body, DGD_ALPHA.version).graph
        try:
            answer = self.connection.ask(old, method, path, body, content_type)
        except KindMissing as error:
            raise missing or error from None
        if answer is not None and "items" in answer:
            # The items of a list do not say what they are.
            what = {"apiVersion": DGD_ALPHA.api_version, "kind": DGD.kind}
            answer["items"] = [raise_live({**what, **item}) for item in answer["items"]]
            return answer
        return raise_live(answer) if answer is not None and "spec" in answer else answer


def make_deleted_error(kind: ObjectKind, name: str) -> ClusterError:
    return ClusterError(
        f"{kind.kind} {name} was deleted by somebody else.",
        "Find out who deletes it, then run again.",
    )


def name_finalizers(meta: Mapping[str, Any]) -> str:
    """Return what holds an object that is to be deleted, in brackets; empty for nothing."""
    finalizers = meta.get("finalizers") or []
    return f" (held by finalizer {', '.join(finalizers)})" if finalizers else ""


_VOLATILE = frozenset(
    {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink"}
)


def _select(entry: Object) -> Object:
    """Return an object without its status and what the API server keeps itself."""
    meta = {key: value for key, value in entry["metadata"].items() if key not in _VOLATILE}
    return {**{key: value for key, value in entry.items() if key != "status"}, "metadata": meta}


def _compare(live: Any, wanted: Any, path: str) -> Iterator[str]:
    """Yield the paths that differ; lists of named parts by name, as a server-side apply merges."""
    lists = [value for value in (live, wanted) if isinstance(value, list)]
    parts = [part for value in lists for part in value]
    if len(lists) == 2 and all(isinstance(part, dict) and "name" in part for part in parts):
        live, wanted = ({part["name"]: part for part in value} for value in lists)
    if isinstance(live, dict) and isinstance(wanted, dict):
        for key in sorted({*live, *wanted}):
            yield from _compare(live.get(key), wanted.get(key), f"{path}.{key}" if path else key)
    elif live != wanted:
        yield path
