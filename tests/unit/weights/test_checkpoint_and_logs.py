"""Checkpoints appear whole or not at all, and logs explain a failure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollway.errors import UsageError
from rollway.stack import logs
from rollway.stack.children import find_hint
from rollway.weights.checkpoint import (
    STABLE,
    check_checkpoint,
    differences,
    publish_checkpoint,
    read_headers,
)
from tests.checkpoints import write_checkpoint


def write_model(directory: Path) -> None:
    write_checkpoint(directory)
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
    assert len(modes) == 1  # all files are equally readable
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        write_model(directory)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        publish_checkpoint(tmp_path / "v1", write)
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_tensor_of_the_index_must_exist(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": np.ones(3)}, tmp_path / "one.safetensors")
    with pytest.raises(UsageError, match=r"two\.safetensors"):
        check_checkpoint(tmp_path)
    save_file({"c": np.ones(3)}, tmp_path / "two.safetensors")
    with pytest.raises(UsageError, match=r"lacks tensors that its index lists: b"):
        check_checkpoint(tmp_path)
    save_file({"b": np.ones(3)}, tmp_path / "two.safetensors")
    assert set(check_checkpoint(tmp_path).tensors) == {"a", "b"}


def test_a_half_written_file_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 40, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="not a whole weight file"):
            check_checkpoint(tmp_path)
    file.write_bytes(whole + b"x")
    with pytest.raises(UsageError, match="not a whole weight file"):
        check_checkpoint(tmp_path)


def test_a_byte_that_changed_after_publishing_is_noticed(tmp_path: Path) -> None:
    target = publish_checkpoint(tmp_path / "v1", write_model)
    before = check_checkpoint(target).identity
    file = target / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(UsageError, match=r"corrupt: model\.safetensors"):
        check_checkpoint(target)
    assert check_checkpoint(target, whole=False).identity == before


def test_paths_outside_the_allowed_roots_are_refused(tmp_path: Path) -> None:
    inside = write_checkpoint(tmp_path / "root" / "a")
    outside = write_checkpoint(tmp_path / "elsewhere")
    link = tmp_path / "root" / "link"
    link.symlink_to(outside)
    check_checkpoint(inside, roots=[tmp_path / "root"])
    for path in (outside, link, tmp_path / "root" / ".." / "elsewhere"):
        with pytest.raises(UsageError, match="outside the allowed checkpoint roots"):
            check_checkpoint(path, roots=[tmp_path / "root"])


def test_differences_are_named(tmp_path: Path) -> None:
    served = read_headers(write_checkpoint(tmp_path / "a"))
    assert differences(served, served) == []
    other = read_headers(
        write_checkpoint(tmp_path / "b", shapes={"model.norm.weight": (5,), "extra": (1,)})
    )
    sentences = "; ".join(differences(other, served))
    assert "model.embed_tokens.weight is missing" in sentences
    assert "extra is not part of the model" in sentences
    assert "model.norm.weight is F32[5], served is F32[4]" in sentences


def test_the_tail_ends_with_the_error_that_matters(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    lines = [f"line {i}" for i in range(50)]
    lines.insert(30, "ValueError: No common block size for 16")
    log.write_text("\n".join(lines))
    shown = logs.read_error_tail(log)
    assert any("ValueError" in line for line in shown)
    assert "multiple of 32" in find_hint(log)


@pytest.mark.parametrize(
    "sentence",
    [
        "RuntimeError: Unsupported CPU attention configuration: head_dim=16",
        "ValueError: To serve at least one request with the models's max seq len (8192), 1.12 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (0.50 GiB).",
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        "ValueError: Free memory on device cuda:0 (9.1/139.8 GiB) on startup is less than desired "
        "GPU memory utilization (0.92, 128.6 GiB).",
    ],
)
def test_the_engines_own_sentence_is_the_cause(tmp_path: Path, sentence: str) -> None:
    """A traceback of dozens of lines follows it in the log."""
    log = tmp_path / "worker.log"
    frames = [f'(EngineCore pid=7) ERROR   File "core.py", line {n}, in run' for n in range(60)]
    log.write_text("\n".join([f"(EngineCore pid=7) ERROR {sentence}", *frames]))
    told = sentence.partition(": ")[2].rstrip(".")
    assert find_hint(log).startswith(f"{told}. Give other options")


def test_an_option_that_the_engine_does_not_know_is_named(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text("usage: …\ndynamo.vllm: error: unrecognized arguments: --no-such-option 1\n")
    assert find_hint(log).startswith("unrecognized arguments: --no-such-option 1. The engine does")


def test_an_unknown_failure_points_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text("all is well\n")
    assert str(log) in find_hint(log)
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
