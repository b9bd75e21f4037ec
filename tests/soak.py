"""Long and short forms of one promise: `make test` runs the short one, `make test-all` both."""

from __future__ import annotations

import os

SOAK = os.environ.get("ROLLWAY_TEST_SOAK") == "1"


def examples(count: int) -> int:
    """Return how many examples a fuzzer draws: all of them in a soak, else a fifth."""
    return count if SOAK else max(50, count // 5)
