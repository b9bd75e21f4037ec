"""`Generation`: NeMo-RL's GenerationInterface over a Dynamo stack.

    driver      Generation(cluster, config) ── opens the stack, owns it, refits it
                    │ pickled (address only)
    actors      Generation ── connects at the first call; generates and flushes caches, nothing else

NeMo-RL's classes are not its bases: the object is restored in environments where importing NeMo-RL
takes a minute or fails. Batches have the class of those that come in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollway.errors import UsageError
from rollway.integrations.nemo_rl.batches import make_output, make_sampling, read_prompts
from rollway.integrations.nemo_rl.config import parse_generation, returns_experts
from rollway.integrations.nemo_rl.connection import Address, Connection
from rollway.rollout.trajectory import Rollout
from rollway.weights.checkpoint import read_config

if TYPE_CHECKING:
    from rollway.integrations.nemo_rl.gym import GymServer
    from rollway.integrations.nemo_rl.metrics import Sampler


class Generation:
    """Generates for NeMo-RL's trainers on a Dynamo stack.

    Attributes:
        cfg: `policy.generation`, as a plain dictionary.
        dp_openai_server_base_urls: the addresses that NeMo-Gym sends its requests to.
        weight_synchronizer: what NeMo-RL calls to refit; `Synchronizer`.
    """

    def __init__(
        self,
        cluster: Any,
        config: Mapping[str, Any],
        tokenizer: Any | None = None,
        tokenizer_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the stack. `cluster` is not used: the engines are not NeMo-RL's."""
        parsed = parse_generation(config)
        self.cfg: dict[str, Any] = parsed.model_dump()
        self.dynamo_cfg = parsed.dynamo_cfg
        self._lock = threading.Lock()
        self.weight_synchronizer: Any = None
        self.dp_openai_server_base_urls: list[str | None] = []
        self._gym: GymServer | None = None
        self._sampler: Sampler | None = None
        self._is_owner = True
        self._experts: int | None = None
        self._connection: Connection | None = Connection.open(parsed)
        try:
            self._address: Address = self._connection.find_address()
            if self.cfg["vllm_cfg"].get("expose_http_server"):
                from rollway.integrations.nemo_rl.gym import GymServer

                self._gym = GymServer(self._address, self.cfg, tokenizer_config or {})
                self.dp_openai_server_base_urls = [self._gym.url]
            if self.cfg["vllm_cfg"].get("enable_vllm_metrics_logger"):
                from rollway.integrations.nemo_rl.metrics import Sampler

                self._sampler = Sampler(self._connection, self.cfg)
        except BaseException:
            self.shutdown()
            raise

    @property
    def frontend_url(self) -> str:
        """The frontend's OpenAI address."""
        return f"{self._address.frontend_url}/v1"

    @property
    def is_copy(self) -> bool:
        """Whether it was pickled into this process, and so owns and refits nothing."""
        return not self._is_owner

    @property
    def connection(self) -> Connection:
        """The stack; a copy connects at its first call."""
        with self._lock:
            if self._connection is None:
                if self._is_owner:
                    raise UsageError("This Generation was shut down.", "Create another one.")
                self._connection = Connection.reach(self._address, self.dynamo_cfg)
            return self._connection

    # --- rollouts ------------------------------------------------------------------------------

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Sample one rollout for each prompt of a batch, and return them in the batch's order."""
        if len(data["input_ids"]) == 0:
            return type(data)({})
        prompts = read_prompts(data)

        async def sample_all() -> list[Rollout]:
            return await asyncio.gather(*(self._sample(prompt, greedy) for prompt in prompts))

        rollouts = self.connection.run(sample_all())
        return self._pack(data, rollouts)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Yield pairs of index and output, in the order in which rollouts finish."""
        if len(data["input_ids"]) == 0:
            return
        connection = await asyncio.to_thread(lambda: self.connection)

        async def sample(index: int, prompt: Any) -> tuple[int, Rollout]:
            return index, await connection.wait(self._sample(prompt, greedy))

        tasks = [asyncio.create_task(sample(*each)) for each in enumerate(read_prompts(data))]
        try:
            for task in asyncio.as_completed(tasks):
                index, rollout = await task
                yield index, self._pack(data, [rollout])
        finally:
            # A caller that stops early, or a failure: the requests end on the workers as well.
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, prompt: Any, greedy: bool) -> Rollout:
        assert self._connection is not None
        limit = self.cfg["vllm_cfg"].get("max_model_len") or self._address.context_length
        length = min(int(limit), self._address.context_length)
        replay = self._count_experts() is not None
        sampling = make_sampling(self.cfg, prompt, length, greedy=greedy, experts=replay)
        (rollout,) = await self._connection.rollouts.generate(prompt.ids, sampling)
        return rollout

    def _pack(self, data: Any, rollouts: list[Rollout]) -> Any:
        output = make_output(
            rollouts, data["input_ids"], int(self.cfg["_pad_token_id"]), self._count_experts()
        )
        return type(data)(output)

    def _count_experts(self) -> int | None:
        """Return the number of experts whose routing is replayed; None without router replay."""
        if not returns_experts(self.cfg):
            return None
        if self._experts is None:
            from rollway.rollout.experts import count_experts  # needs numpy, which the core has not

            model = Path(self.cfg["model_name"])
            self._experts = count_experts(read_config(model / "config.json"))
        return self._experts

    # --- life ----------------------------------------------------------------------------------

    def prepare_for_generation(self, *_: Any, **__: Any) -> bool:
        return True

    def finish_generation(self, *_: Any, **__: Any) -> bool:
        """Do nothing: a refit flushes the caches, and blocks of one version are never read under
        another. The engines keep their GPUs."""
        return True

    def pause_generation(self, *, clear_cache: bool = True) -> bool:
        """Pause every worker after its running requests; new ones wait."""
        connection = self.connection
        connection.run(connection.fleet.pause("wait", clear_cache=clear_cache))
        return True

    def resume_generation(self) -> bool:
        connection = self.connection
        connection.run(connection.fleet.resume())
        return True

    def invalidate_kv_cache(self) -> bool:
        """Clear the prefix cache of every worker."""
        connection = self.connection
        connection.run(connection.fleet.flush_cache())
        return True

    def blocks_training(self) -> bool:
        return False

    def wake_carries_weight_updates(self) -> bool:
        return False

    def shutdown(self) -> bool:
        """Stop what this process started; a second call does nothing."""
        with self._lock:
            parts = [self._sampler, self._gym, self._connection]
            self._sampler = self._gym = self._connection = None
        for part in parts:
            if part is not None:
                part.close()
        return True

    # --- what trainers ask besides -------------------------------------------------------------

    @property
    def requires_kv_scale_sync(self) -> bool:
        """Whether the engines' KV cache is FP8, whose scales the trainer computes."""
        return str(self.cfg["vllm_cfg"].get("kv_cache_dtype") or "").startswith("fp8")

    def get_inference_world_size(self) -> int:
        """Return the number of ranks of all live engines."""
        connection = self.connection
        return connection.run(connection.stack.count_receivers(connection.model))

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any] | None) -> None:
        """Do nothing: a published version describes its tensors itself."""

    def attach_fleet_health(self, monitor: Any, selector: Any) -> None:
        """Do nothing: `Fleet` watches the workers."""

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return the samples of each worker since the last clear: {metric: {worker: [values]}}."""
        return {} if self._sampler is None else self._sampler.read()

    def clear_logger_metrics(self) -> None:
        if self._sampler is not None:
            self._sampler.clear()

    def note_refit(self, figures: Mapping[str, float]) -> None:
        """Keep the figures of the last refit for the logger."""
        if self._sampler is not None:
            self._sampler.note_refit(figures)

    def update_weights_via_mx(self, *, version: int, mx_config: Any = None) -> list[Any]:
        """Refit, under the name that NeMo-RL's ModelExpress work calls. Return nothing to wait for.

        `version` is NeMo-RL's, which gives one number to two sets of weights; `Synchronizer` counts
        its own. `mx_config` is in `cluster.weight_sync`."""
        if self.weight_synchronizer is None:
            raise UsageError(
                "This Generation refits nothing: it is a copy, or NeMo-RL has created no "
                "synchronizer for it.",
                "Refit in the driver, with the Generation that `setup` returned.",
            )
        self.weight_synchronizer.sync_weights()
        return []

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[Any]:
        raise self._refuse("init_collective")

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        raise self._refuse("update_weights_via_ipc_zmq")

    def update_weights_from_collective(self, refit_timeout_s: float | None = None) -> list[Any]:
        raise self._refuse("update_weights_from_collective")

    def get_collective_sender_spec(self) -> Any:
        raise self._refuse("get_collective_sender_spec")

    def prepare_nccl_reshard_refit_info(self, refit_info: Any) -> None:
        raise self._refuse("prepare_nccl_reshard_refit_info")

    def nccl_reshard_refit(self) -> list[Any]:
        raise self._refuse("nccl_reshard_refit")

    def _refuse(self, method: str) -> UsageError:
        return UsageError(
            f"{method} is of NeMo-RL's own NCCL group, which Rollway's stacks do not use.",
            "Refit through `weight_synchronizer.sync_weights()`; cluster.weight_sync.method names "
            "the transport.",
        )

    # --- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: addresses, and nothing that this process owns."""
        return {
            "cfg": self.cfg,
            "urls": self.dp_openai_server_base_urls,
            "address": self._address,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cfg = state["cfg"]
        self.dynamo_cfg = parse_generation(self.cfg).dynamo_cfg
        self.dp_openai_server_base_urls = state["urls"]
        self._address = state["address"]
        self._lock = threading.Lock()
        self.weight_synchronizer = None
        self._gym = self._sampler = self._connection = None
        self._is_owner = False
        self._experts = None
