"""Weight files that are written as tensors come: plain safetensors, with a sum of each tensor."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights import device_copies
from rollway.weights.checkpoint import STABLE, read_word_sums
from rollway.weights.device_copies import HostCopier
from rollway.weights.digest.checksums import DTYPES, raw_bytes, word_sum
from rollway.weights.transports import files
from rollway.weights.transports.files import FilesPublisher, FilesReader, save_tensors
from rollway.weights.untrusted import read_weight_file

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensors(seed: int, device: str = "cpu") -> dict[str, Tensor]:
    draw = random.Random(seed)
    kinds = [d for name, d in DTYPES.items() if name not in ("BOOL", "F8_E8M0")]
    drawn: dict[str, Tensor] = {"scalar": torch.tensor(2.5)}
    for number in range(30):
        dtype, count = draw.choice(kinds), draw.choice([0, 1, 3, 8, 13, 500])
        raw = torch.randint(0, 100, (count * dtype.itemsize,), dtype=torch.uint8)
        drawn[f"w{number}"] = raw.view(dtype)
    drawn["turned"] = torch.randn(6, 10).t()
    return {name: tensor.to(device) for name, tensor in drawn.items()}


def read_all(directory: Path) -> dict[str, Tensor]:
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape
        and left[name].dtype == right[name].dtype
        and torch.equal(raw_bytes(left[name]), raw_bytes(right[name]).cpu())
        for name in left
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_safetensors_reads_what_was_written(device: str, seed: int, tmp_path: Path) -> None:
    state = tensors(seed, device)
    for number, most in enumerate((1, 3000, 1 << 30)):
        directory = tmp_path / str(number)
        directory.mkdir()
        sums = save_tensors(directory, iter(state.items()), most)
        assert sums == {name: word_sum(tensor.cpu()) for name, tensor in state.items()}
        assert same(read_all(directory), state)
        for file in directory.glob("*.safetensors"):
            read_weight_file(file)  # no gaps, no overlaps
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]


def test_a_header_that_is_full_begins_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "HEADER_BYTES", 2048)
    state = {f"layer.{number}.weight": torch.ones(4) for number in range(50)}
    save_tensors(tmp_path, state.items(), 1 << 30)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(read_all(tmp_path), state)
    with pytest.raises(UsageError, match="too long for its header"):
        save_tensors(tmp_path, [("x" * 3000, torch.ones(1))], 1 << 30)


def test_a_tensor_may_be_refilled_at_once(tmp_path: Path) -> None:
    memory = torch.empty(7)

    def gather() -> object:
        for number in range(3):
            yield f"w{number}", memory.fill_(number)

    save_tensors(tmp_path, gather(), 1 << 30)  # type: ignore[arg-type]
    assert {name: float(t[0]) for name, t in read_all(tmp_path).items()} == {
        "w0": 0,
        "w1": 1,
        "w2": 2,
    }


def test_an_error_leaves_no_open_file(tmp_path: Path) -> None:
    def fail() -> object:
        yield "a", torch.ones(4)
        raise RuntimeError("the trainer failed")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError, match="the trainer failed"):
        save_tensors(tmp_path, fail(), 1 << 30)  # type: ignore[arg-type]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_pieces_of_a_device_reach_the_file(
    tmp_path: Path, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU's tensors: threads write pieces at their places."""
    monkeypatch.setattr(device_copies, "_PIECE_BYTES", 256)
    state = tensors(7)
    with HostCopier() as copier:
        writer = files.WeightFileWriter(tmp_path / "a.safetensors", copier)
        for name, tensor in state.items():
            writer.add(name, tensor)
        writer.close()
    assert same(read_all(tmp_path), state)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_worker_compares_sums_instead_of_hashes(tmp_path: Path, model: Path) -> None:
    state = {"a": torch.randn(100), "b": torch.randn(30, 20).bfloat16()}
    offer = FilesPublisher(tmp_path / "versions", model).publish(1, state.items())
    directory, reader = Path(offer.where["path"]), FilesReader()
    assert reader.sums(offer) == {name: word_sum(tensor) for name, tensor in state.items()}
    assert same({name: tensor.clone() for name, tensor in reader.tensors(offer)}, state)
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(WeightsError, match="is corrupt: b changed after it was published"):
        list(reader.tensors(offer))
    # Who says that a tensor is compared otherwise must do it.
    assert len(list(reader.tensors(offer, summed=lambda name: True))) == 2


def test_without_sums_of_all_tensors_files_are_hashed(tmp_path: Path, model: Path) -> None:
    offer = FilesPublisher(tmp_path / "versions", model).publish(1, [("a", torch.ones(9))])
    directory, reader = Path(offer.where["path"]), FilesReader()
    stable = directory / STABLE
    text = stable.read_text()
    for damaged in (text.replace('"words"', '"others"'), text.replace('"a": "', '"a": "x')):
        stable.write_text(damaged)
        assert read_word_sums(directory) == {} and reader.sums(offer) == {}
        assert [name for name, _ in reader.tensors(offer)] == ["a"]
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors changed after it was published"):
        list(reader.tensors(offer))
