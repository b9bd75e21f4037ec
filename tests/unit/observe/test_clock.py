"""Offsets between the clocks of nodes: measured from a server's `Date`, and used by readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollway.observe.clock import Clock, follow_clock, measure_offset
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from tests.waiting import wait_until


@contextmanager
def serve_time(ahead: float, *, tells: bool = True) -> Iterator[str]:
    """Serve on a machine whose clock is ahead of this one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.send_response_only(200)
            if tells:
                self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("ahead", [0.0, 3.7, -125.25])
def test_the_offset_of_a_clock_is_measured(ahead: float) -> None:
    with serve_time(ahead) as url:
        assert measure_offset(url) == pytest.approx(ahead, abs=0.5)


def test_a_server_without_a_time_has_no_offset() -> None:
    with serve_time(0.0, tells=False) as url:
        assert measure_offset(url) is None
    assert measure_offset(url) is None  # it is gone
    assert measure_offset("http://no.such.host.invalid:1") is None


def test_this_node_needs_no_offset(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", "driver")
    assert follow_clock(recorder, "http://127.0.0.1:8000") is None
    assert follow_clock(recorder, "http://localhost:8000") is None


def test_a_reader_orders_by_the_clock_of_the_services(tmp_path: Path) -> None:
    """Entries and samples before the measurement keep their time; a second header moves those
    after it."""
    recorder = Recorder(tmp_path / "run", "supervisor")
    began = time.time()
    recorder.event("early", t=began)
    recorder.write("sample", t=began, values={})
    recorder.flush()
    with serve_time(3600.0) as url:
        clock = Clock(recorder, url)
        wait_until(lambda: recorder._offset)
        clock.close()
    recorder.event("late", t=began + 1)
    recorder.write("sample", t=began + 1, values={})
    recorder.close()
    entries = [e for e in Run(tmp_path / "run").read() if e["kind"] in ("event", "sample")]
    offsets = [entry["t"] - began for entry in entries]
    assert [entry["kind"] for entry in entries[:2]] != ["event", "event"]
    assert offsets[:2] == [0.0, 0.0]
    assert offsets[2:] == pytest.approx([3601.0] * 2, abs=0.5)
