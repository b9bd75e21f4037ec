"""Read the files of deploy/observe, and the names of series in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rollway.observe.metrics import METRICS

FILES = Path(__file__).parents[2] / "deploy" / "observe"
RULES = FILES / "rollway.rules.yml"
RATE_SPAN = "$__rate_interval"
SERIES = {
    f"{name}_bucket" if metric.is_scraped and metric.kind == "histogram" else name: metric.name
    for metric in METRICS
    for name in (metric.name, *metric.aliases)
}
"""The metric of every series that Rollway, Dynamo or vLLM has."""


def read_dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((FILES / "grafana-dashboard.json").read_text())
    return dashboard


def read_rules() -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    return rules


def read_objects() -> list[dict[str, Any]]:
    """Return what Prometheus' operator gets."""
    names = ("podmonitors.yaml", "prometheusrule.yaml")
    return [item for name in names for item in yaml.safe_load_all((FILES / name).read_text())]


def list_expressions(tree: Any) -> Iterator[str]:
    """Yield every expression of a dashboard or of rules."""
    if isinstance(tree, dict):
        if "expr" in tree:
            yield tree["expr"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from list_expressions(item)


def list_names(expression: str) -> list[str]:
    """Return the names of series in an expression."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    return re.findall(r"\b(?:rollway_|vllm:|dynamo_|stack:|up\b)[\w:]*", text)


def list_unknown_names(expression: str) -> list[str]:
    """Return the names that are no metric of the table, none of our rules and not Prometheus' own
    `up`."""
    rules = [rule for group in read_rules()["groups"] for rule in group["rules"]]
    known = {*SERIES, *(rule.get("record") for rule in rules), "up"}
    return [name for name in list_names(expression) if name not in known]
