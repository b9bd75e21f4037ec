"""Compare the trainer's log-probs with the engine's, for tokens that the engine sampled.

With equal weights on both sides the figures show rounding errors and bugs. If the engine serves
older weights they also show the lag. `d = trainer - engine` for each token, in float64 throughout.

`split_mismatch` tells the causes apart by a second scoring of the same tokens (`Teacher.score`):

    trainer - sampled  =  (trainer - re-scored)   +   (re-scored - sampled)
    total                 two implementations         the engine against itself
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollway.errors import RolloutError, UsageError

Values: TypeAlias = Any
"""Numbers: a list, nested lists (also of different lengths), a numpy array or a tensor."""

_Floats: TypeAlias = npt.NDArray[np.float64]

# exp of more would overflow when squared; a token this far off is broken, and 1e21 shows it.
_LARGEST_RATIO = 50.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The figures of a set of tokens. A correlation is None if one side is constant."""

    tokens: int
    k1: float
    """Mean of -d: estimates KL(engine || trainer), and may be negative."""
    k3: float
    """Mean of exp(d) - d - 1: estimates the same, never negative. The usual "mismatch KL"."""
    k3_std: float
    k3_max: float
    max_abs: float
    """Largest |d|."""
    equal: float
    """Share of the tokens whose log-probs have equal bits in float32, the precision of engines."""
    p50: float
    """Percentiles of |d|."""
    p90: float
    p99: float
    ratio_mean: float
    """The mean importance ratio exp(d)."""
    ratio_min: float
    ratio_max: float
    prob_diff_mean: float
    """Mean difference of the probabilities, exp(log-prob)."""
    logprob_corr: float | None
    """Pearson correlation of the log-probs."""
    prob_corr: float | None
    """Pearson correlation of the probabilities."""
    ess: float
    """Effective sample size of the ratios, as a share of the tokens: 1 if all are equal."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def mismatch(
    trainer_logprobs: Values,
    engine_logprobs: Values,
    mask: Values | None = None,
) -> Mismatch:
    """Compare log-probs token by token. Tokens whose `mask` is 0 (prompt, padding, tool output) are
    skipped; a mask for each weight version gives the figures of each."""
    trainer = _flat(trainer_logprobs, "the trainer's log-probs")
    engine = _flat(engine_logprobs, "the engine's log-probs")
    _check_length(len(engine), len(trainer), "engine's log-probs")
    selected = np.ones(len(trainer), dtype=bool)
    if mask is not None:
        weights = _flat(mask, "the mask")
        _check_length(len(weights), len(trainer), "values of the mask")
        selected = weights != 0
    if not selected.any():
        raise UsageError(
            "There is no token to compare." if mask is None else "The mask leaves no token.",
            "Leave out batches in which nothing was sampled.",
        )
    trainer, engine = trainer[selected], engine[selected]
    _check_finite(trainer, "trainer", selected)
    _check_finite(engine, "engine", selected)
    return _figures(trainer, engine)


Cause = Literal["rounding", "stale tokens", "another policy"]
"""Why trainer and engine disagree. Stale tokens: the engine does not give its own tokens the
log-probs they came with, so that they are of other weights than it serves now. Another policy: the
engine agrees with itself and not with the trainer, which has other weights or another forward."""


class MismatchSplit(NamedTuple):
    """A mismatch, split by a second scoring of the engine."""

    total: Mismatch
    """The trainer against the log-probs that came with the tokens."""
    engine: Mismatch
    """The engine's second scoring against its first: batching and kernels, or other weights."""
    trainer: Mismatch
    """The trainer against the engine's second scoring."""
    cause: Cause


