"""Checks objects against the schemas of the CRDs, as a server does that validates strictly.

Rules in CEL are not checked here; tests/kubernetes sends the same objects to a real server."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

CRDS = Path(__file__).parents[2] / "data" / "crds"
_PLURALS = {
    "DynamoGraphDeployment": "nvidia.com_dynamographdeployments",
    "RayJob": "ray.io_rayjobs",
    "RayCluster": "ray.io_rayclusters",
    "PodMonitor": "monitoring.coreos.com_podmonitors",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules",
}


def list_faults(item: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object of a CRD; nothing for one of another kind."""
    if item["kind"] not in _PLURALS:
        return []
    validator = _get_validator(item["kind"], item["apiVersion"].partition("/")[2])
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(item)]


@cache
def _get_validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    with lzma.open(CRDS / f"{_PLURALS[kind]}.json.xz") as file:
        crd = json.load(file)
    for served in crd["spec"]["versions"]:
        if served["name"] == version:
            schema = served["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"] = {"type": "object"}
            return jsonschema.Draft202012Validator(_close(schema))
    raise ValueError(f"{kind} has no {version}")


def _close(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as strict validation does."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") is True
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        closed.setdefault("additionalProperties", False)
    return closed
