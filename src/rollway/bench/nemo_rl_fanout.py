"""Measure how often a version leaves the trainer: to receivers in waves, and to all at once.

The receivers are those of the workers (`NixlReader`, real NIXL), without an engine behind them:
128 engines do not fit on a machine. All are in this process, each with an agent of its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from rollway.bench import Say
from rollway.errors import require
from rollway.weights.layout import Slices
from rollway.weights.offer import Offer
from rollway.weights.transports.nixl import NixlPublisher, NixlReader

RECEIVERS = 128
ROUNDS = 3
_TENSORS, _ELEMENTS = 8, 1 << 18  # 8 MiB: two buffers of it for each receiver


def measure_fanout(say: Say, figures: dict[str, Any], receivers: int = RECEIVERS) -> None:
    """Publish versions to receivers that come at once, with and without fan-out."""
    require("nixl_cu12")
    arms: dict[str, list[tuple[float, float]]] = {}
    for arm, fanout in (("at_once", False), ("in_waves", True)):
        say(f"fanout: {receivers} receivers, {arm.replace('_', ' ')}")
        rows = arms[arm] = []
        for row in _publish(receivers, fanout, range(ROUNDS + 1)):
            rows.append(row)
            say(f"fanout: {row[0]:.3g} versions left the trainer, {row[1]:.2f} s")
    rounds = {arm: rows[1:] for arm, rows in arms.items()}  # the first one connects
    versions = {arm: max(row[0] for row in rows) for arm, rows in rounds.items()}
    figures |= {
        "receivers": receivers,
        "version_bytes": _TENSORS * _ELEMENTS * 4,
        "trainer_versions": versions,
        "seconds": {arm: median(row[1] for row in rows) for arm, rows in rounds.items()},
        "ratio": versions["in_waves"],
    }


def _publish(
    receivers: int, fanout: bool, versions: Iterable[int]
) -> Iterator[tuple[float, float]]:
    """Yield how many times each version left the trainer, and the seconds until all had it."""
    secret = secrets.token_hex(16)
    weights = {f"{n}.weight": torch.randn(_ELEMENTS) for n in range(_TENSORS)}
    with ExitStack() as cleanup:
        publisher = cleanup.enter_context(NixlPublisher(secret=secret, fanout=fanout))
        readers = [cleanup.enter_context(NixlReader(secret=secret)) for _ in range(receivers)]
        pool = cleanup.enter_context(ThreadPoolExecutor(receivers))
        for version in versions:
            began = time.perf_counter()
            offer = publisher.publish(version, weights.items())
            list(pool.map(_receive, readers, [offer] * receivers))
            seconds = time.perf_counter() - began
            sent = sum(
                count
                for reader in readers
                for source, count in reader.total.sources.items()
                if source.startswith("trainer")
            )
            yield sent / offer.nbytes, seconds


def _receive(reader: NixlReader, offer: Offer) -> None:
    reader.headers(offer)
    reader.restrict(offer, Slices())
    for _ in reader.tensors(offer):
        pass