def split_mismatch(
    trainer_logprobs: Values,
    sampled_logprobs: Values,
    rescored_logprobs: Values,
    mask: Values | None = None,
    *,
    largest_rounding: float = 0.05,
    largest_noise: float | None = None,
) -> MismatchSplit:
    """Split a mismatch into the engine's difference from itself and the trainer's from the engine.

    `rescored_logprobs` are the engine's own, of the same tokens, at the version that the trainer
    has. A part whose k3 is above `largest_rounding` is no rounding. The default suits bfloat16 with
    any weights; for float32 use 1e-6. `largest_noise` is the limit of the engine's part alone, far
    lower where an engine scores in equal bits (batch-invariant, or on a CPU): then even a small
    step shows that rounding would hide. `rollway bench exactness` measures what is usual."""
    engine = mismatch(rescored_logprobs, sampled_logprobs, mask)
    trainer = mismatch(trainer_logprobs, rescored_logprobs, mask)
    cause: Cause = "rounding"
    if engine.k3 > (largest_rounding if largest_noise is None else largest_noise):
        cause = "stale tokens"
    elif trainer.k3 > largest_rounding:
        cause = "another policy"
    return MismatchSplit(mismatch(trainer_logprobs, sampled_logprobs, mask), engine, trainer, cause)


def _figures(trainer: _Floats, engine: _Floats) -> Mismatch:
    d = trainer - engine
    limited = np.clip(d, -_LARGEST_RATIO, _LARGEST_RATIO)
    k3, ratio = np.expm1(limited) - limited, np.exp(limited)
    trainer_probs, engine_probs = np.exp(np.minimum(trainer, 0)), np.exp(np.minimum(engine, 0))
    p50, p90, p99 = np.percentile(np.abs(d), [50, 90, 99])
    return Mismatch(
        tokens=len(d),
        k1=float(np.mean(-d)),
        k3=float(np.mean(k3)),
        k3_std=float(np.std(k3)),
        k3_max=float(np.max(k3)),
        max_abs=float(np.max(np.abs(d))),
        equal=float(np.mean(trainer.astype(np.float32) == engine.astype(np.float32))),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        ratio_mean=float(np.mean(ratio)),
        ratio_min=float(np.min(ratio)),
        ratio_max=float(np.max(ratio)),
        prob_diff_mean=float(np.mean(np.abs(trainer_probs - engine_probs))),
        logprob_corr=_pearson(trainer, engine),
        prob_corr=_pearson(trainer_probs, engine_probs),
        ess=float(np.sum(ratio) ** 2 / np.sum(ratio**2) / len(ratio)),
    )


def _pearson(left: _Floats, right: _Floats) -> float | None:
    left, right = left - left.mean(), right - right.mean()
    # Scale first: squares of small probabilities would underflow.
    tops = float(np.abs(left).max()), float(np.abs(right).max())
    if 0.0 in tops:
        return None
    left, right = left / tops[0], right / tops[1]
    spread = float(np.sqrt(np.dot(left, left) * np.dot(right, right)))
    return float(np.clip(np.dot(left, right) / spread, -1.0, 1.0))


def _flat(values: Values, what: str) -> _Floats:
    """Return one float64 array. Tensors are recognised by `detach`, so torch is not needed."""
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu().double().numpy()
        if isinstance(values, (list, tuple)) and any(hasattr(i, "__len__") for i in values):
            return np.concatenate([_flat(item, what) for item in values])
        return np.asarray(values, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Some of {what} are not numbers: {error}.") from error


def _check_length(actual: int, wanted: int, what: str) -> None:
    if actual != wanted:
        raise UsageError(
            f"There are {wanted} log-probs of the trainer and {actual} {what}.",
            "Pass one for each token, in the same order.",
        )


def _check_finite(values: _Floats, side: str, selected: npt.NDArray[np.bool_]) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise RolloutError(
            f"{len(bad)} of {len(values)} log-probs of the {side} are not finite, first "
            f"{values[bad[0]]} at token {np.flatnonzero(selected)[bad[0]]}.",
            "Mask tokens that were not sampled; a sampled token has a finite log-prob.",
        )
