"""A fleet that does what a test tells it to, checkpoints without an engine, and metrics."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollway.errors import Unreachable
from rollway.fleet.report import RefitReport
from rollway.versions import FleetVersions

PAGE = """# HELP vllm:num_requests_running Requests, running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, of {ours}"} 3.0
# HELP vllm:num_preemptions_total Cumulative.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 1.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
# HELP vllm:cache_config_info Information.
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="8192"} 1.0
# HELP dynamo_component_uptime_seconds Not for prime-rl.
# TYPE dynamo_component_uptime_seconds gauge
dynamo_component_uptime_seconds 5
"""


class FakeFleet:
    """Counts refits; `work` decides how each goes."""

    def __init__(self) -> None:
        self.versions = FleetVersions()
        self.versions.current = 0
        self.refits: list[tuple[int, Path, dict[str, Any]]] = []
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.fail: Exception | None = None
        self.identify: Callable[[Path], str] = str

    async def choose_version(self, identity: str) -> int:
        self._identity = identity
        return self.versions.choose_version(identity)

    async def refit(self, version: int, path: Path, **options: Any) -> RefitReport:
        self.refits.append((version, path, options))
        self.began.set()
        await self.go_on.wait()
        if self.fail is not None:
            raise self.fail
        self.versions.claim(version, self._identity)
        self.versions.note_served(version)
        return RefitReport(version, "in-flight")


def write_weights(directory: Path, *names: str, dtype: str = "BF16", value: int = 0) -> Path:
    """Write a checkpoint of small tensors, without a config."""
    directory.mkdir(parents=True, exist_ok=True)
    width = 1 if dtype.startswith("F8") else 2
    header: dict[str, Any] = {}
    for index, name in enumerate(names or ("model.norm.weight",)):
        span = [index * 4 * width, (index + 1) * 4 * width]
        header[name] = {"dtype": dtype, "shape": [4], "data_offsets": span}
    raw = json.dumps(header).encode()
    body = bytes([value]) * (len(header) * 4 * width)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return directory


class FakeHttp:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.silent = ""

    async def get_bounded(self, url: str, *, timeout: float, limit: int) -> bytes:
        self.asked.append(url)
        if self.silent and url.startswith(self.silent):
            raise Unreachable("it hangs")
        return PAGE.encode()
