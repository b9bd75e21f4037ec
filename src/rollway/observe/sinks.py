"""Give a run's metrics to other tools while it is recorded.

    run directory ──follow──► Feed, a thread ──► RunState ──► TensorBoard, wandb, Prometheus

A feed only reads the record, so a slow or broken tool slows nothing but itself. A sink that fails
is named once, in the log and as an event, and the others go on.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollway import private_files
from rollway.errors import UsageError
from rollway.observe.metrics import (
    LENGTHS,
    TRAINER_NAMES,
    TRAINER_PREFIX,
    Values,
    find_metric,
    make_labels_key,
)
from rollway.observe.metrics_endpoint import render_page
from rollway.observe.read import Run
from rollway.observe.record import Entry, Recorder
from rollway.observe.run_state import RunState, Stretch

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
_WRITERS = ("torch.utils.tensorboard", "tensorboardX")

Histogram = dict[int, int]
"""Counts by the number of bits of a length: 7 is 64 to 127."""


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
        run = Run(directory)
        run.check_schema()
        self._follower = run.follower()
        self._sinks = list(sinks)
        self._recorder = recorder
        self._state = RunState()
        self._has_trainer_names = trainer_names
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
            self._state.add(entry)
            if entry["kind"] == "trainer":
                self._end_step(entry["step"])
        self._tell(lambda sink: sink.update(self._state.values))

    def _end_step(self, step: int) -> None:
        values = dict(self._state.values)
        lengths: dict[str, Histogram] = {}
        if self._has_trainer_names:
            more, lengths = make_trainer_values(self._state.take_stretch())
            values |= more
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


# --- the tools -----------------------------------------------------------------------------------


class TensorBoard:
    """Writes a point of every metric at the end of each step of the trainer, into event files below
    a directory, with the writer of torch or of tensorboardX."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        self._writer: Any = _find_writer()(str(directory))

    def update(self, values: Values) -> None:
        """Do nothing: points belong to steps."""

    def end_step(self, step: int, values: Values, lengths: Mapping[str, Histogram]) -> None:
        for tag, value in list_tags(values).items():
            self._writer.add_scalar(tag, value, step)
        for tag, histogram in lengths.items():
            counts, edges = list_edges(histogram)
            middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
            pairs = list(zip(counts, middles, strict=True))
            self._writer.add_histogram_raw(
                tag,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(count * middle for count, middle in pairs),
                sum_squares=sum(count * middle**2 for count, middle in pairs),
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=step,
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _find_writer() -> Any:
    for module in _WRITERS:
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise UsageError("TensorBoard is not installed.", "`pip install tensorboard` or tensorboardX.")


class Wandb:
    """Logs to a run of wandb: one that is open, or a new one. Without a login it is offline.

    wandb shows a summary and an empty history for values that were logged and not committed, so a
    step is logged in one committed call, when it ends."""

    name = "wandb"

    def __init__(self, project: str, directory: Path) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UsageError("wandb is not installed.", "`pip install wandb`.") from None
        self._make_histogram: Any = getattr(wandb, "Histogram", None)
        self._owns_run = getattr(wandb, "run", None) is None
        if not self._owns_run:
            self._run: Any = wandb.run
            return
        mode = None if _has_login() else "offline"
        if mode is not None:
            log.warning("wandb has no login: the run is kept offline in %s", directory)
        self._run = wandb.init(project=project, dir=str(directory), mode=mode)

    def update(self, values: Values) -> None:
        """Do nothing: points belong to steps."""

    def end_step(self, step: int, values: Values, lengths: Mapping[str, Histogram]) -> None:
        histograms = {
            tag: self._make_histogram(np_histogram=list_edges(histogram))
            for tag, histogram in lengths.items()
        }
        self._run.log({**list_tags(values), **histograms, "rollway_step": step}, commit=True)

    def close(self) -> None:
        if self._owns_run:
            self._run.finish()


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return "wandb" in netrc.read_text()
    except (OSError, ValueError):
        return False


class PrometheusFile:
    """Keeps a file with the present value of every metric of ours, whose name ends with `.prom`:
    node_exporter's textfile collector reads it, or any file server has it."""

    name = "Prometheus"

    def __init__(self, path: Path) -> None:
        self._path = path

    def update(self, values: Values) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced as a whole, so that nobody reads half a page.
        private_files.replace_file(self._path, render_page([({}, values)]).encode())

    def end_step(self, step: int, values: Values, lengths: Mapping[str, Histogram]) -> None:
        """Do nothing: Prometheus has its own times."""

    def close(self) -> None:
        """Remove the file: what it says is no longer so."""
        self._path.unlink(missing_ok=True)


def list_tags(values: Values) -> dict[str, float]:
    """Return values by one name each: `NAME`, or `NAME/LABELS`. Of a metric by version the newest
    is given, as `NAME`: its history is a line, and not a name for every version."""
    tags = {}
    for name, keys in values.items():
        metric = find_metric(name)
        if metric is not None and metric.labels == ("version",):
            versions = [key for key in keys if key.removeprefix("version=").isdecimal()]
            if versions:
                tags[name] = keys[max(versions, key=lambda key: int(key.removeprefix("version=")))]
        else:
            tags |= {f"{name}/{key}" if key else name: value for key, value in keys.items()}
    return tags


# --- the names that users of trainers know -------------------------------------------------------


def make_trainer_values(stretch: Stretch) -> tuple[Values, dict[str, Histogram]]:
    """Return `TRAINER_NAMES` as NeMo-RL logs them, and histograms: of a counter the last value, of
    a gauge the mean.

    The names are always there: without a sample an average is NaN, which plots as a gap. Lengths
    are counts by powers of two; no whole rollout is ever logged."""
    values: Values = {}
    for name, source in TRAINER_NAMES.items():
        metric = find_metric(source)
        is_counter = metric is not None and metric.kind == "counter"
        figures = {
            worker: last if is_counter else total / count
            for worker, (total, count, last) in stretch.samples.get(source, {}).items()
        }
        average = sum(figures.values()) / len(figures) if figures else math.nan
        values[f"{TRAINER_PREFIX}average_{name}"] = {"": average}
        values[f"{TRAINER_PREFIX}per_worker_{name}"] = {
            make_labels_key(worker=worker): value for worker, value in figures.items()
        }
    return values, {LENGTHS[name]: dict(counts) for name, counts in stretch.lengths.items()}


def list_edges(histogram: Histogram) -> tuple[list[int], list[int]]:
    """Return the counts of a histogram, and the lengths between which they are: one more."""
    first, last = min(histogram), max(histogram)
    counts = [histogram.get(bits, 0) for bits in range(first, last + 1)]
    return counts, [2**bits >> 1 for bits in range(first, last + 2)]
