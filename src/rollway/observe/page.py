"""Rollway's own metrics as a page for Prometheus, served by a process that records: in a pod,
nobody runs `rollway observe export`.

    ROLLWAY_METRICS=0.0.0.0:9400     the first process of the pod that uses a stack serves
    ROLLWAY_METRICS_TOKEN=…          what others must send, unless the address is loopback

    GET /metrics ──► what was recorded in this home since the last time ──► the values now

The page has every run of this home that is still recorded, also those of other processes, which
find the port in use. Without the variable nothing is done; between two scrapes neither.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
_MOST_CONNECTIONS = 16
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
_server: ThreadingHTTPServer | None = None
"""Of this process."""


class _Server(ThreadingHTTPServer):
    """Keeps few connections, the newest: each has a thread and a descriptor of the trainer."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._waiting: list[Any] = []
        """Connections without a whole request, the oldest first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, address: Any) -> None:
        self._waiting.append(request)
        if len(self._waiting) > _MOST_CONNECTIONS:
            with suppress(OSError):
                self._waiting.pop(0).shutdown(socket.SHUT_RDWR)  # its thread ends
        super().process_request(request, address)

    def end_waiting(self, request: Any) -> None:
        with suppress(ValueError):
            self._waiting.remove(request)

    def shutdown_request(self, request: Any) -> None:
        self.end_waiting(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, address: Any) -> None:
        log.debug("a client of the metrics left", exc_info=True)


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
                _server = _listen(text, os.environ.get(TOKEN, ""), _page)
            except (OSError, ValueError, OverflowError) as error:  # 99999 is no port
                log.warning("%s=%s: no metrics are served here: %s", ADDRESS, text, error)
                return None
        host, port = _server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"


def stop() -> None:
    """End the page, for tests; a process that ends takes it along."""
    global _server
    with _lock:
        if _server is not None:
            _server.shutdown()
            _server.server_close()
            _server = None


def _listen(text: str, token: str, page: Page) -> ThreadingHTTPServer:
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise ValueError("it has no port, as in 127.0.0.1:9400")
    host = host.strip("[]") or "127.0.0.1"
    if not is_loopback(host) and len(token) < _SHORTEST_TOKEN:
        raise ValueError(f"other hosts may read them: set {TOKEN}, with {_SHORTEST_TOKEN} signs")
    server = _Server((host, int(port)), _make_handler(page, token))
    threading.Thread(target=server.serve_forever, name="rollway-metrics", daemon=True).start()
    return server


def _make_handler(page: Page, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server: _Server
        timeout = 30.0  # a client that sends nothing holds no thread for longer

        def do_GET(self) -> None:
            self.server.end_waiting(self.connection)
            if urlsplit(self.path).path != "/metrics":
                self.send_error(404)
            elif not _is_admitted(self.headers.get("Authorization", ""), token):
                self.send_error(401)
            elif not token and not is_loopback(self.headers.get("Host", "").rpartition(":")[0]):
                self.send_error(403)  # a page of the web that had its name lead here
            else:
                body = page.render().encode()
                self.send_response(200)
                self.send_header("Content-Type", PAGE_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            log.debug(format, *arguments)

    return Handler


def _is_admitted(header: str, token: str) -> bool:
    sent = header.removeprefix("Bearer ").encode()
    return not token or hmac.compare_digest(sent, token.encode())
