"""`bench gpu` also runs on a CPU, verifies the results that it times, and reports skipped parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rollway
from rollway.bench.gpu import bench_gpu, format_figures
from rollway.errors import UsageError

PARTS = {
    "copy",
    "digest_dense",
    "digest_moe",
    "translate_dense_tp2",
    "translate_moe_ep2",
    "compare_dense",
    "compare_moe",
    "delta_encode_dense",
    "delta_encode_moe",
    "hand_over_dense",
    "hand_over_moe",
}


def test_every_part_is_measured() -> None:
    figures = bench_gpu("cpu", 8)
    assert not figures["skipped"] and not figures["failed"]
    for part in PARTS - {"copy"}:
        assert figures[part]["gb_per_s"] > 0 and figures[part]["fraction"] > 0
    for kind in ("dense", "moe"):
        assert figures[f"compare_{kind}"]["share_found"] == pytest.approx(0.01, abs=0.003)
        transfer = figures[f"hand_over_{kind}"]
        assert transfer["copies_equal"] and transfer["adopted_equal"]
        assert transfer["closed_is_refused"]
    assert 0 < figures["delta_encode_dense"]["bytes_fraction"] < 0.04
    assert len(format_figures(figures).splitlines()) == 1 + len(PARTS)


def test_parts_that_need_other_packages_than_torch_are_skipped(tmp_path: Path) -> None:
    for name in ("msgspec", "zstandard", "pydantic", "aiohttp", "yaml", "rich", "safetensors"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}')")
    home = Path(rollway.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "rollway.bench.gpu", "--json", "--device=cpu", "--megabytes=4"],
        env={"PYTHONPATH": f"{tmp_path}:{home}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(run.stdout)
    skipped = {part for part in PARTS if part.startswith(("delta", "hand"))}
    assert figures["skipped"] == dict.fromkeys(skipped, "no msgspec")
    assert PARTS - skipped <= figures.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        bench_gpu()
