"""Stacks of light workers: real Dynamo, and an engine that starts in a second."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STACK_FILE = Path(__file__).with_name("stack.yaml")
PATHS = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
"""Of the workers: they run the code of this checkout, whatever is installed."""
_FROM_ANY_DIRECTORY = ("--set", f"models.0.env.PYTHONPATH={PATHS}")
WITH_LIGHT_WORKERS = (str(STACK_FILE), *_FROM_ANY_DIRECTORY)
"""Arguments of `rollway chaos`."""
WITH_ROLES_APART = (str(STACK_FILE.with_name("apart.yaml")), *_FROM_ANY_DIRECTORY)
"""The same, with two prefill and two decode workers."""


def light(base_model: Path, name: str, replicas: int = 2, **env: str) -> dict[str, Any]:
    model = {
        "path": str(base_model),
        "name": "tiny",
        "engine": "custom",
        "module": "tests.light.worker",
        "replicas": replicas,
        "env": {"PYTHONPATH": PATHS, **env},
    }
    restart = {"backoff_seconds": 0.1, "max_failures": 100}
    return {"name": name, "models": [model], "start_seconds": 120, "restart": restart}
