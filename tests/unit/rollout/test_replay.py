"""Replaying recorded experts in a tiny mixture-of-experts model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
np = pytest.importorskip("numpy")

from examples.exactness.mismatch import Mismatch, mismatch  # noqa: E402
from examples.moe.replay_experts import replay, router_choices  # noqa: E402
from rollway.errors import UsageError  # noqa: E402
from rollway.rollout.experts import RoutedExperts, join  # noqa: E402

LENGTH = 120
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}
QWEN = {"moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16, "decoder_sparse_step": 1}
MODELS: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SIZES, **QWEN, norm_topk_prob=True),
    "qwen3 unnormalised": lambda: transformers.Qwen3MoeConfig(**SIZES, **QWEN),
    "qwen3 with a dense layer": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **QWEN, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=8, eos_token_id=1),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=8),
}


def build(kind: str = "qwen3") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[kind]())
        for name, weight in model.named_parameters():
            # Some models initialise the router with zeros. These values give nearly even scores,
            # like those of many experts: a small change of the router then changes which experts
            # run, but hardly their weights.
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(weight, std=0.1)
    return model.float().eval()


@pytest.fixture(scope="module")
def shared() -> Any:
    return build()


@pytest.fixture
def model(shared: Any) -> Any:
    return copy.deepcopy(shared)


def make_tokens(seed: int = 0, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, length).tolist()


def compute_logprobs(model: Any, *rows: list[int]) -> Any:
    ids = torch.tensor(rows)
    scores = model(ids).logits[:, :-1].double().log_softmax(dim=-1)
    return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)


def perturb(model: Any, scale: float = 0.02) -> Any:
    """Return a copy with a changed router, which sends some tokens to other experts."""
    other, draw = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if name.endswith("gate.weight"):
                weight += scale * weight.std() * torch.randn(weight.shape, generator=draw)
    return other


@pytest.mark.parametrize("kind", MODELS)
def test_replaying_the_own_choices_of_a_model_changes_nothing(kind: str) -> None:
    model, ids = build(kind), make_tokens()
    routed = router_choices(model, ids)
    sparse = 2 if kind == "qwen3 with a dense layer" else 3
    assert routed.ids.shape == (LENGTH, sparse, 2)
    routed.check(LENGTH, 8)
    with torch.no_grad():
        own = compute_logprobs(model, ids)
        with replay(model, routed):
            replayed = compute_logprobs(model, ids)
        assert (own - replayed).abs().max() < 1e-6
        assert torch.equal(compute_logprobs(model, ids), own)  # the replay leaves no hook behind


@pytest.mark.parametrize("kind", MODELS)
def test_a_changed_router_runs_the_recorded_experts(kind: str) -> None:
    model, ids = build(kind), make_tokens()
    routed, other = router_choices(model, ids), perturb(model)
    assert not np.array_equal(router_choices(other, ids).ids, routed.ids)
    with torch.no_grad():
        engine = compute_logprobs(model, ids)
        own = mismatch(compute_logprobs(other, ids), engine)
        with replay(other, routed):
            replayed = mismatch(compute_logprobs(other, ids), engine)
            chosen = router_choices(other, ids)
    assert np.array_equal(chosen.ids, routed.ids)
    assert replayed.k3 < own.k3 / 10


def test_gradients_reach_the_router(model: Any) -> None:
    ids = make_tokens()
    with replay(perturb(model), router_choices(model, ids)):
        pass  # entering alone changes nothing
    with replay(model, router_choices(perturb(model, 0.5), ids)):
        compute_logprobs(model, ids).sum().backward()
    for layer in model.model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0
        assert layer.mlp.experts.down_proj.grad.abs().sum() > 0


def test_gradients_under_replay_equal_those_of_the_model(model: Any) -> None:
    ids, twin = make_tokens(), copy.deepcopy(model)
    compute_logprobs(twin, ids).sum().backward()
    with replay(model, router_choices(model, ids)):
        compute_logprobs(model, ids).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_checkpointed_layers_replay_in_the_backward_pass(model: Any) -> None:
    ids, routed = make_tokens(), router_choices(perturb(model, 0.5), make_tokens())
    twin = copy.deepcopy(model)
    with replay(twin, routed):
        compute_logprobs(twin, ids).sum().backward()
    model.train().gradient_checkpointing_enable()
    with replay(model, routed):
        compute_logprobs(model, ids).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_tokens_without_a_record_are_routed_by_the_model(model: Any) -> None:
    ids, other = make_tokens(), perturb(model, 0.5)
    routed = router_choices(other, ids)
    short = RoutedExperts(routed.ids[:-1])
    with replay(model, short):
        chosen = router_choices(model, ids)
    assert np.array_equal(chosen.ids[:-1], short.ids)
    tail = RoutedExperts(routed.ids[10:], start=10)
    own = router_choices(model, ids)
    with replay(model, tail):
        chosen = router_choices(model, ids)
    assert np.array_equal(chosen.ids, join(RoutedExperts(own.ids[:10]), tail).ids)


def test_a_padded_batch_replays_every_row(model: Any) -> None:
    rows = [make_tokens(1, 20), make_tokens(2, 12)]
    other = perturb(model, 0.5)
    records = [router_choices(other, row) for row in rows]
    with torch.no_grad():
        alone = []
        for row, record in zip(rows, records, strict=True):
            with replay(model, record):
                alone.append(compute_logprobs(model, row)[0])
        with replay(model, records):
            both = compute_logprobs(model, rows[0], rows[1] + [0] * 8)
    torch.testing.assert_close(both[0], alone[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(both[1, :11], alone[1], rtol=0, atol=1e-5)


def test_records_that_do_not_fit_the_model_are_refused(model: Any) -> None:
    routed = router_choices(model, make_tokens())
    wrong = [
        (RoutedExperts(routed.ids[:, :2]), "2 layers and top-2; the model has 3"),
        (RoutedExperts(routed.ids[..., :1]), "top-1"),
        (RoutedExperts(routed.ids + 7), "the model has 8 experts"),
        ([], "no routed experts"),
    ]
    for record, message in wrong:
        with pytest.raises(UsageError, match=message), replay(model, record):
            raise AssertionError
    for length in (LENGTH - 1, LENGTH + 2):
        with pytest.raises(UsageError, match=f"{length} tokens"), replay(model, routed):
            compute_logprobs(model, make_tokens(length=length))
    before = compute_logprobs(model, make_tokens())
    assert torch.equal(before, compute_logprobs(model, make_tokens()))


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear has no router"):
        router_choices(torch.nn.Linear(2, 2), [1])


def test_a_layer_that_bypasses_its_router_is_reported(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel bypasses it, too."""
    routed = router_choices(model, make_tokens())
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda hidden: hidden)
    with pytest.raises(UsageError, match="1 of 3 routers"), replay(model, routed):
        compute_logprobs(model, make_tokens())


def test_equal_models_have_no_mismatch(model: Any) -> None:
    ids = make_tokens()
    with torch.no_grad():
        figures = mismatch(compute_logprobs(model, ids), compute_logprobs(model, ids))
    assert isinstance(figures, Mismatch)
    assert figures.k3 == 0
