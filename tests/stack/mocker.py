"""Stacks of Dynamo's mocker, which start quickly and have no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rollway


def mocker_spec(base_model: Path, name: str = "t", **fields: Any) -> rollway.StackSpec:
    model = {"path": str(base_model), "name": "tiny", "engine": "mocker", "replicas": 2}
    return rollway.make_spec({"name": name, "models": [model], **fields})
