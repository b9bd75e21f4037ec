"""The names that a record, the page, the sinks and Prometheus may have."""

from __future__ import annotations

from rollway.observe.metrics import METRICS

NAMES = [name for metric in METRICS for name in metric.list_names()]
