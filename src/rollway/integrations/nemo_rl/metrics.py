"""The workers' own metrics, sampled for NeMo-RL's logger.

    worker 0 ── GET /metrics, every interval ──┐
    worker 1 ── … ─────────────────────────────┼──► Sampler.read() ─► {metric: {worker: [values]}}
    refits ──── note_refit() ──────────────────┘         clear(), after each refit

NeMo-RL draws each metric by worker and on average. Workers are numbered by first sight; one that
joins is sampled within seconds. Everything runs in the connection's event loop. A worker that does
not answer delays nobody, and no failure reaches the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollway.errors import RollwayError
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.integrations.nemo_rl.connection import Connection
from rollway.observe.metrics import TRAINER_NAMES, find_metric
from rollway.observe.metrics_reader import sum_series
from rollway.observe.sample import read_page

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.5
LISTING_SECONDS = 5.0
"""How often workers that join and leave are looked for. A listing asks every worker."""
PATIENCE_SECONDS = 2.0
"""What a worker's answer may take beyond the interval."""
FIRST_WAIT_SECONDS = 2.0
CURATED = (
    "dynamo_component_gpu_cache_usage",
    "dynamo_component_inflight_requests",
    "dynamo_component_requests_total",
    "dynamo_work_handler_queue_depth",
    "dynamo_work_handler_time_to_first_response",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens",
    "vllm:prompt_tokens_total",
    "vllm:inter_token_latency",
)
"""The series that are logged unless the recipe names others."""
EXCLUDED = ("python_", "process_")
MOST_SAMPLES = 50_000
"""Of one series of one worker; NeMo-RL clears them at every step."""


def _list_sources(name: str) -> tuple[str, ...]:
    """List the series that NeMo-RL's name may come from: Dynamo's own first, then the engine's."""
    metric = find_metric(TRAINER_NAMES[name])
    assert metric is not None
    names = sorted((metric.name, *metric.aliases), key=lambda n: not n.startswith("dynamo_"))
    return tuple(map(_rename, names))


def _rename(series: str) -> str:
    return series.replace(":", "_")


ALIASES = {name: _list_sources(name) for name in TRAINER_NAMES}
"""The names that NeMo-RL's reports assume; the first source that the workers have counts."""

Samples = dict[str, dict[int, list[float]]]
Series = dict[str, dict[int, deque[float]]]


class Sampler:
    """Samples every worker of a connection until it is closed."""

    def __init__(self, connection: Connection, cfg: Mapping[str, Any]) -> None:
        """Start sampling. `cfg` is `policy.generation`."""
        dynamo, vllm = cfg.get("dynamo_cfg") or {}, cfg.get("vllm_cfg") or {}
        self._fleet = connection.fleet
        self._interval = float(vllm.get("vllm_metrics_logger_interval") or INTERVAL_SECONDS)
        include = dynamo.get("metrics_include_prefixes")
        exclude = dynamo.get("metrics_exclude_prefixes")
        # An empty list includes everything: every name begins with the empty text.
        self._include = CURATED if include is None else tuple(include) or ("",)
        self._exclude = EXCLUDED if exclude is None else tuple(exclude)
        self._lock = threading.Lock()  # trainers read from threads of their own
        self._samples: Series = {}
        self._refits: list[dict[str, float]] = []
        self._refits_read = 0
        self._numbers: dict[int, int] = {}
        self._running = connection.portal.start(self._run())

    def read(self) -> Samples:
        """Return the samples since the last clear. NeMo-RL's four names are always there."""
        with self._lock:
            samples = {
                name: {number: list(values) for number, values in workers.items()}
                for name, workers in self._samples.items()
            }
            refits = list(self._refits)
            self._refits_read = len(refits)
        for alias, sources in ALIASES.items():
            source = next((name for name in sources if name in samples), None)
            samples[alias] = {} if source is None else samples.pop(source)
        for figures in refits:
            for name, value in figures.items():
                samples.setdefault(name, {}).setdefault(0, []).append(value)
        return samples

    def clear(self) -> None:
        """Forget the samples. NeMo-RL clears right after a refit, so the figures of a refit are
        forgotten only once they have been read."""
        with self._lock:
            self._samples = {}
            del self._refits[: self._refits_read]
            self._refits_read = 0

    def note_refit(self, figures: Mapping[str, float]) -> None:
        """Keep the figures of a refit, by name; they are read as `refit/NAME`."""
        with self._lock:
            self._refits.append(
                {f"refit/{name.removeprefix('refit/')}": float(v) for name, v in figures.items()}
            )

    def close(self) -> None:
        """Stop sampling; what was sampled can still be read."""
        self._running.cancel()

    # --- in the connection's loop --------------------------------------------------------------

    async def _run(self) -> None:
        """Sample each worker in a task of its own, for as long as it is listed."""
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            async with Http() as http:
                while True:
                    with suppress(RollwayError):  # no listing now: the same workers as before
                        listed = await self._fleet.workers(fresh=False)
                        self._follow(http, tasks, [w for w in listed if w.admin_url])
                    await asyncio.sleep(LISTING_SECONDS)
        except Exception:
            log.exception("the workers' metrics are not sampled any more")
        finally:
            for task in tasks.values():
                task.cancel()

    def _follow(
        self, http: Http, tasks: dict[int, asyncio.Task[None]], workers: Sequence[Worker]
    ) -> None:
        by_id = {worker.instance_id: worker for worker in workers}
        for gone in tasks.keys() - by_id.keys():
            tasks.pop(gone).cancel()
        for instance in [each for each in by_id if each not in tasks]:
            number = self._numbers.setdefault(instance, len(self._numbers))
            url = f"{by_id[instance].admin_url}/metrics"
            tasks[instance] = asyncio.create_task(self._sample(http, url, number))

    async def _sample(self, http: Http, url: str, number: int) -> None:
        await asyncio.sleep(min(FIRST_WAIT_SECONDS, self._interval))
        while True:
            # None while it is starting, busy or dead; the listing tells when it is gone.
            page = await read_page(http, url, self._interval + PATIENCE_SECONDS)
            if page is not None:
                self._add(number, parse_page(page, self._include, self._exclude))
            await asyncio.sleep(self._interval)

    def _add(self, number: int, values: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in values.items():
                workers = self._samples.setdefault(name, {})
                workers.setdefault(number, deque(maxlen=MOST_SAMPLES)).append(value)


def parse_page(page: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> dict[str, float]:
    """Return the series of a Prometheus page under NeMo-RL's names."""
    return {_rename(name): value for name, value in sum_series(page, include, exclude).items()}
