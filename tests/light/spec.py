"""Stacks of light workers: real Dynamo, and an engine that starts in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STACK_FILE = Path(__file__).with_name("stack.yaml")
WITH_LIGHT_WORKERS = (str(STACK_FILE), "--set", f"models.0.env.PYTHONPATH={ROOT}")
"""Arguments of `rollway chaos`, from any directory."""


def light(base_model: Path, name: str, replicas: int = 2, **env: str) -> dict[str, Any]:
    model = {
        "path": str(base_model),
        "name": "tiny",
        "engine": "custom",
        "module": "tests.light.worker",
        "replicas": replicas,
        "env": {"PYTHONPATH": str(ROOT), **env},
    }
    restart = {"backoff_seconds": 0.1, "max_failures": 100}
    return {"name": name, "models": [model], "start_seconds": 120, "restart": restart}
