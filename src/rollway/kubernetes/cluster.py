"""Calls to the API server of a cluster: everything that Rollway asks of Kubernetes.

    cluster = Cluster.connect(namespace="rl")
    cluster.apply(DGD, graph)                      # server-side apply as `rollway`
    for change in cluster.watch(DGD, labels=select_run("grpo"), stop=stop): ...

Paths are made from `Kind`s, so no request is spent on discovery.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollway.errors import Conflict, Gone
from rollway.kubernetes.connection import (
    READ_SECONDS,
    Connection,
    open_connection,
)
from rollway.kubernetes.kinds import POD, SERVICE, Kind, Object
from rollway.kubernetes.names import FIELD_MANAGER, RUN_LABEL
from rollway.kubernetes.refusals import Refusal, explain
from rollway.kubernetes.watches import Change, Selection, Watch

_ACCESS_REVIEW = Kind(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False
)
Objects = list[Object]
_UNKNOWN: Object = {"unknown": True}
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class Cluster:
    """One namespace of a cluster, with the caller's credentials. Threads may share it."""

    def __init__(
        self, connection: Connection, namespace: str, fence: Callable[[], object] = lambda: None
    ) -> None:
        self.connection = connection
        self.namespace = namespace
        self.fence = fence
        """Called before every write; it raises where this process may not write any more."""

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
        """Return the same cluster with another namespace; both share connections and counts."""
        return Cluster(self.connection, namespace, self.fence)

    def add_fence(self, fence: Callable[[], object]) -> Cluster:
        """Return the same cluster, which calls `fence` before every write."""
        return Cluster(self.connection, self.namespace, fence)

    @property
    def in_cluster(self) -> bool:
        """Whether this process runs in a pod, where Services have addresses."""
        return self.connection.in_cluster

    @property
    def requests(self) -> Counter[tuple[str, str]]:
        """How often each (verb, plural) was asked."""
        return self.connection.requests

    def close(self) -> None:
        self.connection.close()

    # --- read ---------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str) -> Object | None:
        """Return an object, or None if there is none of that name."""
        answer: Object | None = self._ask("GET", kind, name)
        return answer

    def list(
        self, kind: Kind, *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> tuple[Objects, str]:
        """Return the objects that match, and the version of the list."""
        return self.list_selection(Selection(kind, labels, fields, metadata_only))

    def list_selection(
        self, selection: Selection, *, wait: Callable[[float], object] = time.sleep
    ) -> tuple[Objects, str]:
        """Do the same page by page, so that a full namespace is never one answer."""
        objects: Objects = []
        query: dict[str, Any] = {**selection.query, "limit": 500}
        while True:
            answer = self._ask(
                "GET",
                selection.kind,
                verb="list",
                query=query,
                accept=selection.accept_list,
                wait=wait,
            )
            objects += answer.get("items") or []
            if not (more := answer["metadata"].get("continue")):
                return objects, str(answer["metadata"].get("resourceVersion") or "")
            query["continue"] = more

    def watch(
        self,
        kind: Kind,
        *,
        labels: str = "",
        fields: str = "",
        stop: threading.Event,
        metadata_only: bool = False,
    ) -> Iterator[Change]:
        """Yield ADDED for every object that matches, then every change until `stop` is set.

        It lists again after 410 and resumes after the API server restarts. To wait for several
        kinds with a timeout, use `watches.Follower`.
        """
        return iter(Watch(self, Selection(kind, labels, fields, metadata_only), stop))

    def read_log(
        self, pod: str, container: str = "", *, follow: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        """Yield the lines of a container's log."""
        query: dict[str, Any] = {"follow": "true"} if follow else {}
        query |= {"container": container} if container else {}
        query |= {"tailLines": tail} if tail is not None else {}
        self.connection.count("get", POD)
        response = self.connection.send(
            "GET",
            POD.make_path(self.namespace, pod, "log"),
            query=query,
            headers={"Accept": "*/*"},
            read_seconds=24 * 3600.0 if follow else READ_SECONDS,
        )
        if response.status != 200:
            refusal = self._make_refusal("get", POD, pod, "log", None)
            raise explain(refusal(response.status, self.connection.read(response)))
        for line in self.connection.read_lines(response):
            yield line.decode(errors="replace")

    def list_groups(self) -> set[str]:
        """Return the API groups that the cluster serves; every user may read them."""
        refusal = self._make_refusal("get", Kind("", "", "apis", "APIGroupList"), "", "", None)
        answer = self.connection.ask(refusal, "GET", "/apis")
        return {group["name"] for group in answer["groups"]}

    def may(self, verb: str, kind: Kind, subresource: str = "", name: str = "") -> bool:
        """Ask the API server whether this user has a permission in this namespace."""
        wanted = {"verb": verb, "group": kind.group, "resource": kind.plural}
        wanted |= {"version": kind.version} if kind.version else {}
        wanted |= {"namespace": self.namespace} if kind.namespaced else {}
        wanted |= {"subresource": subresource} if subresource else {}
        wanted |= {"name": name} if name else {}
        body = {
            "apiVersion": _ACCESS_REVIEW.api_version,
            "kind": _ACCESS_REVIEW.kind,
            "spec": {"resourceAttributes": wanted},
        }
        answer = self._ask("POST", _ACCESS_REVIEW, body=body)
        return bool(answer["status"].get("allowed"))

    def ask_service(
        self,
        service: str,
        port: int | str,
        path: str,
        *,
        method: str = "GET",
        body: bytes | None = None,
        seconds: float = 10.0,
    ) -> tuple[int, bytes]:
        """Send a request to a Service; return the status and the body of its answer.

        In a pod it goes to the Service itself, elsewhere through the API server's proxy. A Service
        that does not answer is 502 or 503, as the proxy says it.

        Raises:
            Forbidden: the proxy may not be used.
            ClusterError: the API server itself does not answer.
        """
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if method != "GET":
            self.fence()
        if self.in_cluster:
            return self._ask_directly(service, port, path, method, body, headers, seconds)
        self.connection.count("proxy", SERVICE)
        root = SERVICE.make_path(self.namespace) + f"/{service}:{port}/proxy"
        response = self.connection.send(
            method, root + path, body=body, headers=headers, read_seconds=seconds
        )
        status, answer = response.status, self.connection.read(response)
        verb = "get" if method == "GET" else "create"
        refusal = self._make_refusal(verb, SERVICE, service, "proxy", None)(status, answer)
        if status in (401, 403) and refusal.details:  # the API server's own answer
            raise explain(refusal)
        return status, answer

    # --- write --------------------------------------------------------------------------------

    def apply(
        self,
        kind: Kind,
        body: Object,
        *,
        dry_run: bool = False,
        force: bool = False,
        live: Object | None = _UNKNOWN,
    ) -> Object:
        """Create or change an object by server-side apply; the same body again changes nothing.

        An object that exists must belong to the same run, by its label. `live` is what the caller
        knows to be there (`list_by_name`, or None for nothing); without it one request asks.

        Raises:
            Conflict: another run or somebody else has the object or a field, or the old object of
                that name is not gone yet.
            InvalidObject: the API server refuses the object.
        """
        name = body["metadata"]["name"]
        if live is _UNKNOWN:
            live = self.get(kind, name)
        if live is not None:
            self.check_owner(kind, body, live)
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        query |= {"fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        applied: Object = self._ask(
            "PATCH",
            kind,
            name,
            body={"apiVersion": kind.api_version, "kind": kind.kind, **body},
            query=query,
            content_type="application/apply-patch+yaml",
        )
        return applied

    def check_owner(self, kind: Kind, body: Object, live: Object) -> None:
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

    def list_by_name(self, kind: Kind) -> dict[str, Object]:
        """Return the metadata of all objects of a kind, by name: one request for many checks."""
        objects, _ = self.list(kind, metadata_only=True)
        return {entry["metadata"]["name"]: entry for entry in objects}

    def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object that must not exist yet; unknown fields are refused.

        Raises:
            Conflict: there is one of that name; also if the answer to a create that succeeded was
                lost, and the request was repeated.
        """
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        answer: Object = self._ask("POST", kind, body=body, query=query)
        return answer

    def patch(
        self,
        kind: Kind,
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
            raise self._make_gone(kind, name)
        changed: Object = answer
        return changed

    def delete(
        self,
        kind: Kind,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: str = "Background",
        grace_seconds: int | None = None,
    ) -> bool:
        """Delete an object; return False if there is none. With `uid`, only that very object, with
        `resource_version` only if nobody has changed it.

        Raises:
            Conflict: the object of that name is another one, or has changed.
        """
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        expected = {"uid": uid, "resourceVersion": resource_version}
        expected = {key: value for key, value in expected.items() if value}
        body |= {"preconditions": expected} if expected else {}
        body |= {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        return self._ask("DELETE", kind, name, body=body) is not None

    # --- inside -------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        kind: Kind,
        name: str = "",
        *,
        subresource: str = "",
        verb: str = "",
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        wait: Callable[[float], object] = time.sleep,
    ) -> Any:
        if method != "GET" and "dryRun" not in (query or {}):
            self.fence()
        is_manifest = isinstance(body, dict) and "spec" in body and method in ("POST", "PATCH")
        subject = name or ((body or {}).get("metadata") or {}).get("name") or ""
        refusal = self._make_refusal(
            verb or _VERBS[method], kind, subject, subresource, body if is_manifest else None
        )
        return self.connection.ask(
            refusal,
            method,
            kind.make_path(self.namespace, name, subresource),
            query=query,
            body=body,
            content_type=content_type,
            accept=accept,
            wait=wait,
        )

    def _make_refusal(
        self, verb: str, kind: Kind, name: str, subresource: str, manifest: Object | None
    ) -> Callable[[int, bytes], Refusal]:
        def make(status: int, body: bytes) -> Refusal:
            return Refusal(status, body, verb, kind, self.namespace, name, subresource, manifest)

        return make

    def _make_gone(self, kind: Kind, name: str) -> Gone:
        return Gone(
            f"{kind.kind} {name} in namespace {self.namespace} does not exist (any more).",
            "Somebody deleted it; `rollway k8s status` shows what is left.",
        )

    def _ask_directly(
        self,
        service: str,
        port: int | str,
        path: str,
        method: str,
        body: bytes | None,
        headers: Mapping[str, str],
        seconds: float,
    ) -> tuple[int, bytes]:
        import urllib3

        url = f"http://{service}.{self.namespace}.svc:{port}{path}"
        try:
            answer = urllib3.request(
                method, url, body=body, headers=headers, timeout=seconds, retries=False
            )
        except urllib3.exceptions.HTTPError as error:
            return 502, str(error).encode()
        return answer.status, answer.data


def name_finalizers(meta: Mapping[str, Any]) -> str:
    """Return what holds an object that is to be deleted, in brackets; empty for nothing."""
    finalizers = meta.get("finalizers") or []
    return f" (held by finalizer {', '.join(finalizers)})" if finalizers else ""
