"""The mismatch of trainer and engine: known figures, properties, and invalid input."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from examples.exactness.mismatch import Mismatch, mismatch, split_mismatch  # noqa: E402
from rollway.errors import RolloutError, UsageError  # noqa: E402

LOGPROB = st.floats(-20.0, 0.0)
PAIRS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=40)


def compute_figures(pairs: list[tuple[float, float]], **options: Any) -> Mismatch:
    trainer, engine = zip(*pairs, strict=True)
    return mismatch(list(trainer), list(engine), **options)


def test_known_figures() -> None:
    half = math.log(0.5)
    result = mismatch([half, 2 * half], [half, half])  # d = 0 and -log 2
    assert result.tokens == 2
    assert result.k1 == pytest.approx(-half / 2)
    assert result.k3 == pytest.approx((0.5 - half - 1) / 2)
    assert result.k3_max == pytest.approx(0.5 - half - 1)
    assert result.max_abs == pytest.approx(-half)
    assert result.p50 == pytest.approx(-half / 2)
    assert (result.ratio_mean, result.ratio_min, result.ratio_max) == pytest.approx(
        (0.75, 0.5, 1.0)
    )
    assert result.prob_diff_mean == pytest.approx(0.125)
    assert result.ess == pytest.approx(1.5**2 / 1.25 / 2)
    assert result.prob_corr is None and result.logprob_corr is None  # the engine's are constant


def test_equal_logprobs_have_no_mismatch() -> None:
    result = mismatch([-0.1, -2.0, -0.7], [-0.1, -2.0, -0.7])
    assert (result.k1, result.k3, result.max_abs, result.prob_diff_mean) == (0, 0, 0, 0)
    assert (result.ratio_mean, result.ess) == (1, 1)
    assert result.prob_corr == pytest.approx(1.0)


@given(PAIRS)
def test_figures_stay_within_their_bounds(pairs: list[tuple[float, float]]) -> None:
    result = compute_figures(pairs)
    assert result.k3 >= 0
    assert 0 <= result.p50 <= result.p90 <= result.p99 <= result.max_abs
    assert result.ratio_min * (1 - 1e-9) <= result.ratio_mean <= result.ratio_max * (1 + 1e-9)
    assert 1 / len(pairs) * (1 - 1e-9) <= result.ess <= 1 + 1e-9
    assert abs(result.k1) <= result.max_abs * (1 + 1e-9)
    for correlation in (result.prob_corr, result.logprob_corr):
        assert correlation is None or -1 <= correlation <= 1


@given(PAIRS, st.randoms())
def test_the_order_of_tokens_does_not_matter(pairs: list[tuple[float, float]], random: Any) -> None:
    shuffled = random.sample(pairs, len(pairs))
    left, right = compute_figures(pairs).as_json(), compute_figures(shuffled).as_json()
    for name, value in left.items():
        if value is not None and right[name] is not None and "corr" not in name:
            assert right[name] == pytest.approx(value, rel=1e-9, abs=1e-12)


@given(PAIRS, st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3.0]), max_size=5))
def test_masked_tokens_are_ignored(pairs: list[tuple[float, float]], hidden: list[float]) -> None:
    mask = [1] * len(pairs) + [0] * len(hidden)
    padded = [*pairs, *((value, value) for value in hidden)]
    assert compute_figures(padded, mask=mask) == compute_figures(pairs)


def test_lists_arrays_and_tensors_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    trainer, engine = [[-0.5, -1.0], [-2.0, -0.25]], [[-0.25, -1.5], [-2.0, -0.5]]
    mask = [[1, 1], [0, 1]]
    result = mismatch(trainer, engine, mask)
    assert result.tokens == 3
    for convert in (np.array, torch.tensor, lambda rows: [np.array(row) for row in rows]):
        assert mismatch(convert(trainer), convert(engine), convert(mask)) == result
    with_gradient = torch.tensor(trainer, dtype=torch.bfloat16, requires_grad=True)
    assert mismatch(with_gradient, engine, torch.tensor(mask, dtype=torch.bool)) == result


def test_rows_may_differ_in_length() -> None:
    assert mismatch([[-1.0], [-2.0, -3.0]], [[-1.0], [-2.0, -3.5]]).tokens == 3


def test_k3_equals_the_mismatch_of_the_demo() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from rollway.demo.grpo import mismatch_kl

    draw = torch.Generator().manual_seed(0)
    trainer, engine = (-torch.rand(3, 5, generator=draw) for _ in range(2))
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    expected = mismatch_kl(trainer, engine, mask).item()
    assert mismatch(trainer, engine, mask).k3 == pytest.approx(expected, rel=1e-6)


def test_clamped_logprobs_give_finite_figures() -> None:
    """Engines clamp impossible tokens to -9999."""
    result = mismatch([-0.1, -0.2], [-9999.0, -0.2])
    assert all(value is None or math.isfinite(value) for value in result.as_json().values())
    assert result.max_abs == pytest.approx(9998.9)
    assert result.k3 > 1e20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1.0], [-1.0, -2.0]), "1 log-probs of the trainer and 2 engine's log-probs"),
        (([-1.0], [-1.0], [1, 0]), "2 values of the mask"),
        (([], []), "no token to compare"),
        (([-1.0], [-1.0], [0]), "mask leaves no token"),
        ((["x"], [-1.0]), "not numbers"),
        (([None], [-1.0]), "not finite|not numbers"),
        ((object(), [-1.0]), "not numbers"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises((UsageError, RolloutError), match=message):
        mismatch(*arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logprobs_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(RolloutError, match=r"1 of 2 log-probs of the trainer .* at token 2"):
        mismatch([-1.0, 0.0, bad], [-1.0, 0.0, -1.0], [1, 0, 1])
    with pytest.raises(RolloutError, match="engine"):
        mismatch([-1.0], [bad])


@given(PAIRS)
def test_equal_bits_are_counted_in_float32(pairs: list[tuple[float, float]]) -> None:
    result = compute_figures(pairs)
    same = [np.float32(trainer) == np.float32(engine) for trainer, engine in pairs]
    assert result.equal == pytest.approx(sum(same) / len(pairs))
    # Wires print a float32 with as many digits as identify it, or with those of a float64.
    assert mismatch([-0.1], [float(np.float32(-0.1))]).equal == 1
    assert mismatch([-0.1], [float(np.nextafter(np.float32(-0.1), np.float32(0)))]).equal == 0


@given(st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB), min_size=1, max_size=40))
def test_the_parts_of_a_mismatch_add_up(triples: list[tuple[float, float, float]]) -> None:
    trainer, sampled, rescored = zip(*triples, strict=True)
    split = split_mismatch(list(trainer), list(sampled), list(rescored))
    assert split.total == mismatch(list(trainer), list(sampled))
    assert split.total.k1 == pytest.approx(split.engine.k1 + split.trainer.k1, abs=1e-9)
    assert split.total.max_abs <= (split.engine.max_abs + split.trainer.max_abs) * (1 + 1e-9)
    # A cause other than rounding is a part above the limit, the engine's first.
    limits = {"stale tokens": split.engine.k3, "another policy": split.trainer.k3}
    if split.cause == "rounding":
        assert max(limits.values()) <= 0.05
    else:
        assert limits[split.cause] > 0.05


def test_causes_are_told_apart_by_the_second_scoring() -> None:
    generator = np.random.default_rng(0)
    policy = -generator.exponential(2.0, 500)
    other = policy + generator.normal(0, 1.0, 500)

    def round_off(values: Any) -> Any:
        return values + generator.normal(0, 0.02, 500)

    def tell(trainer: Any, sampled: Any, rescored: Any) -> str:
        return split_mismatch(round_off(trainer), sampled, round_off(rescored)).cause

    assert tell(policy, policy, policy) == "rounding"
    assert tell(policy, other, policy) == "stale tokens"
    assert tell(other, policy, policy) == "another policy"
    # Rounding of bfloat16 would be a bug in float32.
    split = split_mismatch(round_off(policy), policy, policy, largest_rounding=1e-6)
    assert split.cause == "another policy"


def test_an_engine_of_equal_bits_shows_a_step_that_rounding_hides() -> None:
    generator = np.random.default_rng(0)
    policy = -generator.exponential(2.0, 500)
    trainer = policy + generator.normal(0, 0.02, 500)  # rounding of bfloat16
    stepped = policy + generator.normal(0, 0.02, 500)  # weights of one small step later
    assert split_mismatch(trainer, policy, stepped).cause == "rounding"
    assert split_mismatch(trainer, policy, stepped, largest_noise=1e-9).cause == "stale tokens"
    assert split_mismatch(trainer, policy, policy, largest_noise=1e-9).cause == "rounding"


def test_masked_tokens_are_in_no_part() -> None:
    split = split_mismatch([-1.0, math.nan], [-1.0, 5.0], [-1.0, 7.0], [1, 0])
    assert split.total.tokens == split.engine.tokens == split.trainer.tokens == 1
    assert split.cause == "rounding" and split.total.equal == 1
