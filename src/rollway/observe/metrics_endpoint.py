"""Serve Rollway's own metrics to Prometheus: in a process that records, and for the exporter.

    ROLLWAY_METRICS=0.0.0.0:9400     the first process of the pod that uses a stack serves
    ROLLWAY_METRICS_TOKEN=…          what others must send, unless the address is loopback

    GET /metrics ──► what was recorded since the last time ──► the values now

In a pod nobody runs `rollway observe export`. There the page has every run of this home that is
still recorded, also those of other processes, which find the port in use. Without the variable
nothing is done; between two scrapes neither. Families of Dynamo and vLLM are left out: Prometheus
scrapes those itself.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway.callers import admits, check_address, read_token
from rollway.errors import UsageError
from rollway.observe import steps
from rollway.observe.metrics import OWN, Values, parse_labels_key
from rollway.observe.read import Run, is_alive, list_runs, read_headers
from rollway.observe.record import Entry
from rollway.observe.run_state import RunState

log = logging.getLogger(__name__)

ADDRESS, TOKEN = "ROLLWAY_METRICS", "ROLLWAY_METRICS_TOKEN"
PAGE_TYPE = "text/plain; version=0.0.4"
KEPT_VERSIONS = 8
"""How many versions a page has. A run has thousands, and Prometheus keeps every series."""
_MOST_CONNECTIONS = 16


class RunMetrics:
    """The values of one run as its record tells them. One thread at a time may use it."""

    def __init__(self, poll: Callable[[], Sequence[Entry]]) -> None:
        self._poll = poll
        self._state = RunState()

    @property
    def stack(self) -> str:
        """Its stack; of a graph the name that the pages of its frontend and workers have, too."""
        stack = self._state.stack
        return stack.rpartition("/")[2] if stack.startswith("dgd://") else stack

    def take(self) -> Values:
        """Take what is new, and return the present values."""
        while entries := self._poll():
            for entry in entries:
                self._state.add(entry)
        return keep_newest_versions(self._state.values)


class HomeMetrics:
    """The values of all runs below some directories that are still recorded."""

    def __init__(self) -> None:
        self.directories: set[Path] = set()
        self._known: dict[Path, RunMetrics] = {}

    def render(self) -> str:
        """Take what is new, and return the page."""
        runs = [run for directory in sorted(self.directories) for run in list_runs(directory)]
        self._known = {
            run: self._known.get(run) or _open_run(run)
            for run in sorted(filter(_is_recorded, runs))
        }
        pages = [(metrics.take(), metrics.stack, run.name) for run, metrics in self._known.items()]
        return render_page([({"stack": stack, "run": run}, values) for values, stack, run in pages])


def _open_run(directory: Path) -> RunMetrics:
    run = Run(directory)
    try:
        run.check_schema()
    except UsageError as error:
        log.warning("a run is not on the page of metrics: %s", error.message)
    return RunMetrics(run.follower().poll)


def _is_recorded(run: Path) -> bool:
    """Return whether a process still writes to a run; this one may have left its stack."""
    is_own, this = run in steps.list_directories(), (socket.gethostname(), os.getpid())
    return any(
        is_own if (header.get("host"), header.get("pid")) == this else is_alive(header, run)
        for header in read_headers(run)
    )


# --- the page ------------------------------------------------------------------------------------


def render_page(runs: Sequence[tuple[Mapping[str, str], Values]]) -> str:
    """Return the values of several runs as one page, each with labels that tell it from others."""
    lines: list[str] = []
    for metric in OWN:
        samples = [
            _make_sample(metric.name, {**labels, **parse_labels_key(key)}, value)
            for labels, values in runs
            for key, value in values.get(metric.name, {}).items()
        ]
        if samples:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines += samples
    return "\n".join([*lines, ""])


def _make_sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def keep_newest_versions(values: Values) -> Values:
    """Return the values without those of old weight versions."""
    kept: Values = {}
    for name, keys in values.items():
        versions = {key: parse_labels_key(key).get("version", "") for key in keys}
        numbers = sorted({int(text) for text in versions.values() if text.isdecimal()})
        oldest = numbers[-KEPT_VERSIONS:][0] if numbers else 0
        kept[name] = {
            key: value
            for key, value in keys.items()
            if not versions[key].isdecimal() or int(versions[key]) >= oldest
        }
    return kept


# --- the server ----------------------------------------------------------------------------------

_lock = threading.Lock()
_home_metrics = HomeMetrics()
_server: ThreadingHTTPServer | None = None
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
        _home_metrics.directories.add(runs)
        if _server is None:
            try:
                host, _, port = text.rpartition(":")
                if not port.isdecimal():
                    raise ValueError("it has no port, as in 127.0.0.1:9400")
                host, token = host.strip("[]") or "127.0.0.1", read_token(TOKEN)
                _server = listen(host, int(port), token, _home_metrics.render)
            except (OSError, ValueError, OverflowError, UsageError) as error:  # 99999 is no port
                log.warning("%s=%s: no metrics are served here: %s", ADDRESS, text, error)
                return None
        return "http://{!s}:{}/metrics".format(*_server.server_address[:2])


def listen(host: str, port: int, token: str, render: Callable[[], str]) -> ThreadingHTTPServer:
    """Serve a page from a thread, which is rendered by one request at a time.

    Raises:
        UsageError: other hosts could read it without a token.
    """
    check_address(host, bool(token), f"Set {TOKEN}.")
    server = _Server((host, port), _make_handler(render, token))
    threading.Thread(target=server.serve_forever, name="rollway-metrics", daemon=True).start()
    return server


def close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


class _Server(ThreadingHTTPServer):
    """Keeps few connections, the newest: each has a thread and a descriptor of the trainer."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
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


def _make_handler(render: Callable[[], str], token: str) -> type[BaseHTTPRequestHandler]:
    rendering = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        server: _Server
        timeout = 30.0  # a client that sends nothing holds no thread for longer

        def do_GET(self) -> None:
            self.server.end_waiting(self.connection)
            if urlsplit(self.path).path != "/metrics":
                self.send_error(404)
            elif not admits(self.headers, token):
                # Without a token it is a page of the web that had its name lead here.
                self.send_error(401 if token else 403)
            else:
                with rendering:
                    body = render().encode()
                self.send_response(200)
                self.send_header("Content-Type", PAGE_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            log.debug(format, *arguments)

    return Handler
