"""verl's load balancer with Rollway's names, in verl's own environment; no engine is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.verl.training import environment, verl_python

SCRIPT = """
from types import SimpleNamespace
from rollway.integrations.verl.router import SessionRouter

class Server:
    def __init__(self): self.generate = SimpleNamespace(remote=lambda **options: options)

router = SessionRouter({"a:1": Server(), "b:2": Server()}, {})
group = lambda request, prompt: router.acquire_server(request, prompt)[1].remote()["group_id"]
groups = [group(f"one-{n}", [1, 2, 3]) for n in range(40)]
assert len(set(groups[:16])) == 1 and len(set(groups)) == 3, groups  # 16 rollouts are together
assert group("two-0", [1, 2, 4]) not in groups
assert group("one-39", [1, 2, 3, 9, 9]) == groups[39]  # a later turn, whatever its prompt
_, session = router.acquire_server("one-0", [1, 2, 3])
assert session.generate.remote(x=1) == {"x": 1, "trajectory_id": "one-0", "group_id": groups[0]}
"""


def test_rollouts_of_a_prompt_and_turns_of_a_rollout_share_a_group(tmp_path: Path) -> None:
    python = str(verl_python())
    ran = subprocess.run(
        [python, "-c", SCRIPT], capture_output=True, text=True, env=environment(tmp_path)
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
