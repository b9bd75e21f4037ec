"""Print the manifests of a values file: `python render.py values.yaml | kubectl apply -f -`.

    trainer ── broadcasts ──► volume ◄── reads ── workers of the DynamoGraphDeployment
       ▲ rollouts, on the volume                       ▲ signed orders     ▲
    orchestrator ── base_url, admin_base_url ──► gateway (`rollway prime-rl serve`)

Workers obey only orders that are signed with the Secret's `weights-secret`, and the gateway only
callers with its `operator-token`. Needs PyYAML, and nothing of Rollway.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
ROLLOUTS, ADMIN, LISTING, SYSTEM = 8000, 8100, 8001, 9090
_KV_EVENTS = '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:20080"}'  # fmt: skip  # noqa: E501
_CONFIG = "/config"


class Renderer:
    """The objects of one values file."""

    def __init__(self, values: Object, directory: Path) -> None:
        self.values = values
        self.directory = directory
        self.name = values["name"]
        self.images = values["images"]
        self.claim = values["storage"]["existingClaim"] or f"{self.name}-data"

    def render(self) -> list[Object]:
        """Return all objects, in the order in which they need each other."""
        objects = [self.make_config(), *self.make_claims()]
        if not self.values["storage"]["existingClaim"]:
            objects.insert(0, self.make_volume())
        version = self.values["dynamo"]["apiVersion"]
        graphs = {"v1beta1": self.make_graph, "v1alpha1": self.make_old_graph}
        if version not in graphs:
            raise SystemExit(f"dynamo.apiVersion is {version}; use one of {', '.join(graphs)}")
        listing = self.make_service("rl", {"listing": LISTING}, self.frontend_labels)
        objects += [graphs[version](), listing, self.make_gateway()]
        ports = {"rollouts": ROLLOUTS, "admin": ADMIN}
        objects.append(self.make_service("gateway", ports, self.make_labels("gateway")))
        return [*objects, self.make_trainer(), self.make_orchestrator()]

    # --- storage and config -----------------------------------------------------------------------

    def make_volume(self) -> Object:
        storage = self.values["storage"]
        spec = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage["storageClassName"],
            "resources": {"requests": {"storage": storage["size"]}},
        }
        return self.make_object("v1", "PersistentVolumeClaim", "data", spec)

    def make_config(self) -> Object:
        names = self.values["config"].values()
        data = {Path(name).name: (self.directory / name).read_text() for name in names}
        config = self.make_object("v1", "ConfigMap", "config", None)
        return {**config, "data": data}

    def make_claims(self) -> list[Object]:
        """Return templates of DRA claims, if GPUs are asked for by a device class."""
        gpus = self.values["gpus"]
        if not gpus["deviceClass"]:
            return []
        return [
            self.make_object(
                "resource.k8s.io/v1",
                "ResourceClaimTemplate",
                f"{role}-gpus",
                {"spec": {"devices": {"requests": [self.make_device_request(gpus[count])]}}},
            )
            for role, count in (("worker", "workers"), ("trainer", "trainer"))
        ]

    def make_device_request(self, count: int) -> Object:
        exactly = {"deviceClassName": self.values["gpus"]["deviceClass"], "count": count}
        return {"name": "gpus", "exactly": exactly}

    # --- Dynamo -----------------------------------------------------------------------------------

    @property
    def frontend_labels(self) -> Object:
        """The labels that the operator gives to the pods of the frontend."""
        return {
            "nvidia.com/dynamo-graph-deployment-name": self.name,
            "nvidia.com/dynamo-component-type": "frontend",
        }

    @property
    def frontend_env(self) -> list[Object]:
        env = {"DYN_ENABLE_RL": "true", "DYN_RL_HOST": "0.0.0.0", "DYN_RL_PORT": str(LISTING)}
        return [{"name": name, "value": value} for name, value in env.items()]

    @property
    def worker_env(self) -> list[Object]:
        """The environment of a worker. It listens at the address of its pod, because it advertises
        what it listens at."""
        pod = {"fieldRef": {"fieldPath": "status.podIP"}}
        fixed = {
            "PYTHONHASHSEED": "0",
            "DYN_STRUCTURAL_TAG": "false",
            "DYN_SYSTEM_PORT": str(SYSTEM),
            # A canary that finds no free slot during a long broadcast would restart the worker, and
            # a group of ranks that forms late would end it after 30 s.
            "DYN_HEALTH_CHECK_ENABLED": "false",
            "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": "1200",
        }
        return [
            {"name": "DYN_SYSTEM_HOST", "valueFrom": pod},
            {"name": "ROLLWAY_WEIGHTS_SECRET", "valueFrom": self.refer("weights-secret")},
            *({"name": name, "value": value} for name, value in fixed.items()),
        ]

    @property
    def worker_command(self) -> list[str]:
        """The command of a worker: behind Rollway's guard, so that no admin route is open."""
        model = self.values["model"]
        own = [
            *("--model", model["path"], "--served-model-name", model["name"], "--enable-rl"),
            *("--worker-extension-cls", "rollway.engine.worker.WorkerExtension"),
            *("--kv-events-config", _KV_EVENTS, "--stream-interval", "64"),
            *("--tensor-parallel-size", str(self.values["gpus"]["workers"])),
        ]
        guard = ["python3", "-m", "rollway.engine.guard", "dynamo.vllm"]
        return [*guard, *own, *map(str, self.values["dynamo"]["args"])]

    @property
    def components(self) -> list[Object]:
        """What the DynamoGraphDeployment runs."""
        frontend = {
            "name": "Frontend",
            "type": "frontend",
            "replicas": 1,
            "command": ["python3", "-m", "dynamo.frontend", "--router-mode", "kv"],
            "env": self.frontend_env,
            "ports": [{"name": "listing", "containerPort": LISTING}],
        }
        worker = {
            "name": "worker",
            "type": "worker",
            "replicas": self.values["dynamo"]["workers"],
            "command": self.worker_command,
            "env": self.worker_env,
            "gpus": "worker",
        }
        return [frontend, worker]

    def make_graph(self) -> Object:
        """Return the DynamoGraphDeployment as v1beta1."""
        components = []
        for part in self.components:
            container = {
                "name": "main",
                "image": self.images["dynamo"],
                "command": part["command"],
                "env": part["env"],
            }
            container |= {"ports": part["ports"]} if "ports" in part else {}
            if "gpus" in part:
                container["resources"] = self.make_resources("workers")
                container["volumeMounts"] = [self.mount_data()]
            pod = self.make_pod(container, gpus=part.get("gpus", ""), data="gpus" in part)
            component = {name: part[name] for name in ("name", "type", "replicas") if name in part}
            component |= part.get("v1beta1", {})
            components.append({**component, "podTemplate": {"spec": pod}})
        spec = {"backendFramework": "vllm", "components": components}
        return self.make_object("nvidia.com/v1beta1", "DynamoGraphDeployment", "", spec)

    def make_old_graph(self) -> Object:
        """Return the same as v1alpha1: a map of services, whose pods name their claims apart."""
        services = {}
        for part in self.components:
            main: Object = {"image": self.images["dynamo"], "command": part["command"]}
            main |= {"ports": part["ports"]} if "ports" in part else {}
            service: Object = {"componentType": part.get("type", "default")}
            service |= {"replicas": part["replicas"], "envs": part["env"]}
            service |= part.get("v1alpha1", {})
            if "gpus" in part:
                main["volumeMounts"] = [self.mount_data()]
                resources = self.make_resources("workers")
                if "limits" in resources:
                    resources = {"limits": {"gpu": resources["limits"]["nvidia.com/gpu"]}}
                service["resources"] = resources
            pod = self.make_pod(gpus=part.get("gpus", ""), data="gpus" in part)
            services[part["name"]] = {**service, "extraPodSpec": {**pod, "mainContainer": main}}
        spec = {"backendFramework": "vllm", "services": services}
        return self.make_object("nvidia.com/v1alpha1", "DynamoGraphDeployment", "", spec)

    # --- Rollway and prime-rl ---------------------------------------------------------------------

    def make_gateway(self) -> Object:
        """Return the server. One at a time answers for a model, so it is never rolled over."""
        model, mount = self.values["model"], self.values["storage"]["mountPath"]
        command = [
            *("rollway", "prime-rl", "serve", f"http://{self.name}-frontend:8000"),
            *("--rl-url", f"http://{self.name}-rl:{LISTING}", "--model", model["name"]),
            *("--tokenizer", model["path"], "--output-dir", f"{mount}/outputs"),
            *("--host", "0.0.0.0", "--port", str(ROLLOUTS)),
            *("--admin-host", "0.0.0.0", "--admin-port", str(ADMIN)),
        ]
        # /health needs no token. It answers once a worker does: models load for minutes.
        health = {"httpGet": {"path": "/health", "port": "rollouts"}, "periodSeconds": 10}
        container = {
            "name": "gateway",
            "image": self.images["dynamo"],
            "imagePullPolicy": self.images["pullPolicy"],
            # The directory must be there before the first broadcast.
            "command": ["sh", "-c", f'mkdir -p {mount}/outputs && exec "$@"', "gateway", *command],
            "env": [
                # On the volume: a server that is restarted in a broadcast goes on where it was.
                {"name": "ROLLWAY_HOME", "value": f"{mount}/rollway"},
                {"name": "ROLLWAY_WEIGHTS_SECRET", "valueFrom": self.refer("weights-secret")},
                {
                    "name": "ROLLWAY_GATEWAY_OPERATOR_TOKENS",
                    "valueFrom": self.refer("operator-token"),
                },
            ],
            "ports": [
                {"name": "rollouts", "containerPort": ROLLOUTS},
                {"name": "admin", "containerPort": ADMIN},
            ],
            "startupProbe": {**health, "failureThreshold": 360},
            "livenessProbe": {"tcpSocket": {"port": "rollouts"}, "failureThreshold": 6},
            "volumeMounts": [self.mount_data()],
        }
        labels = self.make_labels("gateway")
        pod = {"metadata": {"labels": labels}, "spec": self.make_pod(container, data=True)}
        spec = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": pod,
        }
        return self.make_object("apps/v1", "Deployment", "gateway", spec)

    def make_trainer(self) -> Object:
        container = self.make_prime_rl_container("trainer", "trainer")
        container["resources"] = self.make_resources("trainer")
        return self.make_job("trainer", self.make_pod(container, gpus="trainer", data=True))

    def make_orchestrator(self) -> Object:
        """Return the orchestrator, with its env server beside it: it ends with the orchestrator."""
        container = self.make_prime_rl_container("orchestrator", "orchestrator")
        # prime-rl sends this key to both addresses, so it must be an operator's.
        container["env"] = [{"name": "VLLM_API_KEY", "valueFrom": self.refer("operator-token")}]
        pod = self.make_pod(container, data=True)
        servers = self.make_prime_rl_container("env-server", "envServer")
        pod["initContainers"] = [{**servers, "restartPolicy": "Always"}]
        return self.make_job("orchestrator", pod)

    def make_prime_rl_container(self, program: str, config: str) -> Object:
        file = Path(self.values["config"][config]).name
        return {
            "name": program,
            "image": self.images["primeRl"],
            "imagePullPolicy": self.images["pullPolicy"],
            "command": ["uv", "run", program, "@", f"{_CONFIG}/{file}"],
            "volumeMounts": [
                self.mount_data(),
                {"name": "config", "mountPath": _CONFIG, "readOnly": True},
            ],
        }

    # --- parts ------------------------------------------------------------------------------------

    def make_job(self, role: str, pod: Object) -> Object:
        """Return a run that ends: a failed one is looked at, and not repeated."""
        pod["restartPolicy"] = "Never"
        pod["volumes"].append({"name": "config", "configMap": {"name": f"{self.name}-config"}})
        template = {"metadata": {"labels": self.make_labels(role)}, "spec": pod}
        return self.make_object("batch/v1", "Job", role, {"backoffLimit": 0, "template": template})

    def make_pod(
        self, container: Object | None = None, *, gpus: str = "", data: bool = False
    ) -> Object:
        """Return a pod's spec; `gpus` is the role whose DRA claim it needs, if there are claims."""
        pod: Object = {"containers": [container]} if container is not None else {}
        if self.images["pullSecrets"]:
            pod["imagePullSecrets"] = [{"name": name} for name in self.images["pullSecrets"]]
        if self.values["tolerations"]:
            pod["tolerations"] = self.values["tolerations"]
        if gpus and self.values["gpus"]["deviceClass"]:
            template = f"{self.name}-{gpus}-gpus"
            pod["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": template}]
        if data:
            volume = {"claimName": self.claim}
            pod["volumes"] = [{"name": "data", "persistentVolumeClaim": volume}]
        return pod

    def make_resources(self, role: str) -> Object:
        """Ask for GPUs once: by a claim, or as a resource. Both together would take them twice."""
        if self.values["gpus"]["deviceClass"]:
            return {"claims": [{"name": "gpus"}]}
        return {"limits": {"nvidia.com/gpu": str(self.values["gpus"][role])}}

    def make_service(self, suffix: str, ports: dict[str, int], selector: Object) -> Object:
        entries = [{"name": n, "port": port, "targetPort": port} for n, port in ports.items()]
        return self.make_object("v1", "Service", suffix, {"selector": selector, "ports": entries})

    def make_object(self, version: str, kind: str, suffix: str, spec: Object | None) -> Object:
        name = f"{self.name}-{suffix}" if suffix else self.name
        metadata = {"name": name, "labels": self.make_labels(suffix or "graph")}
        body = {} if spec is None else {"spec": spec}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}

    def make_labels(self, role: str) -> Object:
        return {"app.kubernetes.io/part-of": self.name, "app.kubernetes.io/component": role}

    def mount_data(self) -> Object:
        return {"name": "data", "mountPath": self.values["storage"]["mountPath"]}

    def refer(self, key: str) -> Object:
        return {"secretKeyRef": {"name": self.values["secret"], "key": key}}


class _Dumper(yaml.SafeDumper):
    """Writes every object in full: an anchor would hide what a pod has."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write texts of several lines as blocks."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("values", type=Path, help="a values file")
    help_text = "replace a value, for example --set gpus.deviceClass=gpu.nvidia.com; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help_text)
    options = parser.parse_args()
    values = yaml.safe_load(options.values.read_text())
    for assignment in options.set:
        path, _, text = assignment.partition("=")
        *parents, key = path.split(".")
        table = values
        for parent in parents:
            table = table[parent]
        if key not in table:
            raise SystemExit(f"There is no value {path}.")
        table[key] = yaml.safe_load(text)
    objects = Renderer(values, options.values.parent).render()
    print(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110), end="")


if __name__ == "__main__":
    main()
