"""What the spec of a DynamoGraphDeployment asks for: pods, workers, models, a frontend; and what of
this its frontend lists."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollway.kubernetes.names import Object, find_frontend, is_worker_namespace

_WORKER_TYPES = frozenset({"worker", "prefill", "decode"})
_MODEL_FLAGS = ("--served-model-name", "--model-name")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the spec of a graph asks for."""

    pods: int
    workers: int
    models: tuple[str, ...]
    frontend: str | None
    """The Service of its frontend."""


def read_expected(graph: Object) -> Expected:
    """Return what a graph's spec asks for, in both versions of its kind."""
    spec = graph.get("spec") or {}
    parts: list[tuple[str, Mapping[str, Any]]]
    if "components" in spec:
        parts = [(str(part.get("type") or ""), part) for part in spec["components"] or []]
    else:
        services: Mapping[str, Any] = spec.get("services") or {}
        parts = [(_find_alpha_type(name, part), part) for name, part in services.items()]
    pods = workers = 0
    models: list[str] = []
    for kind, part in parts:
        replicas = part.get("replicas")
        replicas = 1 if replicas is None else int(replicas)
        pods += replicas * int((part.get("multinode") or {}).get("nodeCount") or 1)
        if kind in _WORKER_TYPES and replicas:
            workers += replicas
            models += _find_models(_find_arguments(part))
    return Expected(pods, workers, tuple(dict.fromkeys(models)), find_frontend(graph))


def _find_alpha_type(name: str, part: Mapping[str, Any]) -> str:
    kind = str(part.get("subComponentType") or part.get("componentType") or "")
    return "" if kind == "frontend" or name == "Frontend" else kind


def _find_arguments(part: Mapping[str, Any]) -> list[str]:
    """Return the words of a component's command, also those inside of `sh -c`."""
    if "podTemplate" in part:
        containers = ((part["podTemplate"] or {}).get("spec") or {}).get("containers") or []
        container: Mapping[str, Any] = next((c for c in containers if c.get("name") == "main"), {})
    else:
        container = (part.get("extraPodSpec") or {}).get("mainContainer") or {}
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    split: list[str] = []
    for word in map(str, words):
        try:
            split += shlex.split(word) if " " in word else [word]
        except ValueError:
            split += word.split()
    return split


def _find_models(words: Sequence[str]) -> Iterable[str]:
    for word, following in zip(words, [*words, ""][1:], strict=True):
        flag, given, value = word.partition("=")
        name = value if given else following
        # A variable is known in the pod only.
        if flag in _MODEL_FLAGS and name and "$" not in name:
            yield name


def count_workers(body: bytes, namespace: str, graph: Object) -> int | None:
    """Return how many workers of a graph a frontend's `/health` lists; None without a listing."""
    name = graph["metadata"]["name"]
    status = graph.get("status") or {}
    components = status.get("components") or status.get("services") or {}
    reported = {part.get("runtimeNamespace") for part in components.values()}

    def is_ours(entry: Mapping[str, Any]) -> bool:
        where = str(entry.get("namespace"))
        return where in reported or is_worker_namespace(where, namespace, name)

    try:
        workers = [e for e in json.loads(body)["instances"] if e.get("endpoint") == "generate"]
        return len({entry["instance_id"] for entry in workers if is_ours(entry)})
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def read_models(body: bytes) -> list[str] | None:
    """Return the models that a frontend's `/v1/models` lists; None without a listing."""
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        return None
