"""A run of `rollway chaos`, and what it must never report."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import Cli

BAD = ("stale_tokens", "wrong_logprobs", "lost_rollouts", "hangs", "orphans")


def chaos(cli: Cli, *arguments: str, timeout: float = 600.0) -> dict[str, Any]:
    done = cli("chaos", *arguments, "--json", "--quiet", timeout=timeout)
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert "rounds" in report, report
    return report
