"""These tests run in the environment of pipelines (.venv-curator); engines run in `.venv`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).with_name("shim")
GPUS = 4
"""What the clusters of these tests count; there are no such devices."""
ENGINE_PYTHON = Path(os.environ.get("ROLLWAY_TEST_ENGINE_PYTHON", ROOT / ".venv/bin/python"))

if importlib.util.find_spec("nemo_curator") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test-curator` runs them


@pytest.fixture(autouse=True)
def engine_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWAY_ENGINE_PYTHON", str(ENGINE_PYTHON))


@pytest.fixture
def light_env() -> dict[str, str]:
    """`subprocess_env` with which `dynamo.vllm` is a light worker."""
    return {"PYTHONPATH": f"{SHIM}:{ROOT}"}


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    yield
    from rollway.integrations.curator import uninstall

    uninstall()


@contextlib.contextmanager
def run_cluster(home: Path, *, dashboard: bool) -> Iterator[str]:
    """Run a cluster of one node for the block; yield its address, which is $RAY_ADDRESS, too."""
    # As in the drivers of users: Curator's import sets limits of Ray's dashboard, without which
    # the monitor of Xenna fails after some seconds.
    import nemo_curator  # noqa: F401
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 12, "num_gpus": GPUS, "include_dashboard": dashboard}
    with pytest.MonkeyPatch.context() as patch:
        # Two cores: Ray's own timeouts fire before its processes have started.
        patch.setenv("RAY_raylet_start_wait_time_s", "400")
        patch.setenv("RAY_agent_register_timeout_ms", "400000")
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("ROLLWAY_ENGINE_PYTHON", str(ENGINE_PYTHON))
        # Of the actors on the node, which do not see the driver's.
        patch.setenv("ROLLWAY_HOME", str(home))
        nodes = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", nodes.address)
        try:
            yield nodes.address
        finally:
            # A stage worker of Xenna has threads that never end, so it outlives its raylet.
            workers = psutil.Process().children(recursive=True)
            nodes.shutdown()
            for process in psutil.wait_procs(workers, timeout=10)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
