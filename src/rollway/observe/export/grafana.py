"""The Grafana dashboard: fleet, refits, rollouts, exactness, and the engines' own panels.

Every expression is made of metrics of the table, so each figure has its line in docs/metrics.md.
Import the file in Grafana (Dashboards, New, Import), or provision it; it asks for the Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollway.observe.export.expressions import get_family, list_families, over_names
from rollway.observe.metrics import PERCENTILES

RATE_SPAN = "$__rate_interval"
_STACK = '{stack=~"$stack"}'
_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "share": "percentunit",
    "tokens/s": "short",
    "rollouts/s": "short",
}
_WIDTH, _HEIGHT, _PER_ROW = 24, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Target = tuple[str, str]
"""An expression and its legend."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot."""

    title: str
    targets: Sequence[Target]
    unit: str = ""
    kind: str = "timeseries"
    text: str = ""


def _gauge(name: str, legend: str = "{{stack}}", select: str = "") -> Target:
    """Return a metric as it is; a metric of ours has one name."""
    selector = _STACK if not select else f'{{stack=~"$stack",{select}}}'
    return f"{get_family(name).name}{selector}", legend


def _over_workers(name: str, function: str = "sum", legend: str = "{{stack}}") -> Target:
    by = "stack" if function == "sum" else "stack, worker"
    return over_names(name, f"{function} by ({by}) ({{}})", _STACK), legend


def _rate(name: str, by: str = "stack", legend: str = "{{stack}}") -> Target:
    return over_names(name, f"sum by ({by}) (rate({{}}[{RATE_SPAN}]))", _STACK), legend


def _ratio(above: str, below: str, by: str = "stack", legend: str = "{{stack}}") -> Target:
    parts = [f"({_rate(name, by)[0]})" for name in (above, below)]
    return " / ".join(parts), legend


def _percentiles(name: str) -> list[Target]:
    """Return the percentiles of a histogram of Dynamo or vLLM."""
    return [
        (
            over_names(
                name,
                f"histogram_quantile({q}, sum by (stack, le) (rate({{}}[{RATE_SPAN}])))",
                _STACK,
            ),
            f"{{{{stack}}}} {percentile}",
        )
        for percentile, q in PERCENTILES.items()
    ]


def _own_percentiles(prefix: str) -> list[Target]:
    return [_gauge(f"{prefix}_{name}", f"{{{{stack}}}} {name}") for name in PERCENTILES]


