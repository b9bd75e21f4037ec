"""The pods of a rendered stack, as processes: what the operator and the kubelet do is done here.

Each pod has an address of its own in 127.0.0.0/8, so all of them use the ports of the manifest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway.errors import RollwayError
from rollway.kubernetes.render import render_stack
from rollway.kubernetes.spec import PodsSpec, SecretRef
from rollway.spec import parse_spec
from tests import footprint
from tests.light.spec import ROOT, light
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import has_become, wait_until

PROMPT = list(range(40, 100))
SECRET = "the secret of a Secret, for this test"
NAMESPACE, SUFFIX = "rl-light", "1a2b3c4d"


class Pods:
    """Runs the containers of a graph's components on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network = f"127.{secrets.randbelow(250) + 2}.{secrets.randbelow(250) + 2}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, component: dict[str, Any]) -> str:
        """Start a pod and return its address."""
        number = len(self._processes) + 2
        address = f"{self._network}.{number}"
        container = component["podTemplate"]["spec"]["containers"][0]
        env = self._make_env(container["env"], address, is_worker=component["type"] != "frontend")
        command = [*container["command"], *container.get("args", [])]
        command = [sys.executable, *(word.replace("0.0.0.0", address) for word in command[1:])]
        with (self._folder / f"{component['name']}-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        self._processes.append(process)
        return address

    def _make_env(
        self, entries: list[dict[str, Any]], address: str, *, is_worker: bool
    ) -> dict[str, str]:
        """Return a pod's environment: what the operator injects, then the manifest's."""
        # The mark tells the test run beside this one whose processes these are.
        kept = ("PATH", "HOME", footprint.RUN)
        inherited = {name: os.environ[name] for name in kept if name in os.environ}
        env = {
            **inherited,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "HOSTNAME": f"pod-{address}",
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_NAMESPACE": NAMESPACE,
        }
        env |= {"DYN_NAMESPACE_WORKER_SUFFIX": SUFFIX} if is_worker else {}
        env |= {} if is_worker else {"DYN_NAMESPACE_PREFIX": NAMESPACE}
        for entry in entries:
            value = entry.get("value")
            if value is None:
                value = address if "fieldRef" in entry["valueFrom"] else SECRET
            env[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), value)
        if not is_worker:
            env["DYN_RL_HOST"] = address
        env["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
        return env

    def stop(self) -> None:
        """End the pods; vLLM removes its semaphores if it is asked to end."""
        for process in self._processes:
            os.killpg(process.pid, signal.SIGTERM)
        has_become(lambda: all(p.poll() is not None for p in self._processes), 20)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    running = Pods(tmp_path)
    yield running
    running.stop()


def has_workers(frontend: str, count: int) -> bool:
    try:
        with rollway.attach(
            f"http://{frontend}:8000", rl_url=f"http://{frontend}:8001", secret=SECRET, watch=False
        ) as stack:
            return len(stack.fleet.workers()) == count
    except RollwayError:
        return False


def start(pods: Pods, fields: dict[str, Any], options: PodsSpec | None = None) -> str:
    """Start all pods of a stack and return the frontend's address."""
    spec = parse_spec(fields, on_this_machine=False)
    graph = render_stack(spec, name="light", secret=SecretRef(name="rollway"), options=options)
    addresses = [
        pods.run(component)
        for component in graph["spec"]["components"]
        for _ in range(component["replicas"])
    ]
    return addresses[0]


def test_mockers_of_two_models_have_endpoints_of_their_own(pods: Pods, base_model: Path) -> None:
    mocker = {"path": str(base_model), "engine": "mocker", "args": {"speedup-ratio": 100}}
    models = [{**mocker, "name": "policy", "replicas": 2}, {**mocker, "name": "judge"}]
    address = start(pods, {"name": "mockers", "models": models})
    wait_until(lambda: list_endpoints(address) == {"policy": 2, "judge": 1}, 90)
    for model in ("policy", "judge"):
        body = {"model": model, "prompt": [40, 41, 42], "max_tokens": 4}
        answer = ask(f"http://{address}:8000/v1/completions", body)
        assert answer["model"] == model


def list_endpoints(address: str) -> dict[str, int]:
    """Return how many workers serve each component, in the namespace that the operator chose."""
    try:
        listed = ask(f"http://{address}:8000/health")["instances"]
        models = ask(f"http://{address}:8000/v1/models")["data"]
    except OSError:
        return {}
    workers = [item for item in listed if item["endpoint"] == "generate"]
    if {item["namespace"] for item in workers} != {f"{NAMESPACE}-{SUFFIX}"} or len(models) < 2:
        return {}
    return dict(Counter(item["component"] for item in workers))


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_a_rendered_worker_of_vllm_serves_on_a_cpu(
    pods: Pods, base_model: Path, policies: list[Policy]
) -> None:
    args = {"max-model-len": 512, "dtype": "float32"}
    model = {"path": str(base_model), "name": "tiny", "args": args}
    options = PodsSpec(gpus_per_node=0, cores=2)
    address = start(pods, {"name": "vllm", "models": [model]}, options)
    wait_until(lambda: has_workers(address, 1), 300)
    url, listing = f"http://{address}:8000", f"http://{address}:8001"
    with rollway.attach(url, rl_url=listing, secret=SECRET) as stack:
        assert worst(policies[0], stack.rollouts().generate(PROMPT, SHORT, n=2)) < TOLERANCE
        report = stack.refit(1, policies[1].path)
        assert [(worker.state, worker.proof) for worker in report.workers] == [
            ("serving", "parameters")
        ]
        assert worst(policies[1], stack.rollouts().generate(PROMPT, SHORT, n=2)) < TOLERANCE


def test_the_pods_of_a_rendered_stack_serve_and_are_refitted(
    pods: Pods, base_model: Path, policies: list[Policy]
) -> None:
    address = start(pods, light(base_model, "light"))
    wait_until(lambda: has_workers(address, 2), 90)
    url, listing = f"http://{address}:8000", f"http://{address}:8001"
    with rollway.attach(url, rl_url=listing, secret=SECRET) as stack:
        group = stack.rollouts().generate(PROMPT, SHORT, n=4)
        assert worst(policies[0], group) < TOLERANCE
        report = stack.refit(1, policies[1].path)
        assert [worker.state for worker in report.workers] == ["serving"] * 2
        group = stack.rollouts().generate(PROMPT, SHORT, n=4)
        assert worst(policies[1], group) < TOLERANCE
    with (
        rollway.attach(url, rl_url=listing, secret="another secret of this length") as stranger,
        pytest.raises(RollwayError, match=r"sign|refused|secret"),
    ):
        stranger.refit(2, policies[0].path)
