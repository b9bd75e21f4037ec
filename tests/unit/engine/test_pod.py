"""What a pod adds to the command line that it shares with others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollway.engine.pod import complete_arguments, number_replica

ENV = {"DYN_NAMESPACE": "rl-policy", "HOSTNAME": "worker-a", "ROLLWAY_COMPONENT": "m_decode"}


@pytest.mark.parametrize("suffix", ["", "1a2b3c4d"])
def test_the_endpoint_is_in_the_namespace_of_the_pod(suffix: str) -> None:
    env = {**ENV, "DYN_NAMESPACE_WORKER_SUFFIX": suffix}
    namespace = "-".join(filter(None, ("rl-policy", suffix)))
    arguments = complete_arguments(["dynamo.vllm", "--model", "m"], env)
    assert arguments[3:] == ["--endpoint", f"dyn://{namespace}.m_decode.generate"]


def test_a_rank_without_an_endpoint_gets_none() -> None:
    assert "--endpoint" not in complete_arguments(["m", "--headless"], ENV)


def test_pods_have_different_seeds_and_a_restarted_one_the_same() -> None:
    def read_seed(host: str) -> int:
        arguments = complete_arguments(["m"], {"ROLLWAY_SEED": "7", "HOSTNAME": host})
        return int(arguments[arguments.index("--seed") + 1])

    seeds = {read_seed(f"worker-{index}") for index in range(64)}
    assert len(seeds) == 64
    assert min(seeds) >= 7
    assert read_seed("worker-1") == read_seed("worker-1")


def test_ranks_of_a_replica_share_its_seed() -> None:
    ranks = [
        number_replica(
            ["--master-addr", "leader-0", "--node-rank", str(rank)], {"HOSTNAME": f"p{rank}"}
        )
        for rank in range(2)
    ]
    assert ranks[0] == ranks[1] != number_replica(["--master-addr", "leader-1"], {})


def test_the_module_runs_with_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "worker_of_this_test.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [sys.executable, "-m", "rollway.engine.pod", "worker_of_this_test", "--a"]
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3] / 'src'}"}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    expected = "__main__ ['--a', '--endpoint', 'dyn://rl-policy.m_decode.generate']"
    assert result.stdout.strip() == expected, result.stderr
    usage = subprocess.run(command[:3], env=env, capture_output=True, text=True)
    assert usage.returncode == 1
    assert "usage" in usage.stderr
