"""The file of metrics addresses that Prometheus reads."""

from __future__ import annotations

import json
from pathlib import Path

from rollway.stack.prometheus import list_groups, write_groups
from rollway.stack.state import ProcessState, StackState


def test_the_frontend_and_every_worker_are_targets(tmp_path: Path) -> None:
    worker = ProcessState("worker-0", "worker", "w.log", admin_url="http://127.0.0.1:9001")
    service = ProcessState("etcd", "service", "e.log")
    state = StackState(
        name="verl-hybrid-1",
        run_id="1",
        supervisor_pid=1,
        supervisor_start=1,
        run_dir="",
        log_dir="",
        frontend="http://127.0.0.1:8000",
        processes=[worker, service],
    )
    path = tmp_path / "not-yet" / "hybrid.json"
    write_groups(path, list_groups(state))
    write_groups(path, list_groups(state))
    assert json.loads(path.read_text()) == [
        {
            "targets": ["127.0.0.1:8000"],
            "labels": {"stack": "verl-hybrid-1", "process": "frontend"},
        },
        {
            "targets": ["127.0.0.1:9001"],
            "labels": {"stack": "verl-hybrid-1", "worker": "worker-0"},
        },
    ]
    assert list(path.parent.iterdir()) == [path]
