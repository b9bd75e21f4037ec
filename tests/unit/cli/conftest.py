from __future__ import annotations

import pytest

from rollway.stack.ray import cluster


@pytest.fixture(autouse=True)
def no_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands from clusters of this user that this machine happens to run."""
    monkeypatch.setattr(cluster, "list_own_clusters", list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
