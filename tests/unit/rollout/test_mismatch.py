"""The mismatch of trainer and engine: known figures, properties, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from rollway.errors import RolloutError, UsageError  # noqa: E402
from rollway.rollout.mismatch import Mismatch, mismatch  # noqa: E402

LOGPROB = st.floats(-20.0, 0.0)
PAIRS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=40)


def figures(pairs: list[tuple[float, float]], **options: Any) -> Mismatch:
    trainer, engine = zip(*pairs, strict=True)
    return mismatch(list(trainer), list(engine), **options)


def test_known_figures() -> None:
    half = math.log(0.5)
    found = mismatch([half, 2 * half], [half, half])  # d = 0 and -log 2
    assert found.tokens == 2
    assert found.k1 == pytest.approx(-half / 2)
    assert found.k3 == pytest.approx((0.5 - half - 1) / 2)
    assert found.k3_max == pytest.approx(0.5 - half - 1)
    assert found.max_abs == pytest.approx(-half)
    assert found.p50 == pytest.approx(-half / 2)
    assert (found.ratio_mean, found.ratio_min, found.ratio_max) == pytest.approx((0.75, 0.5, 1.0))
    assert found.prob_diff_mean == pytest.approx(0.125)
    assert found.ess == pytest.approx(1.5**2 / 1.25 / 2)
    assert found.prob_corr is None and found.logprob_corr is None  # the engine's are constant


def test_equal_sides_have_none() -> None:
    found = mismatch([-0.1, -2.0, -0.7], [-0.1, -2.0, -0.7])
    assert (found.k1, found.k3, found.max_abs, found.prob_diff_mean) == (0, 0, 0, 0)
    assert (found.ratio_mean, found.ess) == (1, 1)
    assert found.prob_corr == pytest.approx(1.0)


@given(PAIRS)
def test_figures_keep_their_bounds(pairs: list[tuple[float, float]]) -> None:
    found = figures(pairs)
    assert found.k3 >= 0
    assert 0 <= found.p50 <= found.p90 <= found.p99 <= found.max_abs
    assert found.ratio_min * (1 - 1e-9) <= found.ratio_mean <= found.ratio_max * (1 + 1e-9)
    assert 1 / len(pairs) * (1 - 1e-9) <= found.ess <= 1 + 1e-9
    assert abs(found.k1) <= found.max_abs * (1 + 1e-9)
    for correlation in (found.prob_corr, found.logprob_corr):
        assert correlation is None or -1 <= correlation <= 1


@given(PAIRS, st.randoms())
def test_the_order_of_tokens_does_not_matter(pairs: list[tuple[float, float]], random: Any) -> None:
    shuffled = random.sample(pairs, len(pairs))
    left, right = figures(pairs).as_json(), figures(shuffled).as_json()
    for name, value in left.items():
        if value is not None and right[name] is not None and "corr" not in name:
            assert right[name] == pytest.approx(value, rel=1e-9, abs=1e-12)


@given(PAIRS, st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3.0]), max_size=5))
def test_what_the_mask_hides_is_not_looked_at(
    pairs: list[tuple[float, float]], hidden: list[float]
) -> None:
    mask = [1] * len(pairs) + [0] * len(hidden)
    padded = [*pairs, *((value, value) for value in hidden)]
    assert figures(padded, mask=mask) == figures(pairs)


@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.integers(0, 3)), min_size=1, max_size=30))
def test_each_version_has_figures_of_its_own(triples: list[tuple[float, float, int]]) -> None:
    pairs = [(trainer, engine) for trainer, engine, _ in triples]
    versions = [version for *_, version in triples]
    found = figures(pairs, versions=versions)
    assert set(found.per_version) == set(versions)
    for version, part in found.per_version.items():
        assert part == figures([pair for *pair, of in triples if of == version])  # type: ignore[misc]
    k3 = sum(part.k3 * part.tokens for part in found.per_version.values()) / found.tokens
    assert k3 == pytest.approx(found.k3)


def test_a_stale_part_stands_out() -> None:
    found = mismatch([-1.0, -1.0, -1.5], [-1.0, -1.0, -1.0], versions=[4, 4, 3])
    assert found.per_version[4].k3 == 0
    assert found.per_version[3].k3 > 0.1
    assert json.loads(json.dumps(found.as_json()))["per_version"]["3"]["tokens"] == 1


def test_every_container_is_read() -> None:
    torch = pytest.importorskip("torch")
    trainer, engine = [[-0.5, -1.0], [-2.0, -0.25]], [[-0.25, -1.5], [-2.0, -0.5]]
    mask = [[1, 1], [0, 1]]
    found = mismatch(trainer, engine, mask)
    assert found.tokens == 3
    for make in (np.array, torch.tensor, lambda rows: [np.array(row) for row in rows]):
        assert mismatch(make(trainer), make(engine), make(mask)) == found
    grown = torch.tensor(trainer, dtype=torch.bfloat16, requires_grad=True)
    assert mismatch(grown, engine, torch.tensor(mask, dtype=torch.bool)) == found


def test_rows_may_differ_in_length() -> None:
    assert mismatch([[-1.0], [-2.0, -3.0]], [[-1.0], [-2.0, -3.5]]).tokens == 3


def test_it_agrees_with_the_demo() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from rollway.demo.grpo import mismatch_kl

    draw = torch.Generator().manual_seed(0)
    trainer, engine = (-torch.rand(3, 5, generator=draw) for _ in range(2))
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    expected = mismatch_kl(trainer, engine, mask).item()
    assert mismatch(trainer, engine, mask).k3 == pytest.approx(expected, rel=1e-6)


def test_a_token_at_the_floor_stays_a_number() -> None:
    """Engines clamp impossible tokens to -9999."""
    found = mismatch([-0.1, -0.2], [-9999.0, -0.2])
    assert all(value is None or math.isfinite(value) for value in found.as_json().values())
    assert found.max_abs == pytest.approx(9998.9)
    assert found.k3 > 1e20


def test_frameworks_find_their_names() -> None:
    found = mismatch([-0.5, -1.0], [-0.25, -1.5])
    names = found.names()
    assert names["verl"]["rollout_corr/k3_kl"] == names["prime-rl"]["mismatch_kl/all/mean"]
    assert names["verl"]["rollout_actor_probs_pearson_corr"] == found.prob_corr
    assert names["prime-rl"]["mismatch_kl/all/max"] == found.k3_max


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([-1.0], [-1.0, -2.0]), "1 log-probs of the trainer and 2 engine's log-probs"),
        (([-1.0], [-1.0], [1, 0]), "2 values of the mask"),
        (([-1.0], [-1.0], None, [1, 2]), "2 versions"),
        (([-1.0], [-1.0], None, [0.5]), "whole number"),
        (([-1.0], [-1.0], None, [math.nan]), "whole number"),
        (([], []), "no token to compare"),
        (([-1.0], [-1.0], [0]), "mask leaves no token"),
        ((["x"], [-1.0]), "not numbers"),
        (([None], [-1.0]), "not finite|not numbers"),
        ((object(), [-1.0]), "not numbers"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises((UsageError, RolloutError), match=words):
        mismatch(*arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(RolloutError, match=r"1 of 2 log-probs of the trainer .* at token 2"):
        mismatch([-1.0, 0.0, bad], [-1.0, 0.0, -1.0], [1, 0, 1])
    with pytest.raises(RolloutError, match="engine"):
        mismatch([-1.0], [bad])
