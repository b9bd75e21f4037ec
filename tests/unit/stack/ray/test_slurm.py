"""The Slurm scripts of stacks and of ReTool. There is no Slurm here: its commands, `hostname`, Ray,
Rollway and the trainer's Python are stand-ins that note how they are called; the shell is real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[4] / "examples"
SCRIPTS = {
    "stack": EXAMPLES / "ray" / "stack.slurm",
    "retool": EXAMPLES / "retool" / "retool.slurm",
}
STAND_INS = {
    "scontrol": "echo node-a; echo node-b",
    # The name of a machine stands for its loopback on many images.
    "hostname": '[[ $* == -I ]] && echo "10.0.0.1 172.17.0.1" || echo 127.0.0.1',
    "sleep": "true",
    # Options first, each with a value, then the command.
    "srun": """
        while [[ $1 == -* ]]; do
            case $1 in *=*|--overlap) shift;; *) shift 2;; esac
        done
        exec "$@"
    """,
    "ray": """
        echo "ray $* ${RAY_AUTH_MODE:-}" >> $CALLS
        if [[ $1 == health-check && -n ${NO_HEAD:-} ]]; then echo "no GCS" >&2; exit 1; fi
    """,
    "rollway": """
        echo "rollway $*" >> $CALLS
        if [[ $1 != up ]]; then exit 0; fi
        (( $(grep -c dry-run $CALLS) >= FITS )) || { echo "no room" >&2; exit 2; }
    """,
    # How many nodes are alive, and the training.
    "python": """
        echo "python $1 ${RAY_AUTH_MODE:-}" >> $CALLS
        if [[ $1 != -c ]]; then exit 0; fi
        [[ ! -f ~/.ray/auth_token || ${RAY_AUTH_MODE:-} == token ]] && [[ -z ${NO_HEAD:-} ]] || {
            echo "InvalidAuthToken" >&2; exit 1; }
        echo 2
    """,
}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    (tmp_path / "activate").touch()
    return tmp_path / "calls"


def run(
    calls: Path, fits: int = 1, script: str = "stack", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script; the stack fits from so many dry runs on."""
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "1"}
    retool = {"MODEL": "m", "ENVIRONMENT": f"{calls.parent}/activate", "START_SECONDS": "0"}
    names = {"CALLS": str(calls), "FITS": str(fits), **slurm, **retool, **variables}
    path = f"{calls.parent}/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPTS[script]), *(["stack.yaml"] if script == "stack" else [])],
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cluster_that_does_not_start_ends_the_job_with_the_reason(
    calls: Path, script: str
) -> None:
    result = run(calls, script=script, NO_HEAD="1")
    assert result.returncode == 1
    assert {"stack": "no GCS", "retool": "InvalidAuthToken"}[script] in result.stderr
    assert "rollway" not in calls.read_text() and "python -m" not in calls.read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_processes_send_the_token_of_the_home(calls: Path, script: str) -> None:
    (calls.parent / ".ray").mkdir()
    (calls.parent / ".ray" / "auth_token").write_text("0")
    result = run(calls, script=script)
    assert result.returncode == 0, result.stderr
    lines = calls.read_text().splitlines()
    starts = [line for line in lines if line.startswith("ray start")]
    assert len(starts) == 2 and all(line.endswith(" token") for line in starts)
    assert script == "stack" or lines[-1] == "python -m token"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_asks_for_gpus_and_its_script_is_clean(script: str) -> None:
    assert "\n#SBATCH --gpus-per-node=8\n" in SCRIPTS[script].read_text()
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is not None:
        excluded = "--exclude=SC2206,SC2207"  # an array of words
        subprocess.run([program, excluded, str(SCRIPTS[script])], check=True)
