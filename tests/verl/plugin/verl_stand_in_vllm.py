"""A stand-in for verl's own vLLM rollout, which needs a vLLM that is not in this environment.

It has verl's names and signatures, finds its servers as verl's does, and answers every prompt with
the same tokens. So a run succeeds only if its callers use it as verl does.
"""

from __future__ import annotations

import os

import ray
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


class Server:
    async def generate(
        self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None
    ):
        return TokenOutput(
            token_ids=[5, 6, 7, 8],
            log_probs=[-1.0] * 4,
            stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )

    async def set_global_steps(self, global_steps):
        self.step = global_steps

    async def clear_kv_cache(self): ...
    async def wake_up(self, tags=None): ...
    async def sleep(self): ...


class StandInReplica(RolloutReplica):
    async def launch_servers(self):
        assert self.config.name == "vllm" and len(self.workers) == self.world_size
        name = f"vllm_server_{self.replica_rank}_0{self.name_suffix}"
        server = ray.remote(Server).options(name=name, num_cpus=0).remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"127.0.0.1:{9000 + self.replica_rank}"
        print(f"stand-in for verl's vLLM: replica {self.replica_rank} serves", flush=True)

    async def sleep(self):  # verl's own overrides it too
        print(f"stand-in for verl's vLLM: replica {self.replica_rank} sleeps", flush=True)
        await super().sleep()


class StandInAdapter(base.BaseRollout):
    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        super().__init__(config, model_config, device_mesh)
        self.rank = int(os.environ["RANK"])
        self.replica_rank = self.rank if replica_rank == -1 else replica_rank

    async def resume(self, tags): ...
    async def release(self): ...

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **_):
        count = sum(1 for _ in weights)
        server = ray.get_actor(f"{self.config.name}_server_{self.replica_rank}_0")
        await server.set_global_steps.remote(global_steps)
        print(
            f"stand-in for verl's vLLM: rank {self.rank} had {count} tensors of {global_steps}",
            flush=True,
        )


RolloutReplicaRegistry.register("vllm", lambda: StandInReplica)
base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_stand_in_vllm.StandInAdapter"
