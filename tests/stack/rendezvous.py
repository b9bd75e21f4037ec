"""A worker extension that is not Rollway's: it joins a weight group whose trainer never comes."""

from __future__ import annotations

import time


class Rendezvous:
    def init_broadcaster(self) -> None:
        time.sleep(600.0)
