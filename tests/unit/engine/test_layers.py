"""Only layers that keep their weights as loaded may be written by a plan."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine.layers import PACKED, explain_no_plan, list_changed_layers
from rollway.engine.loading import find_plan
from tests.unit.engine.vllm_models import create_worker, headers_of, use_ranks, write_model


class Backend(enum.Enum):
    TRITON = 1
    BATCHED_TRITON = 2
    FLASHINFER_CUTLASS = 3
    FLASHINFER_TRTLLM = 4
    CPU = 5


@pytest.fixture
def moe(tmp_path: Path) -> Any:
    write_model("qwen3-moe", tmp_path)
    with use_ranks():
        return create_worker(tmp_path)


@pytest.mark.parametrize("backend", Backend)
def test_experts_are_planned_for_backends_that_use_them_as_loaded(
    moe: Any, backend: Backend
) -> None:
    model = moe.model_runner.get_model()
    for module in model.modules():
        if hasattr(module, "unquantized_backend"):
            module.unquantized_backend = backend
    changed = list_changed_layers(model)
    if "TRITON" in backend.name:
        assert changed == {}
    else:
        assert list(changed) == [f"model.layers.{i}.mlp.experts.routed_experts" for i in (0, 1)]
        assert set(changed.values()) == {f"the MoE backend {backend.name} reorders weights"}
    assert explain_no_plan(moe) == ""


def test_an_unknown_method_is_not_trusted(tmp_path: Path) -> None:
    """Also not one that derives from a method that changes nothing."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Derived(UnquantizedLinearMethod):
        pass

    write_model("llama", tmp_path)
    with use_ranks():
        model = create_worker(tmp_path).model_runner.get_model()
        assert list_changed_layers(model) == {}
        model.model.layers[0].mlp.down_proj.quant_method = Derived()
    reason = "Derived may change weights after loading"
    assert list_changed_layers(model) == {"model.layers.0.mlp.down_proj": reason}


def test_packed_layers_are_reloaded_with_the_whole_model(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    tensors = write_model("qwen3-tied", tmp_path)
    with use_ranks():
        worker = create_worker(tmp_path)
        model = worker.model_runner.get_model()
        process_weights_after_loading(model, worker.model_config, torch.device("cpu"))
        changed = list_changed_layers(model)
        plan = find_plan(worker, headers_of(tensors))
    # The head keeps a packed copy, and its parameter is that of the embeddings.
    assert changed["model.layers.0.mlp.down_proj"] == PACKED
    assert changed["model.embed_tokens"] == PACKED
    assert not any("norm" in name for name in changed)
    assert PACKED in plan.refusal and not plan.copies


def test_other_changes_are_recognised() -> None:
    device = torch.device("cpu")
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(4, 4, bias=False, device=device) for name in "abc"}
    )
    assert list_changed_layers(model) == {}
    model["b"].weight.data = model["b"].weight.data.t()
    model["c"].weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    assert list_changed_layers(model) == {
        "b": "its parameters are not contiguous",
        "c": "it is offloaded to another device",
    }


class Attention(torch.nn.Module):
    """Stands for vLLM's attention layer: known by the name of its base class."""

    def __init__(self, implementation: Any) -> None:
        super().__init__()
        self.impl = implementation

    def process_weights_after_loading(self) -> None: ...


Attention.__module__ = "vllm.model_executor.layers.attention_layer_base"
Attention.__qualname__ = "AttentionLayerBase"


class Sinks:
    """Stands for FlashInfer's implementation, which keeps sinks in float32."""

    def __init__(self, source: Any) -> None:
        self._sinks_source = source

    def process_weights_after_loading(self) -> None: ...


def make_worker(model: torch.nn.Module, **options: Any) -> Any:
    config = {"quantization": None, "use_mla": False} | options
    eplb = config.pop("enable_eplb", False)
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        model_config=SimpleNamespace(**config),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb)),
    )


def test_models_that_keep_more_than_their_parameters_have_no_plan() -> None:
    model = torch.nn.ModuleDict({"attn": Attention(Sinks(None)), "fc": torch.nn.Linear(2, 2)})
    assert explain_no_plan(make_worker(model)) == ""
    assert "quantised" in explain_no_plan(make_worker(model, quantization="fp8"))
    assert "latent attention" in explain_no_plan(make_worker(model, use_mla=True))
    assert "experts move" in explain_no_plan(make_worker(model, enable_eplb=True))
    model["attn"] = Attention(Sinks(torch.ones(2)))
    assert explain_no_plan(make_worker(model)).startswith("attn keeps values")
    assert explain_no_plan(make_worker(Attention(Sinks(None)))).endswith("after loading")
