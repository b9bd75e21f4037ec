"""The sender for trainers of one's own: what a reader may see at any moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollway.errors import UsageError
from rollway.integrations.prime_rl.broadcast import STAGES, BroadcastSender
from rollway.integrations.prime_rl.directories import BroadcastRules, Marker
from rollway.weights.checkpoint import check_checkpoint

TENSORS = {"a.weight": torch.ones(4, 2, dtype=torch.bfloat16), "b.weight": torch.zeros(3)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("marker", ["STABLE", ".finished"])
async def test_a_step_is_complete_by_either_protocol(tmp_path: Path, marker: Marker) -> None:
    sender = BroadcastSender(tmp_path, shard_bytes=8)
    path = sender.send(0, TENSORS.items())
    rules = BroadcastRules([tmp_path], tmp_path, marker, marker_seconds=0.0)
    assert await rules.find("broadcasts/step_0") == path
    assert set((await rules.check_weights(path)).tensors) == TENSORS.keys()
    assert {*STAGES, "STABLE"} <= {file.name for file in path.iterdir()}
    # The marker has the digest of every file.
    check_checkpoint(path, whole=True, needs_config=False)


def test_files_are_on_disk_before_the_markers_and_those_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {Path(target).name}")
        return real_rename(self, target)

    sender = BroadcastSender(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    sender.send(3, TENSORS.items())
    monkeypatch.undo()
    named = events.index("rename to step_3")
    stable = events.index("STABLE")
    weights = events.index("model.safetensors")
    assert weights < stable < named and "broadcasts" in events[named:]


def test_a_sender_that_fails_leaves_nothing(tmp_path: Path) -> None:
    sender = BroadcastSender(tmp_path)

    def broken() -> Any:
        yield "a.weight", TENSORS["a.weight"]
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="died"):
        sender.send(1, broken())
    assert sender.list_steps() == [] and not list((tmp_path / "broadcasts").iterdir())
    # A killed one leaves a hidden directory, which the next sender removes.
    left = tmp_path / "broadcasts" / ".step_1.000000000000-1-1.trash"
    left.mkdir()
    BroadcastSender(tmp_path)
    assert not left.exists()


def test_steps_are_kept_as_long_as_rollouts_may_need_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="8 steps old"):
        BroadcastSender(tmp_path, keep_recent=2)
    with pytest.raises(UsageError, match="checkpoint_interval"):
        BroadcastSender(tmp_path, checkpoint_interval=0)
    sender = BroadcastSender(tmp_path, keep_recent=2, max_off_policy_steps=2, checkpoint_interval=4)
    for step in range(8):
        sender.send(step, TENSORS.items())
    assert sender.list_steps() == [0, 4, 6, 7]


def test_a_resumed_run_replaces_its_step(tmp_path: Path) -> None:
    sender = BroadcastSender(tmp_path)
    sender.send(5, TENSORS.items())
    path = sender.send(5, {"a.weight": torch.full((4, 2), 7.0)}.items())
    assert load_file(path / "model.safetensors")["a.weight"][0, 0] == 7.0
    with pytest.raises(UsageError, match="below 0"):
        sender.send(-1, TENSORS.items())


def test_an_adapter_has_peft_s_files(tmp_path: Path) -> None:
    path = BroadcastSender(tmp_path).send_adapter(2, {"l.lora_A.weight": torch.ones(4, 2)}, CONFIG)
    assert load_file(path / "adapter_model.safetensors").keys() == {"l.lora_A.weight"}
    with pytest.raises(UsageError, match="rank_pattern"):
        BroadcastSender(tmp_path).send_adapter(3, {}, {**CONFIG, "rank_pattern": {"a": 1}})
