"""Parts of ai-dynamo's own planner, for tests.

    python -m … scale GRAPH COMPONENT REPLICAS    with the planner's client
    python -m … config JSON                       prints what the planner reads of its configuration

The package `dynamo.planner` imports scikit-learn for its forecasts, which tests do not install. So
its packages are made without their `__init__`; the modules are ai-dynamo's, unchanged.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path


def load_module(name: str) -> types.ModuleType:
    """Import a module of the planner."""
    spec = importlib.util.find_spec("dynamo.runtime")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parents[1] / "planner"
    for part in ("", ".config", ".connectors", ".connectors.clients", ".monitoring"):
        package = types.ModuleType(f"dynamo.planner{part}")
        package.__path__ = [str(root.joinpath(*part.split(".")))]
        sys.modules[package.__name__] = package
    return importlib.import_module(f"dynamo.planner.{name}")


def scale(graph: str, component: str, replicas: int) -> None:
    module = load_module("connectors.clients.kubernetes_api")
    api = module.KubernetesAPI(os.environ["POD_NAMESPACE"])
    api.update_service_replicas(graph, component, replicas)
    ready = api.wait_for_graph_deployment_ready(graph, max_attempts=60, delay_seconds=1)
    asyncio.run(ready)
    print(api.get_service_replica_target(graph, component))


def read_config(text: str) -> None:
    config = load_module("config.planner_config").PlannerConfig.from_config_arg(text)
    print(config.model_dump_json())


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "scale":
        scale(arguments[0], arguments[1], int(arguments[2]))
    else:
        read_config(*arguments)
