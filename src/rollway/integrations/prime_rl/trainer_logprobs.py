"""`POST /v1/rollway/trainer_logprobs`: how far the trainer is from what was sampled.

    {"step": 3, "samples": [
        {"env": "math", "trainer_logprobs": [-0.1, -2.0], "inference_logprobs": [-0.1, -2.1],
         "mask": [1, 1], "entropy": [0.3, 1.2]},
        {"env": "code", "trainer_logprobs": [-0.5], "request_id": "<of a generate reply>"}]}

Every list has one value for each token. In place of `inference_logprobs`, `request_id` names a
reply of this server, whose log-probs it remembers for a while; then the tokens are the sampled
ones. Bodies with the same `step` add up, as ranks of a trainer send them; another one starts over.
The figures are those that prime-rl logs: exp(d) - d - 1 for each token that `mask` selects, with
d = trainer - inference, as `mismatch_kl/{all,<env>}/{mean,std,max}`.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from rollway.errors import UsageError

REMEMBERED_BYTES = 64 * 2**20
"""The log-probs of replies, 8 bytes each: the last eight million tokens."""
MAX_SAMPLES = 65_536
MAX_VALUES = 2_000_000
MAX_ENVS = 256
_MAX_NAME = 100
_LARGEST_RATIO = 50.0
_ROUNDING = 1e-3  # a log-prob of a certain token may come out slightly above 0


class ScoredSequence(msgspec.Struct, forbid_unknown_fields=True):
    """One sequence, or a part of one."""

    trainer_logprobs: list[float]
    inference_logprobs: list[float] | None = None
    request_id: str | None = None
    mask: list[int | bool] | None = None
    entropy: list[float] | None = None
    env: str = ""


class TrainerLogprobs(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the request."""

    samples: list[ScoredSequence]
    step: int | None = None


class K3(NamedTuple):
    """exp(d) - d - 1 of some tokens: its mean, deviation and maximum."""

    tokens: int
    mean: float
    std: float
    largest: float


@dataclass(frozen=True, slots=True)
class Batch:
    """A body that was checked: the figures of each environment's tokens."""

    step: int | None
    parts: dict[str, K3]
    entropy: float
    entropy_tokens: int


@dataclass(slots=True)
class Moments:
    """Mean, deviation and maximum of values that come in parts."""

    count: int = 0
    mean: float = 0.0
    largest: float = 0.0
    _squares: float = 0.0

    def add(self, part: K3) -> None:
        """Add the k3 of some tokens."""
        total = self.count + part.tokens
        delta = part.mean - self.mean
        # Sums of squares about the mean of each part: plain sums would lose small deviations.
        self._squares += part.std**2 * part.tokens
        self._squares += delta**2 * self.count * part.tokens / total
        self.mean += delta * part.tokens / total
        self.largest, self.count = max(self.largest, part.largest), total

    @property
    def std(self) -> float:
        """The deviation of a sample, as torch computes it."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(slots=True)
class MismatchRecord:
    """The figures of the trainer's last step, and the log-probs that were sampled lately."""

    remembered_bytes: int = REMEMBERED_BYTES
    step: int | None = None
    envs: dict[str, Moments] = field(default_factory=dict)
    """By the name of an environment; `all` has every token."""
    _entropy: float = 0.0
    _entropy_tokens: int = 0
    _replies: OrderedDict[str, array[float]] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def remember(self, reply: dict[str, Any]) -> None:
        """Remember the log-probs of a generate reply; forget the oldest ones."""
        logprobs = reply["choices"][0]["logprobs"]
        if logprobs is None:
            return
        self._forget(self._replies.pop(reply["request_id"], None))
        values = array("d", [entry["logprob"] for entry in logprobs["content"]])
        self._replies[reply["request_id"]] = values
        self._bytes += _count_bytes(values)
        while self._bytes > self.remembered_bytes:
            self._forget(self._replies.popitem(last=False)[1])

    def read(self, raw: bytes | bytearray) -> Batch:
        """Check a body, and compare its log-probs; nothing is changed, so a thread may do it."""
        body = _decode(raw)
        groups: dict[str, list[ScoredSequence]] = {}
        for index, sample in enumerate(body.samples):
            self._check(f"samples[{index}]", sample)
            if len(sample.trainer_logprobs) if sample.mask is None else any(sample.mask):
                groups.setdefault(sample.env, []).append(sample)
        if not groups:
            raise UsageError("No token is selected.", "Leave out batches without sampled tokens.")
        entropies = [_select_entropy(s) for samples in groups.values() for s in samples]
        values = list(itertools.chain.from_iterable(entropies))
        parts = {env: _compare(samples) for env, samples in groups.items()}
        return Batch(body.step, parts, sum(values), len(values))

    def add(self, batch: Batch) -> dict[str, Any]:
        """Add the tokens of a body, and return the figures of its step."""
        is_new = batch.step is None or batch.step != self.step
        known = {} if is_new else self.envs
        if len({*known, *batch.parts}) > MAX_ENVS:
            raise UsageError(f"There are more than {MAX_ENVS} environments.", "Join some of them.")
        if is_new:
            self._entropy, self._entropy_tokens = 0.0, 0
        self.step, self.envs = batch.step, known
        for env, part in batch.parts.items():
            for name in dict.fromkeys(("all", env or "all")):
                self.envs.setdefault(name, Moments()).add(part)
        self._entropy += batch.entropy
        self._entropy_tokens += batch.entropy_tokens
        return self.as_json()

    def as_json(self) -> dict[str, Any]:
        """Return the figures under the names that prime-rl logs."""
        metrics = {
            f"mismatch_kl/{env}/{name}": value
            for env, moments in self.envs.items()
            for name, value in _list_figures(moments)
        }
        if (ratio := self.kl_ent_ratio) is not None:
            metrics["kl_ent_ratio/mean"] = ratio
        tokens = self.envs["all"].count if self.envs else 0
        return {"step": self.step, "tokens": tokens, "metrics": metrics}

    @property
    def kl_ent_ratio(self) -> float | None:
        """Mismatch by entropy; None unless every token came with its entropy."""
        everything = self.envs.get("all")
        if everything is None or self._entropy_tokens != everything.count or self._entropy <= 0:
            return None
        return everything.mean / (self._entropy / self._entropy_tokens)

    def format(self) -> str:
        """Return the figures as Prometheus' text, also under the names of prime-rl's trainer."""
        if not self.envs:
            return ""
        gauges = [("trainer_mismatch_kl", "", self.envs["all"].mean)]
        if (ratio := self.kl_ent_ratio) is not None:
            gauges.append(("trainer_kl_ent_ratio", "", ratio))
        for env, moments in self.envs.items():
            name = env.replace("\\", "\\\\").replace('"', '\\"')
            for stat, value in _list_figures(moments):
                gauges.append(("mismatch_kl", f'{{env="{name}",stat="{stat}"}}', value))
        lines, typed = [], set()
        for name, labels, value in gauges:
            if name not in typed:
                lines.append(f"# TYPE {name} gauge")
                typed.add(name)
            lines.append(f"{name}{labels} {value:.9g}")
        return "\n".join([*lines, ""])

    def _check(self, place: str, sample: ScoredSequence) -> None:
        """Fill in remembered log-probs; raise for a sample that cannot be compared."""
        if (sample.request_id is None) == (sample.inference_logprobs is None):
            raise UsageError(f"{place} needs one of inference_logprobs and request_id.")
        if sample.request_id is not None:
            known = self._replies.get(sample.request_id)
            if known is None:
                raise UsageError(
                    f"{place}.request_id is of no reply that is remembered.",
                    "Send inference_logprobs: only replies with log-probs are, and not for long.",
                )
            sample.inference_logprobs = known.tolist()
        if len(sample.env) > _MAX_NAME or not sample.env.isprintable() or sample.env == "all":
            raise UsageError(
                f"{place}.env must be a name of at most {_MAX_NAME} characters, and not `all`."
            )
        count = len(sample.trainer_logprobs)
        for name in ("inference_logprobs", "mask", "entropy"):
            values = getattr(sample, name)
            if values is not None and len(values) != count:
                raise UsageError(f"{place}.{name} has {len(values)} values for {count} tokens.")
        if sample.mask is not None and not set(sample.mask) <= {0, 1}:
            raise UsageError(f"{place}.mask must have 0 and 1 alone.")
        for name in ("trainer_logprobs", "inference_logprobs"):
            _check_range(f"{place}.{name}", getattr(sample, name), -math.inf, _ROUNDING)
        _check_range(f"{place}.entropy", sample.entropy or [], -_ROUNDING, math.inf)

    def _forget(self, values: array[float] | None) -> None:
        self._bytes -= 0 if values is None else _count_bytes(values)


