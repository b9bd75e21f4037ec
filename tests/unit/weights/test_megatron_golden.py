"""Shards that Rollway makes from a checkpoint equal those of Megatron-Core, byte by byte.

`tests/data/megatron` holds digests of those shards; with ROLLWAY_MEGATRON_SHARDS, a directory of
the shards themselves, they are also received as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollway.weights.checkpoint import read_headers
from rollway.weights.megatron.geometry import Topology
from rollway.weights.megatron.names import NameMap, Parameter, classify
from rollway.weights.megatron.pieces import MegatronModel
from tests.unit.weights.megatron_models import Norms, describe_as
from tests.unit.weights.megatron_shards import from_hf, to_hf

DATA = Path(__file__).parents[2] / "data" / "megatron"
GOLDEN = sorted(path.stem for path in DATA.glob("*_w*.json"))
SHARDS = os.environ.get("ROLLWAY_MEGATRON_SHARDS", "")
_NAME = re.compile(r"(\w+?)_tp(\d+)_ep(\d+)_etp(\d+)_pp(\d+)_w(\d+)")


def _described(topology: str, data: Path) -> tuple[Path, MegatronModel]:
    match = _NAME.fullmatch(topology)
    assert match, topology
    tp, ep, etp, pp, world = map(int, match.groups()[1:])
    checkpoint = data / f"hf_{match[1]}"
    config = json.loads((checkpoint / "config.json").read_text())
    names = NameMap.from_hf_config(config)
    headers = read_headers(checkpoint)
    return checkpoint, describe_as(
        headers, names, Topology(tp, pp, ep, etp, world), norms=Norms.SEPARATE
    )


def _read_golden(topology: str, model: MegatronModel) -> list[dict[str, Any]]:
    """Return what Megatron said of each rank, with the global numbers of layers in the names."""
    golden: list[dict[str, Any]] = json.loads((DATA / f"{topology}.json").read_text())
    for rank, said in enumerate(golden):
        said["tensors"] = {_rename(n, model, rank): t for n, t in said["tensors"].items()}
    return golden


def _rename(name: str, model: MegatronModel, rank: int) -> str:
    """Return a name of a rank's tensor with the global number of its layer."""
    position = model.ranks[rank].position
    first = position.pp * model.geometry.layers // position.pp_size
    return re.sub(r"(?<=layers\.)\d+", lambda match: str(int(match[0]) + first), name)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _check_same(shards: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert shards.keys() == truth.keys()
    different = [name for name in truth if _bytes_of(shards[name]) != _bytes_of(truth[name])]
    assert not different
    assert all(shards[name].shape == truth[name].shape for name in truth)


@pytest.mark.parametrize("topology", GOLDEN)
def test_shards_made_from_a_checkpoint_are_those_of_megatron(topology: str) -> None:
    checkpoint, model = _described(topology, DATA)
    truth = load_file(checkpoint / "model.safetensors")
    golden = _read_golden(topology, model)
    shards = from_hf(truth, model)
    assert len(shards) == len(golden)
    for rank, expected in enumerate(golden):
        position = model.ranks[rank].position
        assert {g: getattr(position, g) for g in expected["position"]} == expected["position"]
        digests = {n: hashlib.sha256(_bytes_of(t)).hexdigest() for n, t in shards[rank].items()}
        assert digests == {n: t["sha256"] for n, t in expected["tensors"].items()}
        shapes = {n: list(t.shape) for n, t in shards[rank].items()}
        assert shapes == {n: t["shape"] for n, t in expected["tensors"].items()}


@pytest.mark.parametrize("topology", GOLDEN)
def test_a_worker_makes_the_checkpoint_from_the_shards(topology: str) -> None:
    checkpoint, model = _described(topology, DATA)
    truth = load_file(checkpoint / "model.safetensors")
    _check_same(dict(to_hf(model, from_hf(truth, model))), truth)


@pytest.mark.parametrize("topology", GOLDEN)
def test_the_class_of_a_module_determines_the_role(topology: str) -> None:
    _, model = _described(topology, DATA)
    for rank, expected in enumerate(_read_golden(topology, model)):
        shards = model.ranks[rank].shards
        for name, tensor in expected["tensors"].items():
            attributes = tensor["tp"], tensor["dim"], tensor["stride"]
            assert classify(Parameter(name, tensor["cls"], *attributes)) is shards[name].role


@pytest.mark.skipif(not SHARDS, reason="ROLLWAY_MEGATRON_SHARDS names no directory of shards")
def test_shards_that_megatron_wrote_give_the_checkpoint() -> None:
    directory = Path(SHARDS)
    topologies = sorted(path.name for path in directory.iterdir() if _NAME.fullmatch(path.name))
    assert topologies
    for topology in topologies:
        checkpoint, model = _described(topology, directory)
        files = {rank: directory / topology / f"rank{rank}.safetensors" for rank in model.ranks}
        shards = {
            rank: {_rename(name, model, rank): t for name, t in load_file(path).items()}
            for rank, path in files.items()
        }
        _check_same(dict(to_hf(model, shards)), load_file(checkpoint / "model.safetensors"))
