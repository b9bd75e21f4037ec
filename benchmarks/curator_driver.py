"""Runs in Curator's environment: the rounds of `rollway bench curator`, one JSON line each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from nemo_curator.backends.ray_data import RayDataExecutor
from nemo_curator.core.serve import DynamoServerConfig, DynamoVLLMModelConfig
from nemo_curator.core.serve import InferenceServer as CuratorServer
from nemo_curator.core.serve.dynamo import vllm as curators_workers
from nemo_curator.core.serve.server import _active_servers as active_servers
from nemo_curator.models.client.llm_client import GenerationConfig
from nemo_curator.models.client.openai_client import AsyncOpenAIClient
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.synthetic.qa_multilingual_synthetic import QAMultilingualSyntheticStage
from ray.cluster_utils import Cluster

from rollway.integrations.curator import InferenceServer, RollwayServerConfig
from rollway.integrations.curator.backend import make_launcher_fields
from rollway.integrations.curator.translate import make_fields, make_stack_name

NAME = "mock"
CONCURRENCY = 32
TOKENS = 16
PROMPT = "Write one question and its answer in {language}."
PIPELINES = 12
"""Pairs of pipelines of the two backends."""


def main() -> None:
    model = sys.argv[1]
    rounds, rows, replicas, cpus = map(int, sys.argv[2:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    curators_workers.DYNAMO_VLLM_RUNTIME_ENV.clear()  # it would install CUDA packages
    with _run_cluster(cpus, 2 * replicas):
        for number in range(rounds):
            # Which is first alternates: the machine may warm up or slow down.
            order = ("curator", "rollway") if number % 2 == 0 else ("rollway", "curator")
            for backend in order:
                server = _make_server(backend, model, replicas, number)
                print(json.dumps(_measure(backend, server)), flush=True)
        servers = {b: _make_server(b, model, replicas, rounds) for b in ("curator", "rollway")}
        print(json.dumps(_compare_rows(servers, rows)), flush=True)


@contextlib.contextmanager
def _run_cluster(cpus: int, gpus: int) -> Iterator[None]:
    """Run a cluster of one node, whose GPUs are only counted."""
    # Curator's backend looks for leftovers through the dashboard, and would wait for it in vain.
    head = {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield
    finally:
        cluster.shutdown()


def _make_server(backend: str, model: str, replicas: int, number: int) -> Any:
    models = [DynamoVLLMModelConfig(model, model_name=NAME, num_replicas=replicas)]
    if backend == "curator":
        config = DynamoServerConfig(subprocess_env={"PYTHONPATH": os.environ["SHIM"]})
        return CuratorServer(models=models, backend=config)
    name = make_stack_name("bench", "curator", str(number))
    python = os.environ["ROLLWAY_ENGINE_PYTHON"]
    fields = make_fields(models, DynamoServerConfig(), name=name, python=python)
    for entry in fields["models"]:
        entry.update(engine="mocker", args={})
    stack = {**fields, **make_launcher_fields()}
    # Curator's own server has its default port, and both run beside each other.
    return InferenceServer(models=[], backend=RollwayServerConfig(stack=stack), port=8010)


def _measure(backend: str, server: Any) -> dict[str, Any]:
    began = time.perf_counter()
    server.start()
    ready = time.perf_counter() - began
    began = time.perf_counter()
    server.stop()
    stop = time.perf_counter() - began
    return {"backend": backend, "ready_seconds": ready, "stop_seconds": stop}


def _compare_rows(servers: dict[str, Any], rows: int) -> dict[str, list[float]]:
    """Run both backends beside each other; return the rows per second of short pipelines by turns.

    With one after the other, minutes apart, a backend's own rounds differed by 17%."""
    rates: dict[str, list[float]] = {backend: [] for backend in servers}
    with contextlib.ExitStack() as running:
        for server in servers.values():
            active_servers.clear()  # Curator allows one server in a process
            server.start()
            running.callback(server.stop)
        for server in servers.values():
            _generate(server.endpoint, rows // 4)  # opens connections, and starts Ray's workers
        for pair in range(PIPELINES):
            # Who is first alternates.
            for backend in servers if pair % 2 == 0 else reversed(servers):
                rates[backend].append(_generate(servers[backend].endpoint, rows))
    return rates


class _TimedStage(QAMultilingualSyntheticStage):  # type: ignore[misc]
    """Adds a column with the seconds that its rows took."""

    def process(self, task: Any) -> Any:
        began = time.perf_counter()
        batch = super().process(task)
        batch.data["seconds"] = time.perf_counter() - began
        return batch

    def _process_llm_response(self, response: list[str]) -> str:
        # A mocker's tokens may all be special ones: then the content is None, which Curator's own
        # method does not expect.
        return str(super()._process_llm_response([text or "" for text in response]))


def _generate(endpoint: str, rows: int) -> float:
    """Run the pipeline; return its rows per second, without the start of Ray's workers."""
    stage = _TimedStage(
        prompt=PROMPT,
        languages=["English", "German", "French"],
        client=_make_client(endpoint),
        model_name=NAME,
        num_samples=rows,
        generation_config=_CONFIG,
    )
    (batch,) = Pipeline(name="bench", stages=[stage]).run(executor=RayDataExecutor())
    assert len(batch.data) == rows
    return float(rows / batch.data["seconds"].iloc[0])


_CONFIG = GenerationConfig(max_tokens=TOKENS, temperature=1.0)


def _make_client(endpoint: str) -> Any:
    return AsyncOpenAIClient(
        base_url=endpoint, api_key="unused", max_concurrent_requests=CONCURRENCY
    )


if __name__ == "__main__":
    main()
