"""A worker extension that is not Rollway's: it joins a weight group whose trainer never comes."""

from __future__ import annotations

import time

FOREVER_SECONDS = 600.0
"""Longer than any test waits for the trainer."""


class Rendezvous:
    def init_broadcaster(self) -> None:
        time.sleep(FOREVER_SECONDS)
