from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.ray.clusters import run_cluster, settle


@pytest.fixture(scope="session")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(2, tmp_path_factory.mktemp("ray-home")) as cluster:
        yield cluster


@pytest.fixture
def two_nodes(raylets: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two raylets of this machine, for all tests that kill none. The user has a connection and an
    actor of their own, which must survive everything."""
    monkeypatch.setenv("RAY_ADDRESS", raylets.address)  # for other drivers
    ray.init(address=raylets.address, namespace="users-own", log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Counter:
        def count(self) -> int:
            return 1

    counter = Counter.remote()
    assert ray.get(counter.count.remote()) == 1
    yield raylets
    try:
        assert ray.get_runtime_context().namespace == "users-own"
        assert ray.get(counter.count.remote()) == 1
        assert settle() == {}
    finally:
        ray.shutdown()
