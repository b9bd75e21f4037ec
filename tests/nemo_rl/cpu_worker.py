"""A policy worker of NeMo-RL on CPU: its class and Rollway's base, with a model over gloo.

Only `__init__` differs from `rollway.integrations.nemo_rl.workers.DTensorPolicyWorker`: NeMo-RL's
binds itself to a GPU.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.nemo_rl import stand_ins

stand_ins.install()

from rollway.integrations.nemo_rl.workers import make_class  # noqa: E402

_Worker: Any = make_class("DTensorPolicyWorker")


@ray.remote
class CpuWorker(_Worker):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        torch.distributed.init_process_group("gloo")  # NeMo-RL sets RANK and MASTER_ADDR
        self.cfg, self.rank = config, torch.distributed.get_rank()
        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"])
        world = torch.distributed.get_world_size()
        fully_shard(self.model, mesh=torch.distributed.init_device_mesh("cpu", (world,)))

    def find_bases(self) -> list[str]:
        """Return the names of the classes that this worker is made of."""
        return [f"{base.__module__}.{base.__name__}" for base in type(self).__mro__]

    def count_bytes(self) -> int:
        """Return the bytes that this rank holds."""
        return sum(int(p.to_local().nbytes) for p in self.model.parameters())
