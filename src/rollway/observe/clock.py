"""Measure how far the clock of this node is from that of the node of a stack's services.

    this node        ●────●────●────●────●        GET, one after the other
    services' node   12:00:07  :07  :07  :08      `Date` of each answer: whole seconds

The second begins between the last answer that names the one before it and the first that names it,
so the offset is known to half the time between the two. This needs nothing but the frontend, which
every process of a stack reaches. A node that has the frontend itself has no offset.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from threading import Event, Thread
from urllib.parse import urlsplit

from rollway.config import is_loopback
from rollway.observe.record import Recorder

log = logging.getLogger(__name__)

AGAIN_SECONDS = 600.0
"""Clocks drift: about 20 ms in this time where nothing corrects them."""
_LONGEST_SECONDS = 2.0
_PAUSE_SECONDS = 0.01
_TIMEOUT_SECONDS = 5.0


def measure_offset(url: str, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds to add to this node's time to get that of a server; None if it does not
    tell its time."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
    deadline = time.monotonic() + _LONGEST_SECONDS + _TIMEOUT_SECONDS
    before: tuple[float, float] | None = None
    try:
        while time.monotonic() < deadline:
            connection.request("HEAD", "/live")
            response = connection.getresponse()
            response.read()
            answered = now()
            told = parsedate_to_datetime(response.headers["Date"] or "").timestamp()
            if before is not None and told > before[1]:
                # It began after the answer before, and before this one.
                return told - (before[0] + answered) / 2
            before = answered, told
            time.sleep(_PAUSE_SECONDS)
    except (OSError, HTTPException, ValueError, TypeError) as error:
        log.debug("%s does not tell its time: %s", url, error)
    finally:
        connection.close()
    return None


class Clock:
    """Keeps the offset in a recorder's headers right, from a thread."""

    def __init__(self, recorder: Recorder, url: str, seconds: float = AGAIN_SECONDS) -> None:
        self._recorder = recorder
        self._url = url
        self._seconds = seconds
        self._stop = Event()
        self._thread = Thread(target=self._run, name="rollway-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while True:
            offset = measure_offset(self._url)
            if offset is not None:
                self._recorder.set_offset(offset)
            if self._stop.wait(self._seconds):
                return


def follow_clock(recorder: Recorder, url: str) -> Clock | None:
    """Measure the offset to the node of a frontend, now and later; None if that is this node."""
    host = urlsplit(url).hostname or ""
    return None if is_loopback(host) or _is_own(host) else Clock(recorder, url)


def _is_own(host: str) -> bool:
    """Return whether an address is one of this node's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True
