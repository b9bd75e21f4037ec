"""Small checkpoint directories for tests that need the files and not the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHAPES = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}


def write_checkpoint(
    directory: Path, value: float = 1.0, shapes: dict[str, tuple[int, ...]] | None = None
) -> Path:
    """A checkpoint whose tensors are all of one value."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    tensors = {
        name: np.full(shape, value, np.float32) for name, shape in (shapes or SHAPES).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory
