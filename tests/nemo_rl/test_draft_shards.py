"""Two tensor-parallel ranks publish the policy's shards, and their draft model as NeMo-RL exports
it: one version, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollway.integrations.nemo_rl.publish import PublishOptions
from rollway.weights.offer import parse_offer
from rollway.weights.transports.base import Reader
from rollway.weights.transports.shm import ShmReader, join_offers
from tests.megatron.package import install_megatron
from tests.nemo_rl.draft_policy import DraftRank, write_draft
from tests.nemo_rl.environment import find_source
from tests.nemo_rl.policy import Policy, get

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECRET = "s" * 32
SCALES = {"model.layers.0.self_attn.k_scale": 0.25, "model.layers.0.self_attn.v_scale": 0.5}


@pytest.fixture(scope="module")
def policy(base_model: Path) -> Any:
    find_source()
    install_megatron()
    opened = Policy(base_model, rank_class=DraftRank)
    yield opened
    opened.worker_group.close()


@pytest.mark.parametrize("method", ["shm", "nixl"])
def test_a_version_has_the_draft_model_and_the_scales(
    method: str,
    policy: Policy,
    base_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLWAY_WEIGHTS_SECRET", SECRET)  # of the reader
    draft = write_draft(tmp_path / "model.safetensors")
    policy.call("load_draft", file=str(tmp_path / "model.safetensors"))

    def call(method: str, **kwargs: Any) -> list[Any]:
        fields = {"method": method, "kwargs": kwargs}
        return get(policy.worker_group.run_all_workers_single_data("rollway_rpc", **fields))

    options = PublishOptions(
        method=method, stack="s", secret=SECRET, model=str(base_model),
        admin_urls=("http://127.0.0.1:1",),
    )  # fmt: skip
    call("open", options=options.as_plain(), world=2)
    if url := "".join(call("catalog")):
        call("use_catalog", url=url)
    reader = open_reader(method)
    expected = load_file(base_model / "model.safetensors")
    expected |= {f"draft.{name}": tensor for name, tensor in draft.items()}
    expected |= {f"kv_scale.{name}": torch.tensor([value]) for name, value in SCALES.items()}
    try:
        for version in (1, 2):
            raw = call("publish", version=version, kv_scales=SCALES)
            offers = [parse_offer(each) for each in raw]
            offer = join_offers(offers) if method == "shm" else offers[0]
            assert reader.headers(offer).keys() == expected.keys()
            for name, tensor in reader.tensors(offer):
                assert torch.equal(tensor, expected[name]), name
            reader.finish(offer)
            call("complete", version=version)
            policy.call("change_draft")  # as an optimizer does, in place
            for name in draft.keys() - {"d2t"}:
                expected[f"draft.{name}"] = expected[f"draft.{name}"] + 1
    finally:
        reader.close()
        call("close")


def open_reader(method: str) -> Reader:
    if method == "shm":
        return ShmReader()
    from rollway.weights.transports.nixl import NixlReader

    return NixlReader()
