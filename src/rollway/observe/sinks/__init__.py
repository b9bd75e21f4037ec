"""Give a run's metrics to other tools while it is recorded.

    run directory ──follow──► Feed, a thread ──► Series ──► TensorBoard, wandb, Prometheus

A feed only reads the record, so a slow or broken tool slows nothing but itself. A sink that fails
is named once, in the log and as an event, and the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollway.observe.metrics import find_metric
from rollway.observe.read import Run
from rollway.observe.record import Entry, Recorder
from rollway.observe.series import Series, Values
from rollway.observe.sinks.trainer_names import Histogram, TrainerNames

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Sink(Protocol):
    """Takes the values of a run's metrics."""

    name: str

    def update(self, values: Values) -> None:
        """Take the present values; called at most every `POLL_SECONDS`."""
        ...

    def end_step(self, step: int, values: Values, lengths: Mapping[str, Histogram]) -> None:
        """Take the values at the end of a step of the trainer, and histograms of lengths."""
        ...

    def close(self) -> None: ...


class Feed:
    """Feeds sinks from a run directory until it is closed.

    Example:
        with Feed(directory, [TensorBoard(Path("tensorboard"))]):
            train()
    """

    def __init__(
        self,
        directory: Path,
        sinks: Sequence[Sink],
        recorder: Recorder | None = None,
        *,
        trainer_names: bool = False,
    ) -> None:
        """`recorder` gets an event when a sink fails; `trainer_names` adds the names that users
        of trainers know, `generation_metrics/…`."""
        self._follower = Run(directory).follower()
        self._sinks = list(sinks)
        self._recorder = recorder
        self._series = Series()
        self._names = TrainerNames() if trainer_names else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollway-sinks", daemon=True)
        self._thread.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, seconds: float = 30.0) -> None:
        """Feed what is recorded until now, and close the sinks."""
        self._stop.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(POLL_SECONDS)
            while entries := self._follower.poll():
                self._take(entries)
        self._tell(lambda sink: sink.close())

    def _take(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._series.add(entry)
            if self._names is not None:
                self._names.add(entry)
            if entry["kind"] == "trainer":
                self._end_step(entry["step"])
        self._tell(lambda sink: sink.update(self._series.values))

    def _end_step(self, step: int) -> None:
        values, lengths = self._names.take() if self._names is not None else ({}, {})
        values = {**self._series.values, **values}
        self._tell(lambda sink: sink.end_step(step, values, lengths))

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - of a tool that is not ours
                self._sinks.remove(sink)
                detail = f"{sink.name} gets no more metrics: {type(error).__name__}: {error}"
                log.warning("%s", detail)
                if self._recorder is not None:
                    self._recorder.event("sink failed", detail)


def list_tags(values: Values) -> dict[str, float]:
    """Return values by one name each: `NAME`, or `NAME/LABELS`. Of a metric by version the newest
    is given, as `NAME`: its history is a line, and not a name for every version."""
    tags = {}
    for name, keys in values.items():
        metric = find_metric(name)
        if metric is not None and metric.labels == ("version",):
            versions = [key for key in keys if key.removeprefix("version=").isdigit()]
            if versions:
                tags[name] = keys[max(versions, key=lambda key: int(key.removeprefix("version=")))]
        else:
            tags |= {f"{name}/{key}" if key else name: value for key, value in keys.items()}
    return tags
