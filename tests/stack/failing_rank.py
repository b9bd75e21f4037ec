"""An extension of vLLM's worker whose second rank fails in a swap, as long as a file exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollway.engine.worker import WorkerExtension

VARIABLE = "ROLLWAY_TEST_FAILING_RANK"
ARGS = {"worker-extension-cls": "tests.stack.failing_rank.FailingRank"}


class FailingRank(WorkerExtension):
    def rollway_swap(self, identity: str) -> dict[str, Any]:
        # Afterwards: in the swap the ranks wait for each other.
        report = super().rollway_swap(identity)
        if self.rank == 1 and Path(os.environ[VARIABLE]).exists():  # type: ignore[attr-defined]
            raise RuntimeError("the second rank fails")
        return report
