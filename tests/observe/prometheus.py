"""A real Prometheus and its tool, of Debian's package; nothing is downloaded.

async with open_prometheus(directory) as prometheus:    # reads directory/prometheus.yml
    await prometheus.query("up")
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from rollway.errors import RollwayError
from rollway.http import ONCE, Http
from rollway.stack.locks import Lease
from tests.waiting import wait_until_async

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="there is no Prometheus here (Debian: apt-get install prometheus)",
)


def run_promtool(*arguments: str | Path) -> str:
    """Run promtool, and return what it says; fail if it does."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    def __init__(self, http: Http, url: str) -> None:
        self._http = http
        self._url = url

    async def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urlencode(query)}"
        return (await self._http.get(url, timeout=10.0, retry=ONCE))["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now."""
        series: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return series

    async def list_up(self) -> dict[str, bool]:
        """Return whether each worker, the frontend and Rollway's own page answered last."""
        targets = (await self.get("targets", state="active"))["activeTargets"]
        labels = [(t["labels"], t["health"] == "up") for t in targets]
        return {
            each.get("worker") or each.get("process") or "page": is_up for each, is_up in labels
        }

    async def list_firing(self) -> set[str]:
        alerts = (await self.get("alerts"))["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    async def is_ready(self) -> bool:
        try:
            await self._http.get_text(f"{self._url}/-/ready", timeout=2.0)
        except RollwayError:
            return False
        return True


@asynccontextmanager
async def open_prometheus(directory: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus on the config of a directory, and end it with the block."""
    lease = Lease()
    port = lease.reserve_port(0, "127.0.0.1", "a Prometheus of a test")
    lease.release()
    process = await asyncio.create_subprocess_exec(
        str(PROMETHEUS),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with Http() as http:
            prometheus = Prometheus(http, f"http://127.0.0.1:{port}")
            await wait_until_async(prometheus.is_ready, 60)
            yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