def _list_rows() -> list[tuple[str, list[Panel]]]:
    worker = "{{worker}}"
    return [
        ("Fleet", [
            Panel("Workers by state", [_gauge("rollway_workers", "{{state}} {{role}}")]),
            Panel("Weight version", [_gauge("rollway_weight_version", worker)]),
            Panel("Version spread", [_gauge("rollway_version_spread")],
                  text="0: every serving worker has the same version."),
            Panel("Restarts", [_gauge("rollway_restarts_total", worker)]),
            Panel("Memory of Rollway", [_gauge("rollway_process_resident_bytes", "{{process}}")],
                  "bytes"),
            Panel("Scrape of all pages", [_gauge("rollway_scrape_seconds")], "seconds"),
        ]),
        ("Refits", [
            Panel("Last refit", [_gauge("rollway_refit_seconds", "{{stack}} {{outcome}}")],
                  "seconds"),
            Panel("Slowest worker by phase", [_gauge("rollway_refit_phase_seconds", "{{phase}}")],
                  "seconds"),
            Panel("Pause and wait", [_gauge("rollway_refit_paused_seconds", "paused"),
                                     _gauge("rollway_refit_waited_seconds", "waited")], "seconds"),
            Panel("Refits", [_gauge("rollway_refits_total", "{{outcome}}")]),
            Panel("Size of weights", [_gauge("rollway_refit_bytes", "{{transport}}")], "bytes"),
            Panel("Transfer", [_gauge("rollway_refit_transfer_seconds", "{{transport}}")],
                  "seconds"),
        ]),
        ("Rollouts", [
            Panel("Tokens per second", [_gauge("rollway_tokens_per_second")], "tokens/s"),
            Panel("Rollouts per second", [_gauge("rollway_rollouts_per_second")], "rollouts/s"),
            Panel("Time of a rollout", _own_percentiles("rollway_rollout_seconds"), "seconds"),
            Panel("Tokens of a rollout", _own_percentiles("rollway_rollout_tokens")),
            Panel("Prompt tokens from a cache",
                  [_ratio("rollway_cached_tokens_total", "rollway_prompt_tokens_total")], "share"),
            Panel("Retries by cause",
                  [_rate("rollway_retries_total", "stack, cause", "{{cause}}")]),
            Panel("Cut and continued", [_rate("rollway_rollouts_cut_total", legend="cut"),
                                        _rate("rollway_rollouts_continued_total",
                                              legend="continued")]),
            Panel("The trainer's step by part", [_gauge("rollway_step_part_seconds", "{{part}}")],
                  "seconds", "stacked"),
            Panel("The trainer's step", [_gauge("rollway_step")]),
        ]),
        ("Exactness", [
            Panel("Mismatch k3 of trainer and engine",
                  [_gauge("rollway_mismatch_k3", "version {{version}}")]),
            Panel("Mismatch k1", [_gauge("rollway_mismatch_k1", "version {{version}}")]),
            Panel("Largest difference of log-probs",
                  [_gauge("rollway_mismatch_max", "version {{version}}")]),
            Panel("Returned tokens by version",
                  [_rate("rollway_version_tokens_total", "stack, version", "{{version}}")]),
            Panel("Answers not believed", [_rate("rollway_answers_not_believed_total")]),
            Panel("Forks of conversations", [_rate("rollway_forks_total", "stack, reason",
                                                   "{{reason}}")]),
            Panel("Gateway", [_gauge("rollway_gateway_sessions", "sessions"),
                              _rate("rollway_gateway_turns_total", legend="turns per second")]),
        ]),
        ("Engines and frontend", [
            Panel("Requests running", [_over_workers("vllm:num_requests_running", "max", worker)]),
            Panel("Requests waiting", [_over_workers("vllm:num_requests_waiting", "max", worker)]),
            Panel("KV cache in use", [_over_workers("vllm:kv_cache_usage_perc", "max", worker)],
                  "share"),
            Panel("Tokens sampled per second",
                  [_rate("vllm:generation_tokens_total", "stack, worker", worker)]),
            Panel("Prefix hits", [_ratio("vllm:prefix_cache_hits_total",
                                         "vllm:prefix_cache_queries_total", "stack, worker",
                                         worker)], "share"),
            Panel("Preemptions", [_rate("vllm:num_preemptions_total", "stack, worker", worker)]),
            Panel("Time to first token at a worker",
                  _percentiles("vllm:time_to_first_token_seconds"), "seconds"),
            Panel("Time between tokens at a worker",
                  _percentiles("vllm:inter_token_latency_seconds"), "seconds"),
            Panel("Wait for the batch", _percentiles("vllm:request_queue_time_seconds"),
                  "seconds"),
            Panel("Requests at the frontend",
                  [_over_workers("dynamo_frontend_inflight_requests", legend="under way"),
                   _over_workers("dynamo_frontend_queued_requests", legend="without a token")]),
            Panel("Whole requests", _percentiles("dynamo_frontend_request_duration_seconds"),
                  "seconds"),
            Panel("Tokens to clients per second",
                  [_rate("dynamo_frontend_output_tokens_total")], "tokens/s"),
        ]),
    ]  # fmt: skip


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _list_rows():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}}
        )  # fmt: skip
        y += 1
        width = _WIDTH // _PER_ROW
        for number, panel in enumerate(row):
            place = {"x": number % _PER_ROW * width, "y": y + number // _PER_ROW * _HEIGHT}
            panels.append(_make_panel(panel, {**place, "w": width, "h": _HEIGHT}))
        y += -(-len(row) // _PER_ROW) * _HEIGHT
    for number, entry in enumerate(panels, 1):
        entry["id"] = number
    return {
        "uid": "rollway",
        "title": "Rollway",
        "tags": ["rollway"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _list_variables()},
        "panels": panels,
    }


def _list_variables() -> list[dict[str, Any]]:
    query = "label_values(rollway_workers, stack)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "stack",
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "stacks"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _make_panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.kind == "stacked" else "none"}
    custom = {"fillOpacity": 30 if panel.kind == "stacked" else 5, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text or _describe(panel),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": _UNITS.get(panel.unit, "short"), "custom": custom},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend,
             "datasource": _SOURCE}
            for number, (expression, legend) in enumerate(panel.targets)
        ],
    }  # fmt: skip


def _describe(panel: Panel) -> str:
    """Return what the panel's metrics say of themselves."""
    texts = [metric.help for metric in list_families(panel.targets[0][0])]
    return " ".join(dict.fromkeys(texts))


def list_expressions(dashboard: dict[str, Any]) -> list[str]:
    """Return every expression of a dashboard."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
