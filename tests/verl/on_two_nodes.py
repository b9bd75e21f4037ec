"""Run verl's trainer on a Ray cluster of two nodes on this machine.

`on_two_nodes.py TEMP_DIR OVERRIDE…`, with overrides for `verl.trainer.main_ppo`. Each node has one
GPU, which Ray only counts, and enough CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 20, "num_gpus": 1, "object_store_memory": 150 << 20}


def start_two_nodes(temp_dir: str) -> Cluster:
    """Start two raylets on this machine, which are two nodes to Ray."""
    # Ray writes the cluster's address there, whatever the `temp_dir`, and creates no directory.
    Path("/tmp/ray").mkdir(exist_ok=True)
    head = {**NODE, "temp_dir": temp_dir, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    return cluster


def main() -> int:
    cluster = start_two_nodes(sys.argv[1])
    overrides = [*sys.argv[2:], f"+ray_kwargs.ray_init.address={cluster.address}"]
    try:
        return subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
        ).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
