"""Directories that a trainer has broadcast: where they may be, and when they are complete."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollway.errors import UsageError
from rollway.integrations.prime_rl.directories import (
    BroadcastRules,
    Marker,
    read_adapter_config,
    read_step,
)
from tests.unit.prime_rl.fakes import write_weights
from tests.waiting import wait_until_async


def age(path: Path, seconds: int) -> None:
    """Set a file's time, relative to a fixed one."""
    os.utime(path, (1_700_000_000 + seconds,) * 2)


@pytest.mark.parametrize("marker", ["STABLE", ".finished"])
async def test_a_marker_completes_a_directory(tmp_path: Path, marker: str) -> None:
    path = write_weights(tmp_path / "step_3")
    rules = BroadcastRules(output_dir=tmp_path, marker_seconds=0.0)
    with pytest.raises(UsageError, match="no marker"):
        await rules.find("step_3")
    (path / ".sender_ready").touch()  # the first of four stages, not the last
    (path / ".started").touch()
    (path / "NCCL_READY").touch()  # written for every transport, by the orchestrator
    with pytest.raises(UsageError, match="no marker"):
        await rules.find("step_3")
    (path / marker).touch()
    assert await rules.find("step_3") == path == await rules.find(str(path))
    other: Marker = ".finished" if marker == "STABLE" else "STABLE"
    with pytest.raises(UsageError, match="no marker"):
        await BroadcastRules(output_dir=tmp_path, marker=other, marker_seconds=0.0).find("step_3")


async def test_a_marker_may_appear_late(tmp_path: Path) -> None:
    """A network file system shows it some seconds after the orchestrator has seen it."""
    path = write_weights(tmp_path / "step_3")
    finding = asyncio.create_task(BroadcastRules(output_dir=tmp_path).find("step_3"))
    await asyncio.sleep(0)  # one turn of the loop
    assert not finding.done()
    (path / "STABLE").touch()
    await wait_until_async(finding.done)
    assert finding.result() == path


async def test_an_old_marker_of_a_step_that_is_written_again_counts_for_nothing(
    tmp_path: Path,
) -> None:
    path = write_weights(tmp_path / "step_3")
    (path / "STABLE").touch()
    age(path / "model.safetensors", 5)
    age(path / "STABLE", 0)
    rules = BroadcastRules(output_dir=tmp_path, marker_seconds=0.0)
    with pytest.raises(UsageError, match="newer than its marker"):
        await rules.find("step_3")
    age(path / "STABLE", 5)
    assert await rules.find("step_3") == path


async def test_paths_stay_below_their_roots(tmp_path: Path) -> None:
    inside = write_weights(tmp_path / "out" / "step_1")
    outside = write_weights(tmp_path / "elsewhere" / "step_1")
    for path in (inside, outside):
        (path / "STABLE").touch()
    (tmp_path / "out" / "link").symlink_to(outside)
    rules = BroadcastRules([tmp_path / "out"], tmp_path, marker_seconds=0.0)
    assert await rules.find("out/step_1") == inside
    for name in (str(outside), "out/../elsewhere/step_1", "out/link", "/", "\0"):
        with pytest.raises(UsageError, match="outside the allowed"):
            await rules.find(name)
    with pytest.raises(UsageError, match="--output-dir"):
        await BroadcastRules(marker_seconds=0.0).find("out/step_1")
    # Without roots, the output directory is one.
    with pytest.raises(UsageError, match="outside the allowed"):
        await BroadcastRules(output_dir=tmp_path / "out", marker_seconds=0.0).find(str(outside))


async def test_weights_need_no_config_but_plain_tensors(tmp_path: Path) -> None:
    rules = BroadcastRules([tmp_path])
    plain = write_weights(tmp_path / "step_1", "model.embed_tokens.weight", "lm_head.weight")
    assert set((await rules.check_weights(plain)).tensors) >= {"lm_head.weight"}
    (plain / "config.json").write_text("[]")  # where there is one, it must be readable
    with pytest.raises(UsageError, match="JSON object"):
        await rules.check_weights(plain)
    for names, dtype in (
        (["model.layers.0.mlp.experts.w13_weight"], "BF16"),
        (["model.layers.0.mlp.down_proj.weight_scale_inv"], "BF16"),
        (["model.layers.0.mlp.down_proj.weight"], "F8_E4M3"),
        (["model.layers.0.mlp.down_proj.scales"], "F8_E8M0"),
    ):
        kernels = write_weights(tmp_path / "kernels", *names, dtype=dtype)
        with pytest.raises(UsageError, match="quantize_in_weight_transfer"):
            await rules.check_weights(kernels)


def test_steps_and_adapters(tmp_path: Path) -> None:
    assert read_step(Path("/a/step_12")) == 12 == read_step(Path("step-12"))
    assert read_step(Path("/a/final")) is None
    with pytest.raises(UsageError, match="not an adapter"):
        read_adapter_config(tmp_path)
