"""TensorBoard: one point of every metric at the end of each step of the trainer."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.observe.series import Values
from rollway.observe.sinks import list_tags
from rollway.observe.sinks.trainer_names import Histogram, list_edges

_WRITERS = ("torch.utils.tensorboard", "tensorboardX")


class TensorBoard:
    """Writes event files below a directory, with the writer of torch or of tensorboardX."""

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
            total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
            squares = (count * middle**2 for count, middle in zip(counts, middles, strict=True))
            self._writer.add_histogram_raw(
                tag,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=total,
                sum_squares=sum(squares),
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
