"""Print manifests: `python render.py deployments.yaml NAME | kubectl apply -f -`.

    trainer's pods ── dgd_name ──► frontend ──► workers, behind Rollway's guard
          └──────── weights, signed orders ────────┘

A file has `defaults`, and under each name what differs from them. Graphs are made as those for
prime-rl are. Needs PyYAML, and nothing of Rollway.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prime-rl"))
import render as graphs  # deploy/prime-rl/render.py

Object = dict[str, Any]
_MODEL_EXPRESS = 8001


class Deployment(graphs.Renderer):  # type: ignore[misc, name-defined]
    """The objects of one deployment."""

    def __init__(self, values: Object) -> None:
        super().__init__(values, Path())

    def render(self) -> list[Object]:
        """Return all objects, in the order in which they need each other."""
        objects = self.make_claims() + self.make_model_express()
        graph = {"v1beta1": self.make_graph, "v1alpha1": self.make_old_graph}
        version = self.values["dynamo"]["apiVersion"]
        if version not in graph:
            raise SystemExit(f"dynamo.apiVersion is {version}; use one of {', '.join(graph)}")
        for pool in self.values["pools"]:
            beside = {**self.values, "name": pool["name"], "pools": [], "role": "pool"}
            beside["dynamo"] = {**self.values["dynamo"], "workers": pool["workers"]}
            objects += Deployment({**beside, "modelExpress": None}).render()
        return [*objects, graph[version]()]

    def make_claims(self) -> list[Object]:
        claims: list[Object] = super().make_claims()
        return claims[:1]  # the trainer's GPUs are not asked for here

    @property
    def components(self) -> list[Object]:
        """The frontend and its workers; with pools, the frontend and a global router alone."""
        frontend, worker = super().components
        worker["env"] = [*worker["env"], *self.list_env(self.values["dynamo"]["env"])]
        if self.values["planner"]:
            worker |= {"v1beta1": {"scalingAdapter": {}}}
            worker |= {"v1alpha1": {"scalingAdapter": {"enabled": True}}}
            config = json.dumps(self.values["planner"], separators=(",", ":"))
            command = ["python3", "-m", "dynamo.planner", "--config", config]
            planner = {"name": "Planner", "type": "planner", "replicas": 1}
            return [frontend, worker, {**planner, "command": command, "env": []}]
        if self.values["role"] == "pool":
            return [self.make_local_router(), worker]
        if self.values["pools"]:
            frontend["command"][-1] = "round-robin"
            return [frontend, self.make_global_router()]
        return [frontend, worker]

    def make_global_router(self) -> Object:
        """Return the router between pools: it sends prompts of up to `maxPrompt` tokens to the
        first one, and longer ones to the next."""
        pools = self.values["pools"]
        grid = {"ttft_min_ms": 1, "ttft_max_ms": 10000, "ttft_resolution": 1}
        grid |= {"itl_min_ms": 1, "itl_max_ms": 1000, "itl_resolution": 1, "isl_min": 0}
        grid |= {"isl_max": pools[0]["maxPrompt"] * len(pools), "isl_resolution": len(pools)}
        grid["agg_pool_mapping"] = [[[index]] for index in range(len(pools))]
        names = [f"{self.values['namespace']}-{pool['name']}" for pool in pools]
        config = {"mode": "agg", "num_agg_pools": len(pools), "agg_pool_dynamo_namespaces": names}
        text = json.dumps({**config, "agg_pool_selection_strategy": grid}, separators=(",", ":"))
        start = 'printf %s "$1" >/tmp/pools.json && exec python3 -m dynamo.global_router '
        start += f"--config /tmp/pools.json --model-name {self.values['model']['name']}"
        command = ["sh", "-c", start, "router", text]
        return {"name": "GlobalRouter", "replicas": 1, "command": command, "env": []}

    def make_local_router(self) -> Object:
        start = 'exec python3 -m dynamo.router --endpoint "$DYN_NAMESPACE.backend.generate"'
        return {"name": "Router", "replicas": 1, "command": ["sh", "-c", start], "env": []}

    def make_model_express(self) -> list[Object]:
        """Return a ModelExpress server, which records the versions of `weight_sync.method: mx`."""
        if not self.values["modelExpress"]:
            return []
        name, labels = "modelexpress-server", self.make_labels("modelexpress")
        images = self.values["modelExpress"]
        # It keeps versions in Redis, and in nothing else. Here they end with the pod.
        store = {"name": "redis", "image": images["store"], "args": ["--bind", "127.0.0.1"]}
        container = {
            "name": "server",
            "image": images["image"],
            "env": self.list_env(
                {
                    "MODEL_EXPRESS_SERVER_PORT": _MODEL_EXPRESS,
                    "MX_METADATA_BACKEND": "redis",
                    "REDIS_URL": "redis://127.0.0.1:6379",
                }
            ),
            "ports": [{"name": "grpc", "containerPort": _MODEL_EXPRESS}],
        }
        spec = self.make_pod(container)
        spec["containers"].append(store)
        pod = {"metadata": {"labels": labels}, "spec": spec}
        spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
        metadata = {"name": name, "labels": labels}
        ports = [{"name": "grpc", "port": _MODEL_EXPRESS, "targetPort": _MODEL_EXPRESS}]
        service = {"selector": labels, "ports": ports}
        return [
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec},
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        ]

    def list_env(self, variables: Object) -> list[Object]:
        return [{"name": name, "value": str(value)} for name, value in variables.items()]


def read_values(file: Path, name: str) -> Object:
    """Return the values of one deployment."""
    document = yaml.safe_load(file.read_text())
    names = sorted(document.keys() - {"defaults"})
    if name not in names:
        raise SystemExit(f"{file} has no deployment {name}; it has {', '.join(names)}")
    values = copy.deepcopy(document["defaults"])
    merge(values, document[name] or {}, name)
    return {"name": name, "role": "", **values}


def merge(values: Object, over: Object, where: str) -> None:
    """Merge mappings key by key; a key that the defaults do not have is an error."""
    for key, value in over.items():
        if key not in values:
            raise SystemExit(f"{where} has {key}, which is no value; there are {', '.join(values)}")
        if isinstance(value, dict) and isinstance(values[key], dict) and values[key]:
            merge(values[key], value, f"{where}.{key}")
        else:
            values[key] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a file of deployments")
    parser.add_argument("name", help="one of them")
    versions = ["v1beta1", "v1alpha1"]
    text = "of the CRD (default: the file's)"
    parser.add_argument("--api-version", choices=versions, help=text)
    options = parser.parse_args()
    values = read_values(options.file, options.name)
    if options.api_version:
        values["dynamo"]["apiVersion"] = options.api_version
    objects = Deployment(values).render()
    print(yaml.dump_all(objects, Dumper=graphs._Dumper, sort_keys=False, width=110), end="")


if __name__ == "__main__":
    main()
