"""What an API server's refusal means: `explain(refusal)` gives the error to raise.

The server says "no" in many ways. An unknown field in an apply is a 500, in a create a 400; a
schema or CEL violation is a 422; a quota, a missing permission and a webhook can all be a 403; a
missing CRD is a 404 without a body that says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rollway.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    InvalidObject,
    KindMissing,
    NamespaceMissing,
    RollwayError,
)
from rollway.kubernetes.kinds import Kind, Object

INSTALL_COMMANDS = {
    "nvidia.com": "helm install dynamo-platform oci://nvcr.io/nvidia/ai-dynamo/dynamo-platform"
    " -n dynamo-system --create-namespace",
    "ray.io": "helm install kuberay-operator kuberay/kuberay-operator"
    " --repo https://ray-project.github.io/kuberay-helm/ --version 1.7.0",
}
"""What installs the CRDs of a group, with their operator."""

_BAD_APPLY = ("failed to create typed", "field not declared in schema", "failed to convert new")
"""In the body of a 500: the applied object does not fit the schema. The object is the user's."""
_SECRET_NAME = re.compile(r"TOKEN|KEY|PASSWORD|SECRET|CRED|PASSWD", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"\b([A-Z0-9_]*(?:TOKEN|KEY|PASSWORD|SECRET|CRED|PASSWD)[A-Z0-9_]*)(=|: *)"
    r"(\"[^\"]*\"|'[^']*'|[^\s\"';&|]+)"
)
"""Inside of strings: HF_TOKEN=… in an entry point, HF_TOKEN: … in a runtime environment's YAML."""
_BLANK = "***"
_WEBHOOK = re.compile(r'admission webhook "([^"]+)" denied the request:? ?(.*)', re.DOTALL)
_VERB = re.compile(r"cannot (\w+) resource")
_MANAGER = re.compile(r'conflict with "([^"]*)"')
_TYPED_PATH = re.compile(r"(\.[\w.\[\]=\"/-]+): (.+)")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of the API server that is no success, with what was asked."""

    status: int
    body: bytes
    verb: str
    """As RBAC has it: get, list, watch, create, patch, delete."""
    kind: Kind
    namespace: str
    name: str = ""
    subresource: str = ""
    manifest: Object | None = None

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
    def reason(self) -> str:
        return str(self.details.get("reason") or "")

    @property
    def subject(self) -> str:
        where = f" in namespace {self.namespace}" if self.kind.namespaced else ""
        return f"{self.kind.kind} {self.name}{where}" if self.name else f"{self.kind.kind}s{where}"

    @property
    def says_not_found(self) -> bool:
        """Whether the object is missing, and not its kind or its namespace."""
        if self.status != 404 or self.reason != "NotFound":
            return False
        # A kind that is not served is also `NotFound`, in a Status without details of an object.
        details = self.details.get("details") or {}
        is_namespace = details.get("kind") == "namespaces" and self.kind.plural != "namespaces"
        return bool(details.get("name")) and not is_namespace


def explain(refusal: Refusal) -> RollwayError:
    """Make the error for a refusal: the server's words, and what to do."""
    text = refusal.text
    webhook = _WEBHOOK.search(text)
    if webhook:
        return _make_invalid(refusal, [("", webhook[2].strip())], f"webhook {webhook[1]}")
    if refusal.status == 500 and any(part in text for part in _BAD_APPLY):
        return _make_invalid(refusal, _find_typed_causes(text), "schema")
    if refusal.status in (400, 422) and refusal.manifest is not None:
        return _make_invalid(refusal, _find_causes(refusal), "schema")
    if refusal.status == 401:
        return ClusterError(
            f"The cluster does not accept your credentials: {text}",
            "Log in again; a token or certificate of the kubeconfig has probably expired.",
        )
    if refusal.status == 403:
        return _explain_forbidden(refusal)
    if refusal.status == 404:
        return _explain_missing(refusal)
    if refusal.status == 409:
        return _explain_conflict(refusal)
    return ClusterError(
        f"The API server answered {refusal.status} to {refusal.verb} {refusal.subject}: {text}",
        "It was asked again for a while; look at the API server's health, then try again.",
    )


def make_rule(verb: str, kind: Kind, subresource: str = "") -> dict[str, list[str]]:
    """Return the RBAC rule for one verb on one kind."""
    resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
    return {"apiGroups": [kind.group], "resources": [resource], "verbs": [verb]}


def blank_secrets(manifest: Object) -> Object:
    """Copy an object with the values of its secrets replaced by `***`."""
    copy: Object = json.loads(json.dumps(manifest))
    for holder, key in _find_secrets(copy):
        holder[key] = _BLANK
    blanked: Object = _blank_strings(copy)
    return blanked


