"""Rollway's own metrics as a page for Prometheus, served by a process that records: in a pod,
nobody runs `rollway observe export`.

    ROLLWAY_METRICS=0.0.0.0:9400     the first process of the pod that uses a stack serves
    ROLLWAY_METRICS_TOKEN=…          what others must send, unless the address is loopback

    GET /metrics ──► what was recorded in this home since the last time ──► the values now

The page has every run of this home that is still recorded, also those of other processes, which
find the port in use. Without the variable nothing is done; between two scrapes neither.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path

from rollway.config import is_loopback
from rollway.observe import steps
from rollway.observe.read import Run
from rollway.observe.runs import is_alive, list_runs, read_headers
from rollway.observe.series import Series
from rollway.observe.sinks.prometheus import PAGE_TYPE, keep_newest_versions, render_runs

log = logging.getLogger(__name__)

ADDRESS, TOKEN = "ROLLWAY_METRICS", "ROLLWAY_METRICS_TOKEN"
PORT_NAME = "rollway"
"""How a pod names the port of this page, for PodMonitors."""
_SHORTEST_TOKEN = 16
_MOST_CONNECTIONS = 64
_lock = threading.Lock()


class Page:
    """The values of all runs below some directories that are still recorded."""

    def __init__(self) -> None:
        self.directories: set[Path] = set()
        self._lock = threading.Lock()
        self._known: dict[Path, _Followed] = {}

    def render(self) -> str:
        """Take what is new, and return the page."""
        with self._lock:
            runs = [run for directory in sorted(self.directories) for run in list_runs(directory)]
            alive = sorted(filter(_is_recorded, runs))
            self._known = {run: self._known.get(run) or _Followed(run) for run in alive}
            return render_runs(
                [
                    ({"stack": followed.take(), "run": run.name}, followed.values)
                    for run, followed in self._known.items()
                ]
            )


class _Followed:
    """One run, and what its entries come to."""

    def __init__(self, directory: Path) -> None:
        self._poll = Run(directory).follower().poll
        self._series = Series()
        self._stack = ""

    def take(self) -> str:
        """Take what is new; return the name of the stack."""
        while entries := self._poll():
            for entry in entries:
                self._series.add(entry)
                if entry["kind"] == "header":
                    self._stack = str(entry.get("stack") or self._stack)
        # A graph is called by its name alone on the pages of its frontend and workers.
        is_graph = self._stack.startswith("dgd://")
        return self._stack.rpartition("/")[2] if is_graph else self._stack

    @property
    def values(self) -> dict[str, dict[str, float]]:
        return keep_newest_versions(self._series.values)


def _is_recorded(run: Path) -> bool:
    """Return whether a process still writes to a run; this one may have left its stack."""
    is_own, this = run in steps.list_directories(), (socket.gethostname(), os.getpid())
    return any(
        is_own if (header.get("host"), header.get("pid")) == this else is_alive(header, run)
        for header in read_headers(run)
    )


# --- the server ----------------------------------------------------------------------------------

_page = Page()
_server: _Server | None = None
"""Of this process."""


def serve_if_asked(runs: Path) -> str | None:
    """Serve the page of the runs below a directory, if the environment names an address and no
    other process of this machine does; return its address. A trainer goes on without it: what is
    wrong is logged."""
    global _server
    text = os.environ.get(ADDRESS, "")
    if not text:
        return None
    with _lock:
        _page.directories.add(runs)
        if _server is None:
            try:
                _server = _Server(text, os.environ.get(TOKEN, ""), _page)
            except (OSError, ValueError, OverflowError) as error:  # 99999 is no port
                log.warning("%s=%s: no metrics are served here: %s", ADDRESS, text, error)
                return None
        return _server.url


def stop() -> None:
    """End the page, for tests; a process that ends takes it along."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
            _server = None


class _Server:
    """Serves a page from one thread, with few descriptors: the rest of both is the trainer's."""

    def __init__(self, text: str, token: str, page: Page) -> None:
        # Most trainers serve no page, and need not load a server.
        from aiohttp import web

        from rollway.gateway.connections import Connections
        from rollway.observe.dash.access import Access, make_app
        from rollway.sync import Portal

        host, _, port = text.rpartition(":")
        if not port.isdecimal():
            raise ValueError("it has no port, as in 127.0.0.1:9400")
        host = host.strip("[]") or "127.0.0.1"
        if not is_loopback(host) and len(token) < _SHORTEST_TOKEN:
            raise ValueError(
                f"other hosts may read them: set {TOKEN}, with {_SHORTEST_TOKEN} signs"
            )

        async def send(_: web.Request) -> web.Response:
            return web.Response(text=page.render(), headers={"Content-Type": PAGE_TYPE})

        connections, app = Connections(_MOST_CONNECTIONS), make_app(Access(token))
        app.middlewares.insert(0, connections.follow)
        app.router.add_get("/metrics", send)
        self._portal = Portal()
        try:
            self._listener = self._portal.run(connections.listen(app, host, int(port)))
        except BaseException:
            self._portal.close()
            raise
        self.url = f"http://{host}:{self._listener.port}/metrics"

    def close(self) -> None:
        self._portal.run(self._listener.close())
        self._portal.close()