def _decode(raw: bytes | bytearray) -> TrainerLogprobs:
    if raw.count(b",") > MAX_VALUES:  # before decoding: a number takes 2 bytes there, and 32 here
        raise UsageError(f"The body has more than {MAX_VALUES} values.", "Send several requests.")
    try:
        body = msgspec.json.decode(raw, type=TrainerLogprobs)
    except RecursionError:
        raise UsageError("The body is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise UsageError(f"The body is wrong: {error}.", "docs/prime-rl.md shows it.") from error
    if len(body.samples) > MAX_SAMPLES:
        raise UsageError(f"There are more than {MAX_SAMPLES} samples.", "Send several requests.")
    if body.step is not None and not 0 <= body.step < 2**53:
        raise UsageError("step must be a whole number from 0.")
    return body


def _select_entropy(sample: ScoredSequence) -> list[float]:
    mask = sample.mask or [1] * len(sample.entropy or [])
    return [value for value, is_kept in zip(sample.entropy or [], mask, strict=False) if is_kept]


def _compare(samples: Sequence[ScoredSequence]) -> K3:
    """Compare the tokens that are selected; all values are finite."""
    import numpy as np

    selected = np.concatenate([s.mask or [1] * len(s.trainer_logprobs) for s in samples]) != 0
    trainer = np.concatenate([sample.trainer_logprobs for sample in samples])[selected]
    engine = np.concatenate([sample.inference_logprobs or [] for sample in samples])[selected]
    # exp of more would overflow when squared; a token this far off is broken, and 1e21 shows it.
    d = np.clip(trainer - engine, -_LARGEST_RATIO, _LARGEST_RATIO)
    k3 = np.expm1(d) - d
    return K3(len(d), float(np.mean(k3)), float(np.std(k3)), float(np.max(k3)))


def _check_range(place: str, values: Sequence[float], lowest: float, highest: float) -> None:
    import numpy as np

    numbers = np.asarray(values, dtype=np.float64)
    wrong = ~np.isfinite(numbers) | (numbers < lowest) | (numbers > highest)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise UsageError(f"{place}[{index}] is {values[index]:g}, which it cannot be.")


def _list_figures(moments: Moments) -> list[tuple[str, float]]:
    return [("mean", moments.mean), ("std", moments.std), ("max", moments.largest)]


def _count_bytes(values: array[float]) -> int:
    # An entry without tokens takes memory, too.
    return 200 + values.itemsize * len(values)
