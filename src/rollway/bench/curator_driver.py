"""Runs in Curator's environment: the rounds of `rollway bench curator`, one JSON line each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from nemo_curator.backends.ray_data import RayDataExecutor
from nemo_curator.core.serve import DynamoServerConfig, DynamoVLLMModelConfig
from nemo_curator.core.serve import InferenceServer as CuratorServer
from nemo_curator.core.serve.dynamo import vllm as curators_workers
from nemo_curator.models.client.llm_client import GenerationConfig
from nemo_curator.models.client.openai_client import AsyncOpenAIClient
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.synthetic.qa_multilingual_synthetic import QAMultilingualSyntheticStage
from openai import AsyncOpenAI
from ray.cluster_utils import Cluster

from rollway.bench.curator import Round
from rollway.integrations.curator import InferenceServer, RollwayServerConfig
from rollway.integrations.curator.backend import make_launcher_fields
from rollway.integrations.curator.translate import make_fields, make_stack_name

NAME = "mock"
CONCURRENCY = 32
TOKENS = 16
TIMEOUT = 120
"""The default of Curator's client."""
PROMPT = "Write one question and its answer in {language}."


def main() -> None:
    model = sys.argv[1]
    rounds, rows, replicas, cpus = map(int, sys.argv[2:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    curators_workers.DYNAMO_VLLM_RUNTIME_ENV.clear()  # it would install CUDA packages
    with _run_cluster(cpus, replicas):
        for number in range(rounds):
            # Which is first alternates: the machine may warm up or slow down.
            order = ("curator", "rollway") if number % 2 == 0 else ("rollway", "curator")
            for backend in order:
                server = _make_server(backend, model, replicas, number)
                result = _measure(backend, server, rows)
                print(json.dumps(asdict(result)), flush=True)


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
    return InferenceServer(models=[], backend=RollwayServerConfig(stack=stack))


def _measure(backend: str, server: Any, rows: int) -> Round:
    began = time.perf_counter()
    server.start()
    ready = time.perf_counter() - began
    try:
        _generate(server.endpoint, 8)  # the first run of a pipeline starts Ray's workers
        rate = _generate(server.endpoint, rows)
        client, bare = _compare_clients(server.endpoint, rows)
    finally:
        began = time.perf_counter()
        server.stop()
        stop = time.perf_counter() - began
    return Round(backend, ready, rate, stop, client, bare)


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


def _compare_clients(endpoint: str, rows: int) -> tuple[float, float]:
    """Return requests per second of Curator's client and of a bare one, each measured twice.

    The bare one is second and third: other work on the machine comes and goes."""
    seconds = {_query_by_curator: 0.0, _query_bare: 0.0}
    for query in (_query_by_curator, _query_bare, _query_bare, _query_by_curator):
        seconds[query] += asyncio.run(query(endpoint, rows))
    client, bare = seconds.values()
    return 2 * rows / client, 2 * rows / bare


async def _query_by_curator(endpoint: str, rows: int) -> float:
    """Return the seconds that these requests take."""
    client = _make_client(endpoint)
    client.setup()

    async def ask() -> None:
        messages = [{"role": "user", "content": PROMPT}]
        await client.query_model(messages=messages, model=NAME, generation_config=_CONFIG)

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(rows)))
    return time.perf_counter() - began


async def _query_bare(endpoint: str, rows: int) -> float:
    """The same with OpenAI's own client."""
    client = AsyncOpenAI(base_url=endpoint, api_key="unused")
    slots = asyncio.Semaphore(CONCURRENCY)

    async def ask() -> None:
        async with slots:
            await client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=_CONFIG.max_tokens,
                temperature=_CONFIG.temperature,
                top_p=_CONFIG.top_p,
                n=1,
                seed=_CONFIG.seed,
                stop=_CONFIG.stop,
                stream=_CONFIG.stream,
                timeout=TIMEOUT,
            )

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(rows)))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
