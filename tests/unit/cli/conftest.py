from __future__ import annotations

from pathlib import Path

import pytest

from rollway.stack.ray import connection


@pytest.fixture(autouse=True)
def no_ray_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep commands from stacks of a Ray cluster that this machine happens to run."""
    monkeypatch.setattr(connection, "_CURRENT_CLUSTER", tmp_path / "no-ray-cluster")
    # Ray also looks for processes of a cluster; nothing listens at this port.
    monkeypatch.setattr(connection, "_list_process_addresses", lambda: {"127.0.0.1:1"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
