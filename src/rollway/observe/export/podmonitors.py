"""What Prometheus' operator scrapes on Kubernetes, by the labels of pods.

    pods of a graph     frontends, workers      Dynamo's and vLLM's metrics
    pods of a run       a port `rollway`        Rollway's own, of the trainer (observe/page.py)
                        Ray's port `metrics`

Pods come and go under the same labels, so nothing has to be kept up to date. A pod without a port
of that name is no target. The rules are the same as elsewhere, as an object of the operator.
"""

from __future__ import annotations

from typing import Any

from rollway.kubernetes.names import DGD_LABEL, RUN_LABEL
from rollway.observe.export.prometheus import JOBS
from rollway.observe.export.rules import Rules
from rollway.observe.page import PORT_NAME

TYPE_LABEL = "nvidia.com/dynamo-component-type"
_INTERVAL = "15s"
TOKEN_SECRET, TOKEN_KEY = "rollway-metrics", "token"
"""The Secret with the token of trainers' pages, which the user makes."""

Object = dict[str, Any]


def make_podmonitors(graph: str | None = None) -> list[Object]:
    """Return the PodMonitors of one DynamoGraphDeployment, or of all graphs of a namespace."""
    of_graph = {} if graph is None else {DGD_LABEL: graph}
    suffix = "" if graph is None else f"-{graph}"
    is_worker = {"key": TYPE_LABEL, "operator": "In", "values": ["worker", "prefill", "decode"]}
    monitors = [
        _make_monitor(
            f"rollway-frontends{suffix}",
            {"matchLabels": {TYPE_LABEL: "frontend", **of_graph}},
            _scrape("http", "process", "frontend"),
        ),
        _make_monitor(
            f"rollway-workers{suffix}",
            {"matchLabels": {**of_graph}, "matchExpressions": [is_worker]},
            _scrape("system"),
        ),
    ]
    of_run = {"matchExpressions": [{"key": RUN_LABEL, "operator": "Exists"}]}
    monitors.append(_make_monitor(f"rollway-trainers{suffix}", of_run, _scrape_own(graph)))
    if graph is None:
        exists = [{"key": k, "operator": "Exists"} for k in ("ray.io/cluster", RUN_LABEL)]
        ray = {"port": "metrics", "interval": _INTERVAL}
        monitors.append(_make_monitor("rollway-ray", {"matchExpressions": exists}, ray))
    return monitors


def make_rule_object(rules: Rules) -> Object:
    """Return the rules as the operator takes them."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rollway"},
        "spec": rules,
    }


def _make_monitor(name: str, selector: Object, endpoint: Object) -> Object:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name},
        "spec": {"selector": selector, "podMetricsEndpoints": [endpoint]},
    }


def _scrape_own(graph: str | None) -> Object:
    """Return the endpoint of Rollway's own metrics, with the token of its page. The page says
    itself which stack each series is of."""
    credentials = {"name": TOKEN_SECRET, "key": TOKEN_KEY}
    page, _ = JOBS
    endpoint: Object = {
        "port": PORT_NAME,
        "path": "/metrics",
        "interval": _INTERVAL,
        "authorization": {"credentials": credentials},
        "relabelings": [{"targetLabel": "job", "replacement": page}],
    }
    if graph is not None:
        endpoint["metricRelabelings"] = [
            {"sourceLabels": ["stack"], "regex": graph, "action": "keep"}
        ]
    return endpoint


def _scrape(port: str, label: str = "worker", value: str = "") -> Object:
    """Return an endpoint whose series have the labels of the dashboard: `stack` is the graph, and
    `worker` the pod."""
    pod = "__meta_kubernetes_pod_name"
    graph = "__meta_kubernetes_pod_label_nvidia_com_dynamo_graph_deployment_name"
    own: Object = {"targetLabel": label}
    own |= {"replacement": value} if value else {"sourceLabels": [pod]}
    relabelings = [
        {"targetLabel": "job", "replacement": "rollway-stack"},
        {"sourceLabels": [graph], "targetLabel": "stack"},
        own,
    ]
    return {"port": port, "path": "/metrics", "interval": _INTERVAL, "relabelings": relabelings}
