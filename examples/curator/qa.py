"""Questions and answers from a model of your own: Curator's pipeline on a Rollway stack.

    source .venv-curator/bin/activate
    ROLLWAY_ENGINE_PYTHON=.venv/bin/python python examples/curator/qa.py --rows 8 --out rows

Without --model it serves a tiny model that is built here, so it runs on a CPU as given; the rows
then have digits instead of sentences. With a GPU: --model Qwen/Qwen3-0.6B --replicas 2.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

# A cluster that is started here asks for the token that an earlier `ray.init` has saved. Other
# processes send it in this mode only, which Ray reads when it is imported. A cluster that runs
# already may have no token: a driver in this mode would refuse its calls.
if "RAY_ADDRESS" not in os.environ and Path("~/.ray/auth_token").expanduser().exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

from nemo_curator.backends.ray_actor_pool import RayActorPoolExecutor
from nemo_curator.backends.ray_data import RayDataExecutor
from nemo_curator.backends.xenna import XennaExecutor
from nemo_curator.core.client import RayClient
from nemo_curator.models.client.llm_client import GenerationConfig
from nemo_curator.models.client.openai_client import AsyncOpenAIClient
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.synthetic.qa_multilingual_synthetic import QAMultilingualSyntheticStage
from nemo_curator.stages.text.io.writer import JsonlWriter

from rollway.integrations.curator import (
    DynamoServerConfig,
    DynamoVLLMModelConfig,
    InferenceServer,
)

EXECUTORS = {
    "xenna": XennaExecutor,
    "ray-data": RayDataExecutor,
    "ray-actor-pool": RayActorPoolExecutor,
}
PROMPT = "Write one question about the sea, and its answer, in {language}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a checkpoint or a Hugging Face id (a tiny model)")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--out", default="rows", help="a directory for the JSON lines")
    parser.add_argument("--executor", choices=EXECUTORS, default="xenna")
    options = parser.parse_args()

    ray = start_ray(options.replicas)
    try:
        with InferenceServer(
            models=[make_model(options.model, options.replicas)],
            backend=DynamoServerConfig(request_plane="tcp", event_plane="zmq"),
        ) as server:
            name = server.models[0].resolved_model_name
            make_rows(server.endpoint, name, options.rows, options.out, options.executor)
    finally:
        ray.stop()
    print(f"{options.rows} rows are in {Path(options.out).absolute()}")


def start_ray(replicas: int) -> RayClient:
    """Start a Ray cluster on this machine; the caller stops it."""
    # Ray only counts what it is told: engines on the CPU need no GPU. Without a CPU for each stage
    # beside the server's, Curator's executors would wait forever.
    gpus = None if shutil.which("nvidia-smi") else replicas
    client = RayClient(num_gpus=gpus, num_cpus=max(os.cpu_count() or 1, replicas + 5))
    client.start()
    return client


def make_model(path: str | None, replicas: int) -> DynamoVLLMModelConfig:
    if path is not None:
        return DynamoVLLMModelConfig(path, num_replicas=replicas)
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    tiny = {"max_model_len": 512, "max_num_seqs": 16, "dtype": "float32"}
    base = str(build_base(cache_dir() / "demo"))
    return DynamoVLLMModelConfig(base, model_name="tiny", engine_kwargs=tiny, num_replicas=replicas)


def make_rows(endpoint: str, model: str, rows: int, out: str, executor: str) -> None:
    """Generate rows with the model at this endpoint, and write them."""
    client = AsyncOpenAIClient(base_url=endpoint, api_key="unused", max_concurrent_requests=16)
    stage = QAMultilingualSyntheticStage(
        prompt=PROMPT,
        languages=["English", "German", "French"],
        client=client,
        model_name=model,
        num_samples=rows,
        generation_config=GenerationConfig(max_tokens=48, temperature=1.0),
    )
    pipeline = Pipeline(name="questions", stages=[stage, JsonlWriter(path=out)])
    pipeline.run(executor=EXECUTORS[executor]())


if __name__ == "__main__":
    main()
