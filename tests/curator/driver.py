"""A driver as users write it: start, run a pipeline, stop, again and again, in one process.

`python -m tests.curator.driver light|vllm DIRECTORY EXECUTOR…` prints a JSON line per pipeline.
It connects to the cluster at $RAY_ADDRESS only inside Curator's executors."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nemo_curator.core.serve import is_inference_server_active

from rollway.demo.model import build_base
from rollway.integrations.curator import DynamoServerConfig, DynamoVLLMModelConfig, InferenceServer
from rollway.stack.preset import cache_dir
from tests.curator.conftest import ROOT, SHIM

sys.path.insert(0, str(ROOT / "examples" / "curator"))

import qa  # the example itself

ROWS = 6


def make_server(kind: str) -> InferenceServer:
    base = str(build_base(cache_dir() / "demo"))
    env = {"PYTHONPATH": f"{SHIM}:{ROOT}"} if kind == "light" else {}
    args = {} if kind == "light" else {"max_model_len": 512, "max_num_seqs": 8, "dtype": "float32"}
    models = [
        DynamoVLLMModelConfig(base, model_name=name, engine_kwargs=args)
        for name in ("org-a/tiny", "org-b/tiny")
    ]
    backend = DynamoServerConfig(subprocess_env=env)
    return InferenceServer(models=models, backend=backend, health_check_timeout_s=300)


def main() -> None:
    kind, directory, *executors = sys.argv[1:]
    server = make_server(kind)
    for executor in executors:
        began = time.perf_counter()
        server.start()
        ready = time.perf_counter() - began
        assert is_inference_server_active()
        rows: dict[str, list[Any]] = {}
        for model in server.models:
            name = model.resolved_model_name
            out = Path(directory, executor, name.replace("/", "-"))
            qa.make_rows(server.endpoint, name, ROWS, str(out), executor)
            lines = [line for file in out.glob("*.jsonl") for line in file.open()]
            rows[name] = [json.loads(line) for line in lines]
        server.stop()
        result = {"executor": executor, "ready": ready, "rows": rows, "pid": os.getpid()}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
