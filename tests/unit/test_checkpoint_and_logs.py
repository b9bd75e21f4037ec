"""Checkpoints that appear whole or not at all, and logs that explain a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollway.errors import UsageError
from rollway.stack import logs
from rollway.weights.checkpoint import STABLE, check_checkpoint, publish_checkpoint


def write_model(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"x")
    (directory / "model.safetensors").chmod(0o600)  # as safetensors does


def test_a_checkpoint_appears_at_once(tmp_path: Path) -> None:
    target = tmp_path / "v1"

    def write(directory: Path) -> None:
        write_model(directory)
        assert not target.exists()

    publish_checkpoint(target, write)
    check_checkpoint(target)
    assert (target / STABLE).is_file()
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert len(modes) == 1  # every file as readable as any other
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_writer_that_dies_leaves_nothing(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        write_model(directory)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        publish_checkpoint(tmp_path / "v1", write)
    assert list(tmp_path.iterdir()) == []


def test_every_shard_of_the_index_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(UsageError, match=r"two\.safetensors"):
        check_checkpoint(tmp_path)
    (tmp_path / "two.safetensors").touch()
    check_checkpoint(tmp_path)


def test_the_tail_ends_with_the_error_that_matters(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    lines = [f"line {i}" for i in range(50)]
    lines.insert(30, "ValueError: No common block size for 16")
    log.write_text("\n".join(lines))
    shown = logs.telling_tail(log, 5)
    assert any("ValueError" in line for line in shown)
    assert "multiple of 32" in logs.hint(log)


def test_an_unknown_failure_points_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text("all is well\n")
    assert str(log) in logs.hint(log)
    assert logs.tail(tmp_path / "none.log") == []


def test_following_yields_old_and_new_lines(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text("one\ntwo\n")
    steps = iter([False, True])

    def ended() -> bool:
        if not next(steps):
            with log.open("a") as file:
                file.write("three\n")
            return False
        return True

    assert list(logs.follow(log, poll_seconds=0.01, ended=ended)) == ["one", "two", "three"]
