"""Publishes shards from workers that NeMo-RL's own `Policy` starts on Ray: a script for its
environment. The question on stdin has `model`, a checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.nemo_rl import stand_ins

stand_ins.install()

import ray  # noqa: E402
import torch  # noqa: E402
from nemo_rl.distributed.ray_actor_environment_registry import (  # noqa: E402
    get_actor_python_env,
)
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster  # noqa: E402
from nemo_rl.models.policy.lm_policy import Policy  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from rollway.integrations.nemo_rl import workers  # noqa: E402
from rollway.integrations.nemo_rl.plug import register_worker_class  # noqa: E402
from rollway.integrations.nemo_rl.publish import PublishOptions  # noqa: E402
from rollway.weights.offer import parse_offer  # noqa: E402
from rollway.weights.transports.shm import ShmReader, join_offers  # noqa: E402

WORKER = "tests.nemo_rl.cpu_worker.CpuWorker"
SYSTEM = "nemo_rl.environments.math_environment.MathEnvironment"
"""An actor that NeMo-RL runs by the interpreter of the driver."""


def describe_classes() -> dict[str, Any]:
    """Return, for each kind of policy, the class that is chosen, its environment and its bases."""
    recipes: dict[str, Any] = {
        "dtensor": {"dtensor_cfg": {"enabled": True}},
        "dtensor-v2": {"dtensor_cfg": {"enabled": True, "_v2": True}},
        "megatron": {"megatron_cfg": {"enabled": True}},
    }
    described = {}
    for kind, policy in recipes.items():
        name = workers.extend_policy(Policy, policy).keywords["worker_extension_cls_fqn"]  # type: ignore[attr-defined]
        own = get_actor_python_env(name)
        short = name.rpartition(".")[2]
        theirs = get_actor_python_env(f"{workers.MODULES[short]}.{short}")
        try:
            actor = getattr(workers, short)
            bases = [base.__name__ for base in actor.__ray_metadata__.modified_class.__mro__]
        except ImportError as error:
            bases = [str(error)]
        described[kind] = {"name": name, "same_environment": own == theirs, "bases": bases}
    return described


def share_stand_ins() -> None:
    """Have Ray's processes install the stand-ins before they unpickle NeMo-RL's classes."""
    directory = Path(sys.argv[1]).parent / "site"
    directory.mkdir()
    start = "from tests.nemo_rl import stand_ins\nstand_ins.install()\n"
    (directory / "sitecustomize.py").write_text(start)
    os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{os.environ['PYTHONPATH']}"


def main() -> None:
    question = json.load(sys.stdin)
    share_stand_ins()
    seen: dict[str, Any] = {"classes": describe_classes()}
    ray.init(
        address="local",  # never a cluster that runs here already
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    register_worker_class(WORKER, like=SYSTEM)
    config = {
        "model_name": question["model"],
        "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1, "context_parallel_size": 1},
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": False},
    }
    cluster = RayVirtualCluster(bundle_ct_per_node_list=[2], use_gpus=False)
    policy = Policy(
        cluster,
        config,
        SimpleNamespace(),
        init_reference_model=False,
        worker_extension_cls_fqn=WORKER,
    )
    group = policy.worker_group

    def call(method: str, **kwargs: Any) -> list[Any]:
        """Call all ranks as `Synchronizer` does."""
        return ray.get(
            group.run_all_workers_single_data("rollway_rpc", method=method, kwargs=kwargs)
        )

    seen["bases"] = ray.get(group.run_all_workers_single_data("find_bases"))[0]
    seen["held"] = ray.get(group.run_all_workers_single_data("count_bytes"))
    options = PublishOptions(
        method="shm", stack="s", secret="s" * 32, model=question["model"],
        admin_urls=("http://127.0.0.1:1",),
    )  # fmt: skip
    call("open", options=options.as_plain(), world=len(group.workers))
    assert call("catalog") == ["", ""]
    truth = load_file(Path(question["model"], "model.safetensors"))
    reader = ShmReader()
    seen["versions"] = []
    for version in (1, 2):
        offers = [parse_offer(each) for each in call("publish", version=version)]
        offer = join_offers(offers)
        received = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
        same = received.keys() == truth.keys()
        same = same and all(torch.equal(received[name], truth[name]) for name in truth)
        seen["versions"].append({"is_same": same, "bytes": [each.nbytes for each in offers]})
        call("complete", version=version)
    call("close")
    reader.close()
    group.shutdown()
    cluster.shutdown()
    ray.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
