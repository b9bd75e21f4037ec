"""Chromium for tests; the driver is the benchmark's."""

from __future__ import annotations

import pytest

from rollway.bench.browser import CHROMIUM, MISSING, Browser, Page, open_browser

__all__ = ["CHROMIUM", "Browser", "Page", "needs_chromium", "open_browser"]

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
