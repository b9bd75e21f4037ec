"""The trainer's own part of the record: its steps, and how far its log-probs are from the engine's.

    with rollway.observe.step(number) as step:
        with step.part("generate"):
            groups = rollouts.generate_batch(prompts)
        with step.part("train"):
            train(groups)
        with step.part("publish"):
            stack.refit(number, weights.publish(number, model.named_parameters()))

Parts are `generate`, `train` and `publish`. What a refit paused is taken from `publish` and counted
as `paused`; time in no part is `wait`. Without a recorded stack in this process, nothing is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from rollway.observe import traces
from rollway.observe.record import Recorder
from rollway.observe.tally import RolloutTally

_recorders: WeakKeyDictionary[Recorder, _Source] = WeakKeyDictionary()
"""The recorders of the stacks that this process uses."""
_current: Step | None = None
_paused_seconds = 0.0


class Step:
    """One step of a trainer; `step` makes it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._parts: dict[str, float] = {}
        self._lock = threading.Lock()  # refits end in the thread of an event loop

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block as a part of the step.

        Args:
            name: `generate`, `train`, `publish`, or another name.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to a part."""
        with self._lock:
            self._parts[name] = self._parts.get(name, 0.0) + seconds

    def divide(self, seconds: float) -> dict[str, float]:
        """Return the parts of a step that took this long in all, none counted twice."""
        parts = dict(self._parts)
        others = sum(value for name, value in parts.items() if name not in ("publish", "paused"))
        # A worker that joins is paused while the trainer does something else: that time has a name.
        paused = min(parts.pop("paused", 0.0), max(0.0, seconds - others))
        if "publish" in parts:
            parts["publish"] = max(0.0, parts["publish"] - paused)
        if parts:  # a trainer that names no part is not waiting all the time
            rest = seconds - sum(parts.values()) - paused
            parts["wait"] = parts.get("wait", 0.0) + max(0.0, rest)
        return {**parts, "paused": paused}


@contextmanager
def step(number: int) -> Iterator[Step]:
    """Record a step of the trainer: its time, and the parts that are named inside the block.

    Args:
        number: the number of the step.

    Example:
        with rollway.observe.step(1) as step, step.part("train"):
            train(groups)
    """
    global _current
    before, current = _current, Step(number)
    _current = current
    began = time.monotonic()
    try:
        with _trace(number):
            yield current
    finally:
        _current = before
        seconds = time.monotonic() - began
        parts = current.divide(seconds)
        for recorder in list(_recorders):
            recorder.write("trainer", step=number, seconds=seconds, parts=parts)


@contextmanager
def _trace(number: int) -> Iterator[None]:
    """Make a span of the step, the parent of its rollouts and refits, if traces are on."""
    tracer = traces.open_tracer()
    if tracer is None:
        yield
        return
    span = tracer.begin("rollway.step")
    before = traces.set_parent(span)
    try:
        yield
    except BaseException as error:
        span.error = str(error) or type(error).__name__
        raise
    finally:
        traces.set_parent(before)
        span.finish({"rollway.step": number})


def note_mismatch(
    version: int | None,
    k3: float,
    *,
    k1: float | None = None,
    max: float | None = None,
    tokens: int | None = None,
) -> None:
    """Record how far the trainer's log-probs are from the engine's, for tokens of one version.

    Args:
        version: the weight version that sampled the tokens.
        k3: the mismatch KL.
        k1: the mean of engine minus trainer.
        max: the largest difference.
        tokens: how many tokens were compared.

    Example:
        d = (trainer_logprobs - engine_logprobs).double()
        k3 = float((torch.expm1(d) - d).mean())
        rollway.observe.note_mismatch(3, k3, max=float(d.abs().max()))
    """
    k3 = 0.0 if k3 < 0 else k3  # rounding of float32; it is never negative
    for recorder in list(_recorders):
        recorder.write("mismatch", version=version, k1=k1, k3=k3, max=max, tokens=tokens)


def end_step(number: int, *, publish: float) -> None:
    """Record a step of a trainer of which only the refits are known: integrations call this after
    each. A step lasts from one refit to the next.

    Time in which rollouts were under way counts as `generate`, other time as `train`. A trainer
    that generates and trains at once seems to generate all the time. When the first step began is
    not known, so the first call only begins one; so does a number that is not above the one before:
    a trainer that begins again. In a block of `step` nothing is recorded: the block knows better.

    Args:
        number: the number of the step.
        publish: the seconds that publishing and the refit took.
    """
    if _current is not None:
        return
    now = time.monotonic()
    for recorder, source in list(_recorders.items()):
        marks = source.marks
        source.marks = _Marks(number, now, source.busy_seconds, _paused_seconds)
        if marks is None or number <= marks.number:
            continue
        seconds = now - marks.at
        publish = min(publish, seconds)
        step = Step(number)
        step.add("publish", publish)
        step.add("paused", min(_paused_seconds - marks.paused, publish))
        step.add("generate", min(source.busy_seconds - marks.busy, seconds - publish))
        parts = step.divide(seconds)
        parts["train"] = parts.pop("wait")
        recorder.write("trainer", step=number, seconds=seconds, parts=parts)


@dataclass(frozen=True, slots=True)
class _Marks:
    """What a clock and counters showed at the end of a step."""

    number: int
    at: float
    busy: float
    paused: float


@dataclass(slots=True)
class _Source:
    """What is known of one stack that this process uses."""

    tally: RolloutTally | None = None
    marks: _Marks | None = None

    @property
    def busy_seconds(self) -> float:
        return 0.0 if self.tally is None else self.tally.busy_seconds


def note_paused(seconds: float) -> None:
    """Count what a refit paused in the step that is under way."""
    global _paused_seconds
    _paused_seconds += seconds
    if _current is not None:
        _current.add("paused", seconds)


def register(recorder: Recorder, tally: RolloutTally | None = None) -> None:
    """Have steps recorded for a stack that this process uses; `tally` counts its rollouts."""
    _recorders[recorder] = _Source(tally)


def unregister(recorder: Recorder) -> None:
    _recorders.pop(recorder, None)


def list_directories() -> set[Path]:
    """Return the directories of the records that this process writes."""
    return {recorder.directory for recorder in list(_recorders)}
