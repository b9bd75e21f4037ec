"""examples/ray/stack.slurm. There is no Slurm here: its commands, Ray's and Rollway's are stand-ins
that note how they are called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "examples" / "ray" / "stack.slurm"
STAND_INS = {
    "scontrol": "echo node-a; echo node-b",
    "hostname": "echo 10.0.0.1",
    "sleep": "true",
    # Options first, each with a value, then the command.
    "srun": 'while [[ $1 == --* ]]; do shift 2; done; exec "$@"',
    "ray": 'echo "ray $* ${RAY_AUTH_MODE:-}" >> $CALLS',
    "rollway": """
        echo "rollway $*" >> $CALLS
        if [[ $1 != up ]]; then exit 0; fi
        (( $(grep -c dry-run $CALLS) >= FITS )) || { echo "no room" >&2; exit 2; }
    """,
}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    return tmp_path / "calls"


def run(calls: Path, fits: int) -> subprocess.CompletedProcess[str]:
    """Run the script; the stack fits from so many dry runs on."""
    names = {"CALLS": str(calls), "FITS": str(fits), "SLURM_JOB_NODELIST": "node-[a-b]"}
    path = f"{calls.parent}/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT), "stack.yaml"],
        env={**names, "PATH": path, "HOME": str(calls.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_stack_starts_when_the_nodes_have_joined(calls: Path) -> None:
    assert run(calls, fits=3).returncode == 0
    lines = calls.read_text().splitlines()
    up = "rollway up stack.yaml --on ray=10.0.0.1:6379"
    assert [line for line in lines if "rollway" in line] == [
        *[f"{up} --dry-run"] * 3, up, "rollway status --on ray=10.0.0.1:6379",
    ]  # fmt: skip
    assert "ray start --head --node-ip-address 10.0.0.1 --port 6379 --block " in lines
    assert "ray start --address 10.0.0.1:6379 --block " in lines


def test_a_stack_that_never_fits_ends_the_job(calls: Path) -> None:
    """A job that waits forever costs all its nodes."""
    result = run(calls, fits=1000)
    assert result.returncode == 2 and result.stderr == "no room\n"


def test_processes_send_the_token_of_the_home(calls: Path) -> None:
    (calls.parent / ".ray").mkdir()
    (calls.parent / ".ray" / "auth_token").write_text("0")
    assert run(calls, fits=1).returncode == 0
    starts = [line for line in calls.read_text().splitlines() if line.startswith("ray start")]
    assert len(starts) == 2 and all(line.endswith(" token") for line in starts)