def show_manifest(manifest: Object) -> str:
    """Return an object as YAML, with its secrets blanked."""
    return yaml.safe_dump(blank_secrets(manifest), sort_keys=False)


def _blank_strings(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _blank_strings(part) for key, part in node.items()}
    if isinstance(node, list):
        return [_blank_strings(part) for part in node]
    if isinstance(node, str):
        return _SECRET_TEXT.sub(rf"\1\2{_BLANK}", node)
    return node


def _find_secrets(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where secrets stand: env values with a telling name, and the data of Secrets."""
    if isinstance(node, list):
        for part in node:
            yield from _find_secrets(part)
        return
    if not isinstance(node, dict):
        return
    if node.get("kind") == "Secret":
        for field in ("data", "stringData"):
            values = node.get(field)
            if isinstance(values, dict):
                yield from ((values, key) for key in values)
    name = node.get("name")
    if isinstance(name, str) and isinstance(node.get("value"), str) and _SECRET_NAME.search(name):
        yield node, "value"
    for key, part in list(node.items()):
        if isinstance(part, str) and _SECRET_NAME.search(key) and key.isupper():
            yield node, key  # an environment as a mapping
        else:
            yield from _find_secrets(part)


def _make_invalid(refusal: Refusal, causes: list[tuple[str, str]], judge: str) -> InvalidObject:
    manifest = refusal.manifest or {}
    # The server quotes wrong values; a secret among them must not be shown.
    secrets = [str(holder[key]) for holder, key in _find_secrets(manifest)]
    for secret in filter(None, secrets):
        causes = [(path, words.replace(secret, _BLANK)) for path, words in causes]
    causes = [(path, str(_blank_strings(words))) for path, words in causes]
    shown = "; ".join(f"{path}: {words}" if path else words for path, words in causes)
    return InvalidObject(
        f"The cluster's {judge} refuses {refusal.subject}: {shown}",
        "Correct the field in the manifest or in the infra file.",
        causes=causes,
        manifest=show_manifest(manifest) if manifest else "",
    )


def _find_causes(refusal: Refusal) -> list[tuple[str, str]]:
    details = refusal.details.get("details") or {}
    causes = [
        (str(cause.get("field") or ""), str(cause.get("message") or ""))
        for cause in details.get("causes") or []
    ]
    return causes or [("", refusal.text)]


def _find_typed_causes(text: str) -> list[tuple[str, str]]:
    """Return path and words of `failed to create typed patch object (…): .spec.x: words`."""
    match = _TYPED_PATH.search(text.split("): ", 1)[-1])
    return [(match[1].lstrip("."), match[2])] if match else [("", text)]


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
    verb = named[1] if named else refusal.verb
    rule = make_rule(verb, refusal.kind, refusal.subresource)
    resource = rule["resources"][0]
    group = f" of {refusal.kind.group}" if refusal.kind.group else ""
    where = f" in namespace {refusal.namespace}" if refusal.kind.namespaced else ""
    role = "Role" if refusal.kind.namespaced else "ClusterRole"
    return Forbidden(
        f"You may not {verb} {resource}{group}{where}: {text}",
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
    return make_kind_missing(refusal.kind)


def make_kind_missing(kind: Kind) -> KindMissing:
    command = INSTALL_COMMANDS.get(kind.group)
    return KindMissing(
        f"The cluster does not serve {kind.kind} {kind.api_version}.",
        f"Install its operator: {command}" if command else "Use a newer cluster.",
    )


def _explain_conflict(refusal: Refusal) -> RollwayError:
    details: Mapping[str, Any] = refusal.details.get("details") or {}
    fields = []
    for cause in details.get("causes") or []:
        manager = _MANAGER.search(str(cause.get("message") or ""))
        if cause.get("reason") == "FieldManagerConflict":
            fields.append((str(cause.get("field") or ""), manager[1] if manager else "unknown"))
    if fields:
        shown = ", ".join(f"{field} (held by {manager})" for field, manager in fields)
        return Conflict(
            f"{refusal.subject} has fields that another manager set differently: {shown}.",
            "Leave these fields out, agree with that manager, or take them over with `--force`.",
            fields=fields,
        )
    if refusal.reason == "AlreadyExists":
        return Conflict(
            f"{refusal.subject} exists already.",
            "Choose another name, or remove it with `rollway k8s down`.",
        )
    return Conflict(
        f"{refusal.subject} was changed by somebody else meanwhile: {refusal.text}",
        "Read it again and repeat the change.",
    )
