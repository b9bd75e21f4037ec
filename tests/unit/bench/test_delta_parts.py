"""The parts of a delta are measured on whatever device the weights are."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.delta_parts import measure_parts
from benchmarks.real_model import change_some


def test_every_part_is_measured_and_the_delta_leads_to_the_weights(tmp_path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator).bfloat16().to(device)
        for name, shape in (("a", (64, 33)), ("b", (7,)), ("c", (512, 64)))
    }
    parts = measure_parts(weights, change_some, tmp_path)
    assert parts["seconds"].keys() == {"publish", "compare", "read", "unpack", "write", "sum"}
    assert all(seconds > 0 for seconds in parts["seconds"].values())
    assert 0 < parts["delta_bytes"] < sum(tensor.nbytes for tensor in weights.values())
