"""A valid state of a stack, for tests that damage it."""

from __future__ import annotations

import os

from rollway import processes

RUN = "0123456789abcdef"


def make_state(name: str, **fields: object) -> dict[str, object]:
    return {
        "name": name,
        "run_id": RUN,
        "supervisor_pid": 2**22 + 1,
        "supervisor_start": 1,
        "run_dir": f"/tmp/rollway-{os.getuid()}-{RUN[:8]}",
        "log_dir": "/nowhere/logs",
        "uid": os.getuid(),
        "boot": processes.boot_id(),
        **fields,
    }
