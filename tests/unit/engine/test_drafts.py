"""Draft models: their tensors, the layers that they share with the policy, and invalid input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollway.engine.companions import Draft, split_headers
from rollway.engine.incoming import Incoming
from rollway.engine.staging import Staging
from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from tests.unit.engine.staging import FakeReader, make_offer, stage
from tests.unit.engine.vllm_models import Tensors, headers_of

WIDTH = 4


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(8, WIDTH)


class Head(torch.nn.Module):
    """A draft model that shares the embeddings of the policy, as EAGLE heads do in vLLM."""

    def __init__(self, shared: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.embed_tokens = shared or torch.nn.Embedding(8, WIDTH)
        self.fc = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.skipped: set[str] = set()

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import get_current_vllm_config

        get_current_vllm_config()  # raises if there is none; kernels of experts read it
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            if name not in self.skipped:
                parameters[name].weight_loader(parameters[name], tensor)  # type: ignore[attr-defined,operator]


def make_worker(directory: Path, *, quantised: str | None = None) -> Any:
    policy = Policy()
    save_file({"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)}, directory / "model.safetensors")
    config = SimpleNamespace(model=str(directory), quantization=quantised, dtype=torch.float32)
    drafter = SimpleNamespace(
        model=Head(policy.embed_tokens),
        speculative_config=SimpleNamespace(draft_model_config=config),
    )
    runner = SimpleNamespace(drafter=drafter, get_model=lambda: policy)
    return SimpleNamespace(
        model_runner=runner,
        model_config=SimpleNamespace(model="/policy"),
        vllm_config=None,
    )


def make_header(*shape: int) -> TensorHeader:
    return TensorHeader("F32", shape, "")


FC = {"fc.weight": make_header(WIDTH, 2 * WIDTH)}


def test_draft_tensors_are_recognised_by_their_prefix() -> None:
    names = ("model.w", "draft.fc.weight", "kv_scale.model.k_scale")
    policy, draft, scales = split_headers({name: make_header(1) for name in names})
    assert (list(policy), list(draft), list(scales)) == (
        ["model.w"],
        ["fc.weight"],
        ["model.k_scale"],
    )


def test_a_worker_without_a_draft_model_refuses_draft_tensors(tmp_path: Path) -> None:
    plain = SimpleNamespace(model_runner=SimpleNamespace())
    with pytest.raises(RuntimeError, match="this worker has none; start it with a speculative"):
        Draft(plain, FC)
    n_gram_worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=SimpleNamespace()))
    with pytest.raises(RuntimeError, match="this worker has none"):
        Draft(n_gram_worker, FC)


def test_the_draft_model_of_the_second_model_runner_is_found(tmp_path: Path) -> None:
    """On a GPU, vLLM's default runner names it `speculator`."""
    worker = make_worker(tmp_path)
    worker.model_runner.speculator = worker.model_runner.drafter
    del worker.model_runner.drafter
    Draft(worker, FC)


def test_draft_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fc\.weight is missing"):
        Draft(make_worker(tmp_path), {"other.weight": make_header(1)})
    with pytest.raises(UsageError, match=r"fc\.weight is .*, served is"):
        Draft(make_worker(tmp_path), {"fc.weight": make_header(1)})
    with pytest.raises(RuntimeError, match="shares embed_tokens"):
        Draft(make_worker(tmp_path), {**FC, "embed_tokens.weight": make_header(8, WIDTH)})
    with pytest.raises(RuntimeError, match="quantised"):
        Draft(make_worker(tmp_path, quantised="fp8"), FC)


def test_an_eagle3_head_fits_under_either_name_of_its_layer(tmp_path: Path) -> None:
    """NeMo-RL exports `midlayer`, and not the inverse table, which vLLM does not load."""
    worker = make_worker(tmp_path)
    served = {"fc.weight": torch.zeros(WIDTH, 2 * WIDTH), "t2d": torch.zeros(8, dtype=torch.bool)}
    save_file(
        {**served, "layers.0.norm.weight": torch.zeros(WIDTH)}, tmp_path / "model.safetensors"
    )
    Draft(worker, {**FC, "midlayer.norm.weight": make_header(WIDTH)})
    Draft(worker, {**FC, "layers.0.norm.weight": make_header(WIDTH)})
    with pytest.raises(UsageError, match=r"layers\.0\.norm\.weight is missing"):
        Draft(worker, FC)


def test_draft_tensors_are_copied_and_policy_tensors_pass_through(tmp_path: Path) -> None:
    draft, buffer = Draft(make_worker(tmp_path), FC), torch.ones(2)
    reader = FakeReader({"a": torch.zeros(1), "draft.fc.weight": buffer, "b": torch.zeros(1)})
    incoming = Incoming(None, reader, make_offer({}), {}, torch.clone, draft)
    assert [name for name, _ in incoming.tensors()] == ["a", "b"]
    # The reader has used the memory again.
    assert draft._tensors["fc.weight"].tolist() == [1.0, 1.0]


def test_a_draft_layer_that_vllm_did_not_load_is_reported(tmp_path: Path) -> None:
    """Of layers that are tied, one is loaded."""
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    worker = make_worker(tmp_path)
    worker.vllm_config = VllmConfig()
    live = worker.model_runner.drafter.model
    live.tied = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
    live.tied.weight = live.fc.weight
    record_metadata_for_reloading(live)
    draft, new = Draft(worker, FC), torch.ones(WIDTH, 2 * WIDTH)
    live.skipped = {"fc.weight"}
    draft.keep("fc.weight", new)
    with pytest.raises(RuntimeError, match=r"nothing into .* of the draft model"):
        draft.load()
    live.skipped = set()
    draft.load()
    assert torch.equal(live.fc.weight, new) and live.tied.weight is live.fc.weight


def test_a_draft_that_is_not_finite_is_refused_before_the_pause(
    worker: Any, tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_worker = make_worker(tmp_path)
    weight = torch.full((WIDTH, 2 * WIDTH), torch.nan)
    reader = FakeReader(tensors | {"draft.fc.weight": weight})
    for allowed, state in (("0", "failed"), ("1", "ready")):
        monkeypatch.setenv("ROLLWAY_ALLOW_NON_FINITE", allowed)
        headers, new, _ = split_headers(headers_of(reader.tensors_here))
        draft = Draft(draft_worker, new)
        offer = make_offer(reader.tensors_here)
        incoming = Incoming(worker, reader, offer, headers, torch.clone, draft)
        report = stage(Staging(incoming, None, []))
        assert report["state"] == state, report["error"]
        assert allowed == "1" or report["error"].startswith("draft.fc.weight of version 3 has NaN")
