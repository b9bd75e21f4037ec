"""Expressions of Prometheus for metrics of the table, under all names that they have had."""

from __future__ import annotations

import re

from rollway.observe.metrics import METRICS, Metric

_BY_FAMILY = {metric.name: metric for metric in METRICS}
_BY_SERIES = {
    f"{name}_bucket" if metric.is_scraped and metric.kind == "histogram" else name: metric
    for metric in METRICS
    for name in (*metric.aliases, metric.name)
}
_NAME = re.compile(r"[A-Za-z_:][\w:]*")
_SELECTED = re.compile(r"([A-Za-z_:][\w:]*)\s*\{")
"""A name before its labels: in a dashboard, every series is selected by its stack."""
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


def get_family(name: str) -> Metric:
    """Return the metric of a family's name; a KeyError is a name that the table does not have."""
    return _BY_FAMILY[name]


def over_names(name: str, template: str, selector: str = "") -> str:
    """Return the template for each name of a metric, the first that has series before the others.

    The template must aggregate: the labels of a family differ between releases, and Prometheus
    compares them.

    Example:
        over_names("vllm:kv_cache_usage_perc", "max by (worker) ({})")
    """
    metric = get_family(name)
    suffix = "_bucket" if metric.kind == "histogram" else ""
    names = (metric.name, *metric.aliases)
    return " or ".join(template.format(f"{each}{suffix}{selector}") for each in names)


def list_families(expression: str) -> list[Metric]:
    """Return the metrics whose series an expression reads, also by a name of another release."""
    names = dict.fromkeys(_NAME.findall(_TEXT.sub('""', expression)))
    families = (_BY_SERIES.get(name) for name in names)
    return list(dict.fromkeys(metric for metric in families if metric is not None))


def list_unknown_names(expression: str) -> list[str]:
    """Return the names of series in an expression that the table does not have."""
    names = dict.fromkeys(_SELECTED.findall(_TEXT.sub('""', expression)))
    return [name for name in names if name not in _BY_SERIES]
