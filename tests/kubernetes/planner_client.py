"""Scale a graph with the client of ai-dynamo's own planner: `python -m … GRAPH COMPONENT REPLICAS`.

The package `dynamo.planner` imports scikit-learn for its forecasts, which tests do not install. So
its packages are made without their `__init__`; the client's module is ai-dynamo's, unchanged.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path


def load_client() -> types.ModuleType:
    spec = importlib.util.find_spec("dynamo.runtime")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parents[1] / "planner"
    for name in ("", ".connectors", ".connectors.clients", ".monitoring"):
        package = types.ModuleType(f"dynamo.planner{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    return importlib.import_module("dynamo.planner.connectors.clients.kubernetes_api")


def main() -> None:
    graph, component, replicas = sys.argv[1:]
    api = load_client().KubernetesAPI(os.environ["POD_NAMESPACE"])
    api.update_service_replicas(graph, component, int(replicas))
    ready = api.wait_for_graph_deployment_ready(graph, max_attempts=60, delay_seconds=1)
    asyncio.run(ready)
    print(api.get_service_replica_target(graph, component))


if __name__ == "__main__":
    main()
