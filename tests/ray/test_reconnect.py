"""A driver that disconnects between start and stop, as pipelines do."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import rollway
from rollway.stack.ray import launcher
from tests.conftest import Footprint
from tests.ray.clusters import list_left, on_ray

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def test_a_detached_stack_survives_disconnects_of_its_driver(
    raylets: Cluster, base_model: Path, footprint: Footprint
) -> None:
    spec = rollway.make_spec(on_ray(base_model, "pipe", 1, lifetime="detached"))
    ray.init(address=raylets.address, namespace="one", log_to_driver=False)
    running = launcher.start(spec)
    ray.shutdown()
    ray.init(address=raylets.address, namespace="two", log_to_driver=False)
    assert running.access.read_state().phase == "ready"
    ray.shutdown()
    running.stop()
    assert not ray.is_initialized()
    ray.init(address=raylets.address, log_to_driver=False)
    assert list_left() == {}
    ray.shutdown()
    assert footprint.settle() == {}
