"""Our sharding rules give the same shapes and elements as vLLM's own loaders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.planning.targets import EngineRank, part_of

torch = pytest.importorskip("torch")
linear: Any = None
embedding: Any = None

HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB = 8, 4, 16, 24, 130
RANKS = [(kv, tp, t) for kv, tp in ((8, 2), (2, 4), (1, 8), (4, 4)) for t in range(tp)]
F32 = {"params_dtype": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def vllm_layers() -> None:
    """Import vLLM when a test needs it: it takes seconds, also for those who only collect."""
    global linear, embedding
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")


def list_parts(rank: EngineRank, tensors: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the shape of each parameter of a rank, and the elements that go into it."""
    headers = {name: TensorHeader("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    shapes, elements = {}, {}
    for name, tensor in tensors.items():
        parameter, part = part_of(name, headers, rank)
        if part is not None:
            shapes[parameter] = part.shape
            elements.setdefault(parameter, []).append(tensor[part.box.slices].flatten())
    return {name: (shapes[name], torch.cat(parts)) for name, parts in elements.items()}


def assert_same_elements(parameter: Any, shape: Any, elements: Any) -> None:
    """Every element is random, and different from all others; padding is 0."""
    assert tuple(parameter.shape) == shape
    loaded = parameter.data[parameter.data != 0]
    assert torch.equal(loaded.sort().values, elements.sort().values)


def load(parameter: Any, *arguments: Any) -> None:
    parameter.weight_loader(parameter, *arguments)


@pytest.mark.parametrize(("kv_heads", "tp", "rank"), RANKS)
def test_dense_layers_are_sharded_as_in_vllm(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, tp: int, rank: int
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter

    for module in (linear, embedding, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp)
    q, kv = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {
        **{f"a.{part}_proj.weight": (q if part == "q" else kv, HIDDEN) for part in "qkv"},
        **{f"a.{part}_proj.bias": (q if part == "q" else kv,) for part in "qkv"},
        "a.o_proj.weight": (HIDDEN, q),
        "a.o_proj.bias": (HIDDEN,),
        "mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "mlp.up_proj.weight": (WIDTH, HIDDEN),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    with set_current_vllm_config(VllmConfig()):
        qkv = linear.QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, kv_heads, bias=True, **F32)
        out = linear.RowParallelLinear(q, HIDDEN, bias=True, **F32)
        both = linear.MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], bias=False, **F32)
        tokens = embedding.VocabParallelEmbedding(VOCAB, HIDDEN, **F32)
        head = embedding.ParallelLMHead(VOCAB, HIDDEN, **F32)
    for kind in ("weight", "bias"):
        for part in "qkv":
            load(getattr(qkv, kind), tensors[f"a.{part}_proj.{kind}"], part)
        load(getattr(out, kind), tensors[f"a.o_proj.{kind}"])
    load(both.weight, tensors["mlp.gate_proj.weight"], 0)
    load(both.weight, tensors["mlp.up_proj.weight"], 1)
    load(tokens.weight, tensors["model.embed_tokens.weight"])
    load(head.weight, tensors["lm_head.weight"])
    loaded = {
        "a.qkv_proj.weight": qkv.weight,
        "a.qkv_proj.bias": qkv.bias,
        "a.o_proj.weight": out.weight,
        "a.o_proj.bias": out.bias,
        "mlp.gate_up_proj.weight": both.weight,
        "model.embed_tokens.weight": tokens.weight,
        "lm_head.weight": head.weight,
    }
    target = EngineRank(heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, tp_size=tp, tp_rank=rank)
    ours = list_parts(target, tensors)
    only_padding = {name for name in loaded if name not in ours}
    assert all(not loaded[name].any() for name in only_padding)
    for name, (shape, elements) in ours.items():
        assert_same_elements(loaded[name], shape, elements)


@pytest.mark.parametrize("rank", range(4))
def test_experts_are_sharded_as_in_vllm(rank: int) -> None:
    module = pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts")
    experts = module.RoutedExperts.__new__(module.RoutedExperts)
    config = SimpleNamespace(
        is_act_and_mul=True, moe_parallel_config=SimpleNamespace(tp_size=4, ep_size=1)
    )
    object.__setattr__(experts, "moe_config", config)
    prefix = "mlp.experts.1"
    tensors = {
        f"{prefix}.gate_proj.weight": torch.rand(WIDTH, HIDDEN),
        f"{prefix}.up_proj.weight": torch.rand(WIDTH, HIDDEN),
        f"{prefix}.down_proj.weight": torch.rand(HIDDEN, WIDTH),
    }
    w13, w2 = torch.zeros(2, WIDTH // 2, HIDDEN), torch.zeros(2, HIDDEN, WIDTH // 4)
    experts._load_w13(w13[1], 0, "w1", tensors[f"{prefix}.gate_proj.weight"], rank)
    experts._load_w13(w13[1], 0, "w3", tensors[f"{prefix}.up_proj.weight"], rank)
    experts._load_w2(w2[1], 1, tensors[f"{prefix}.down_proj.weight"], rank)
    target = EngineRank(heads=4, kv_heads=4, head_dim=4, experts=2, tp_size=4, tp_rank=rank)
    ours = list_parts(target, tensors)
    assert_same_elements(w13, *ours["mlp.experts.routed_experts.w13_weight"])
    assert_same_elements(w2, *ours["mlp.experts.routed_experts.w2_weight"])


@pytest.mark.parametrize(("experts", "ep"), [(8, 4), (7, 4), (5, 3)])
def test_experts_are_assigned_to_ranks_as_in_vllm(experts: int, ep: int) -> None:
    manager = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    for rank in range(ep):
        count, places, _ = manager.determine_expert_map(ep, rank, experts)
        target = EngineRank(
            heads=1, kv_heads=1, head_dim=1, experts=experts, ep_size=ep, ep_rank=rank
        )
        assert len(target.owned) == count
        assert [int(places[expert]) for expert in target.owned] == list(range(count))
