"""A rank of NeMo-RL's policy, an actor of Ray, is killed while it publishes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollway.errors import RollwayError
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.publish import ShardPublishing
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.conftest import Footprint
from tests.light.spec import ROOT, light
from tests.stack.nemo_rl import make_batch, make_config
from tests.stack.policies import Policy
from tests.unit.weights.nixl_pieces import nixl

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

RANKS = 2


class Rank(ShardPublishing):
    """A rank that holds whole tensors, of which each is published by one rank."""

    def __init__(self, rank: int, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.rank, self.dies = rank, False
        self.model = AutoModelForCausalLM.from_pretrained(path)

    def list_shards(self) -> Any:
        from rollway.weights.sources import from_module

        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return from_module(self.model, replica=(self.rank, RANKS))

    def die_at_the_next_version(self) -> None:
        self.dies = True


class Group:
    """NeMo-RL's worker group: every call goes to every actor."""

    def __init__(self, path: Path) -> None:
        source = str(Path(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] or ROOT / "src"))
        variables = {"PYTHONPATH": os.pathsep.join((source, str(ROOT)))}
        actor = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(Rank)
        self.workers = [actor.remote(rank, path) for rank in range(RANKS)]

    def run_all_workers_single_data(self, name: str, **fields: Any) -> list[Any]:
        return [getattr(worker, name).remote(**fields) for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


@nixl
@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_killed_while_it_publishes_is_named_at_once(
    two_nodes: Cluster,
    base_model: Path,
    policies: list[Policy],
    footprint: Footprint,
    victim: int,
) -> None:
    """The other rank waits for minutes until all have announced their shards; nobody waits for
    it."""
    spec = light(base_model, f"rank{victim}")
    generation = Generation(None, make_config(spec["models"][0]["name"], stack=spec))
    group = Group(policies[1].path)
    try:
        policy = SimpleNamespace(worker_group=group)
        sync = WeightSync(method="nixl", shards=True)
        synchronizer = Synchronizer(policy, generation, sync)
        assert synchronizer.sync_weights()["workers"] == 2
        ray.get(group.workers[victim].die_at_the_next_version.remote())
        began = time.monotonic()
        with pytest.raises(RollwayError, match=rf"failed in `publish`: rank {victim} is dead"):
            synchronizer.sync_weights()
        assert time.monotonic() - began < 60.0
        assert synchronizer.is_stale
        # No worker was touched: all serve the version before.
        output = generation.generate(make_batch([1, 2, 3], [4, 5, 6]))
        assert output["weight_versions"].tolist() == [[1, 1], [1, 1]]
        began = time.monotonic()
        synchronizer.shutdown()
        assert time.monotonic() - began < 60.0
    finally:
        group.close()
        generation.shutdown()
    assert footprint.settle(60.0) == {}
