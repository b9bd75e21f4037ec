"""Versions as checkpoint directories: complete when they appear, kept as long as configured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.checkpoint import check_checkpoint
from rollway.weights.transports.files import FilesPublisher, FilesReader
from tests.checkpoints import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_text("old weights")
    return path


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((4, 4), value, dtype=torch.bfloat16),
        "b": torch.full((100,), value),
        "c": torch.tensor(value),
    }


def test_a_version_is_a_whole_checkpoint(tmp_path: Path, model: Path) -> None:
    publisher = FilesPublisher(tmp_path / "versions", model)
    path = Path(publisher.publish(3, tensors(1.5).items()).where["path"])
    assert path == publisher.path(3)
    assert set(check_checkpoint(path).tensors) == {"a", "b", "c"}
    assert {file.name for file in path.iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors", "STABLE")
    }
    loaded = load_file(path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(1.5).items())


def test_large_models_are_many_files_with_an_index(tmp_path: Path, model: Path) -> None:
    publisher = FilesPublisher(tmp_path / "versions", model, shard_bytes=200)
    buffer = torch.empty(25)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(7):
            yield f"layer.{number}", buffer.fill_(number)  # the same memory again and again

    path = Path(publisher.publish(1, stream()).where["path"])
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert len(check_checkpoint(path).tensors) == 7
    loaded = {name: tensor for file in names for name, tensor in load_file(path / file).items()}
    assert all(bool((loaded[f"layer.{number}"] == number).all()) for number in range(7))


def test_tied_and_transposed_tensors(tmp_path: Path, model: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    publisher = FilesPublisher(tmp_path / "versions", model)
    path = Path(
        publisher.publish(1, [("embed", weight), ("head", weight), ("turned", weight.t())]).where[
            "path"
        ]
    )
    loaded = load_file(path / "model.safetensors")
    assert torch.equal(loaded["head"], weight)
    assert torch.equal(loaded["turned"], weight.t())


def test_a_worker_reads_a_version_and_notices_a_change(tmp_path: Path, model: Path) -> None:
    publisher = FilesPublisher(tmp_path / "versions", model)
    offer = publisher.publish(1, tensors(1.5).items())
    reader = FilesReader()
    assert reader.headers(offer)["b"].shape == (100,)
    received = dict(reader.tensors(offer))
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors(1.5).items())
    path = Path(offer.where["path"])
    (path / "tokenizer.json").write_text("[]")
    with pytest.raises(UsageError, match="tokenizer"):
        list(reader.tensors(offer))


def test_a_temporary_directory_is_removed_at_the_end(tmp_path: Path, model: Path) -> None:
    for temporary in (False, True):
        root = tmp_path / f"versions-{temporary}"
        with FilesPublisher(root, model, temporary=temporary) as publisher:
            publisher.publish(1, tensors(1).items())
            assert root.is_dir()
        assert root.is_dir() is not temporary


def test_wrong_use_is_refused(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "versions"
    with pytest.raises(UsageError, match="keep_recent is 2, and a rollout may be 3 steps old"):
        FilesPublisher(root, model, keep_recent=2, max_off_policy_steps=3)
    with pytest.raises(UsageError, match=r"no config\.json"):
        FilesPublisher(root, tmp_path)
    publisher = FilesPublisher(root, model)
    publisher.publish(3, tensors(1).items())
    for version in (3, 2, -1):
        with pytest.raises(UsageError, match=f"Version {version} cannot follow version 3"):
            publisher.publish(version, tensors(1).items())
    with pytest.raises(UsageError, match="a came twice"):
        publisher.publish(4, [("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(UsageError, match="no tensors"):
        publisher.publish(4, [])
    assert publisher.versions() == [3]
    assert [path.name for path in root.iterdir()] == ["v3"]


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=10))
@settings(max_examples=25)
def test_the_newest_versions_are_kept(
    tmp_path_factory: pytest.TempPathFactory, keep: int, steps: list[int]
) -> None:
    base = tmp_path_factory.mktemp("files")
    write_checkpoint(base / "model")
    publisher = FilesPublisher(base / "versions", base / "model", keep_recent=keep)
    published: list[int] = []
    for step in steps:
        published.append((published[-1] if published else 0) + step)
        publisher.publish(published[-1], tensors(published[-1]).items())
        assert publisher.versions() == published[-keep:]
        for version in published[-keep:]:
            check_checkpoint(publisher.path(version))


def test_a_killed_publisher_leaves_whole_versions_and_the_next_cleans_up(
    tmp_path: Path, model: Path
) -> None:
    root = tmp_path / "versions"
    code = f"""
import sys, torch
from pathlib import Path
from rollway.weights.transports.files import FilesPublisher
publisher = FilesPublisher(Path({str(root)!r}), Path({str(model)!r}), shard_bytes=1)
publisher.publish(1, [("a", torch.ones(9))])
def stream():
    yield "a", torch.ones(9)
    yield "b", torch.ones(9)
    print("half", flush=True)
    sys.stdin.read()
publisher.publish(2, stream())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    assert len(list(root.iterdir())) == 2
    FilesPublisher(root, model)  # another one, while the first lives: its work is left alone
    assert len(list(root.iterdir())) == 2
    process.kill()
    process.wait()
    publisher = FilesPublisher(root, model)
    assert publisher.versions() == [1]
    check_checkpoint(root / "v1")
    assert [path.name for path in root.iterdir()] == ["v1"]
    publisher.publish(2, tensors(2).items())
    assert publisher.versions() == [1, 2]


def test_old_leftovers_of_other_machines_are_removed(tmp_path: Path, model: Path) -> None:
    root = tmp_path / "versions"
    fresh, old, legacy = (
        root / f".v{number}.0123456789ab-7-{number}.partial" for number in (1, 2, 3)
    )
    trash = root / ".v0.0123456789ab-7-7.trash"
    for path in (fresh, old, legacy, trash):
        path.mkdir(parents=True)
        (path / "0.safetensors").write_bytes(b"half")
    long_ago = time.time() - leftovers.ABANDONED_SECONDS - 60
    for path in (old, legacy):
        os.utime(path / "0.safetensors", (long_ago, long_ago))
    os.utime(old, (long_ago, long_ago))
    FilesPublisher(root, model)
    assert set(root.iterdir()) == {fresh, legacy}  # something was done in `legacy` lately
