"""What an API server's refusal means: `explain(refusal)` gives the error to raise.

The server's own words are passed on. Errors differ where a command acts on the difference: an
unknown field in an apply is a 500, in a create a 400; a schema or CEL violation is a 422; a quota,
a missing permission and a webhook can all be a 403; a missing CRD is a 404 without a body that says
so.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from rollway.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    InvalidObject,
    KindMissing,
    NamespaceMissing,
    RollwayError,
)
from rollway.kubernetes.objects import Kind

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was asked, and an answer of the API server that is no success."""

    verb: str
    """As RBAC has it: get, list, create, patch, delete."""
    kind: Kind
    namespace: str
    name: str = ""
    subresource: str = ""
    status: int = 0
    body: bytes = b""

    def with_answer(self, status: int, body: bytes) -> Refusal:
        return replace(self, status=status, body=body)

    def with_kind(self, kind: Kind) -> Refusal:
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


def make_rule(verb: str, kind: Kind, subresource: str = "") -> dict[str, list[str]]:
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
        f"Add this rule to your {role} (deploy/rbac has whole ones): {json.dumps(rule)}",
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
