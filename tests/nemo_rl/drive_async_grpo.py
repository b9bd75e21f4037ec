"""Runs NeMo-RL's own `async_grpo_train` with Rollway plugged in: a script for its environment.

    driver   grpo.setup, async_grpo_train     NeMo-RL's; Rollway's Generation and Synchronizer
    actors   ReplayBuffer, AsyncTrajectoryCollector   NeMo-RL's, in processes of Ray's
             Environment, PolicyWorker        here: a task, and a model on CPU with NeMo-RL's loss
                                              and its mixin for checkpoint engines

NeMo-RL's own policy workers need CUDA. Before it trains, the script runs NeMo-RL's multi-turn
rollouts, and a pickled Generation in an actor, if `rollouts` is true. The question on stdin has it
and `model` (a checkpoint) besides those of `recipe.make_recipe`; what was seen goes to the file of
the first argument.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve()
# Ray's processes import NeMo-RL as well, so they need the stand-ins before anything else.
STARTUP = "from tests.nemo_rl import stand_ins; stand_ins.install()\n"
startup = Path.cwd() / "startup"
startup.mkdir()
(startup / "sitecustomize.py").write_text(STARTUP)
os.environ["PYTHONPATH"] = os.pathsep.join([str(startup), os.environ["PYTHONPATH"]])
# Otherwise Ray writes a token into the user's home.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

from tests.nemo_rl import stand_ins  # noqa: E402

stand_ins.install()

import nemo_rl.algorithms.grpo as grpo  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.distributed.ray_actor_environment_registry import (  # noqa: E402
    ACTOR_ENVIRONMENT_REGISTRY,
)
from nemo_rl.environments.interfaces import EnvironmentReturn  # noqa: E402
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout  # noqa: E402
from nemo_rl.models.policy.workers.checkpoint_engine import (  # noqa: E402
    PolicyCheckpointEngineMixin,
)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from rollway.demo.grpo import GrpoConfig  # noqa: E402
from rollway.demo.task import INSTRUCTION  # noqa: E402
from rollway.integrations.nemo_rl import auto  # noqa: E402, F401
from tests.nemo_rl.recipe import make_recipe  # noqa: E402

DIGITS = 12
PROMPTS, GENERATIONS = 10, 8
WARMUP = 3
SAME = 1e-4
"""Log-probs of the same weights differ by less."""
seen: dict[str, Any] = {}


@ray.remote(num_cpus=0)
class Environment:
    """The counting task; `turns` in the metadata says how many answers are asked for."""

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        rewards, ends, observations = [], [], []
        for log, info in zip(logs, metadata, strict=True):
            answers = [message for message in log if message["role"] == "assistant"]
            text, start = answers[-1]["content"], info["start"]
            right = [text[i : i + 1] == str((start + 1 + i) % 10) for i in range(DIGITS)]
            rewards.append(sum(right) / max(DIGITS, len(text)))
            ends.append(len(answers) >= info["turns"])
            observations.append({"role": "user", "content": f"\nStart:{start}"})
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=[None] * len(logs),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ends),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}

    def shutdown(self) -> None:
        pass


@ray.remote(num_cpus=0)
class PolicyWorker(PolicyCheckpointEngineMixin):
    """One rank with the whole model, in float32."""

    rank = 0

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.before = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=GrpoConfig.lr)
        self.steps = 0

    def _checkpoint_engine_weight_iterator(self, kv_scales: Any = None) -> Any:
        return iter(self.model.named_parameters())

    def compute_logprobs(self, data: Any, of_before: bool = False) -> torch.Tensor:
        """Return the log-probs of all tokens but the first, with a 0 for that one."""
        with torch.no_grad():
            chosen = self._score(self.before if of_before else self.model, data["input_ids"])
        return torch.nn.functional.pad(chosen, (1, 0))

    def _score(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        every = torch.log_softmax(model(ids).logits[:, :-1].float(), dim=-1)
        chosen: torch.Tensor = every.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return chosen

    def measure_mismatch(self, data: Any) -> float:
        """Return the largest difference between the engines' log-probs and those of the weights
        that they served: for each sample the present ones, or those of a step before."""
        per_sample = torch.stack([error.amax(dim=1) for error in self._list_errors(data)])
        return per_sample.amin(dim=0).max().item()

    def measure_tokens(self, data: Any) -> float:
        """Return the same, if each token may be of either."""
        return torch.stack(self._list_errors(data)).amin(dim=0).max().item()

    def count_mixed(self, data: Any) -> int:
        """Return how many samples have tokens of the present weights alone, and of those before
        alone."""
        now, before = (error < SAME for error in self._list_errors(data))
        return int(((now & ~before).any(dim=1) & (before & ~now).any(dim=1)).sum())

    def _list_errors(self, data: Any) -> list[torch.Tensor]:
        """Return the difference at each token, for both versions of the weights."""
        mask = data["token_mask"].bool()
        return [
            (self.compute_logprobs(data, before) - data["generation_logprobs"]).abs() * mask
            for before in (False, True)
        ]

    def train(self, data: Any, loss_fn: Any) -> Any:
        judged = {
            "mismatches": self.measure_mismatch(data),
            "token_mismatches": self.measure_tokens(data),
            "mixed": self.count_mixed(data),
        }
        self.before.load_state_dict(self.model.state_dict())
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = GrpoConfig.lr * min(1.0, self.steps / WARMUP)
        sequences = data["sample_mask"].sum()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        loss, metrics = loss_fn(
            next_token_logprobs=self._score(self.model, data["input_ids"]),
            data=data,
            global_valid_seqs=sequences,
            global_valid_toks=tokens,
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GrpoConfig.max_grad_norm)
        self.optimizer.step()
        totals = {"global_valid_seqs": sequences.item(), "global_valid_toks": tokens.item()}
        return {
            "loss": loss.detach().reshape(1),
            "grad_norm": norm.reshape(1),
            "all_mb_metrics": {key: [value] for key, value in (metrics | totals).items()},
            "judged": judged,
        }


class Policy:
    """The driver's side of the policy, with the calls that `async_grpo_train` makes."""

    model = ""

    def __init__(self, cluster: Any, **_: Any) -> None:
        self.worker = PolicyWorker.remote(Policy.model)
        self.worker_group = SimpleNamespace(
            workers=[self.worker],
            run_all_workers_single_data=lambda name, **fields: [
                getattr(self.worker, name).remote(**fields)
            ],
        )
        self.sharding_annotations = SimpleNamespace(get_axis_size=lambda _: 1)
        self.judged: dict[str, list[float]] = {}

    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        return {"logprobs": ray.get(self.worker.compute_logprobs.remote(data))}

    def get_reference_policy_logprobs(self, data: Any, timer: Any = None) -> Any:
        return {"reference_logprobs": self.get_logprobs(data)["logprobs"]}

    def train(self, data: Any, loss_fn: Any, timer: Any = None) -> Any:
        results = ray.get(self.worker.train.remote(data, loss_fn))
        for name, value in results.pop("judged").items():
            self.judged.setdefault(name, []).append(value)
        return results

    def print_node_ip_and_gpu_id(self) -> None:
        pass

    prepare_for_lp_inference = prepare_for_training = print_node_ip_and_gpu_id


@ray.remote(num_cpus=0)
class Elsewhere:
    """Another process of the cluster, with a copy of the driver's Generation."""

    def try_copy(self, generation: Any, batch: Any) -> dict[str, Any]:
        try:
            return {
                "pid": os.getpid(),
                "ids": generation.generate(batch, True)["output_ids"].tolist(),
                "is_flushed": generation.invalidate_kv_cache(),
                "has_synchronizer": generation.weight_synchronizer is not None,
            }
        finally:
            generation.shutdown()


def make_dataset(tokenizer: Any, size: int, turns: int) -> list[Any]:
    dataset = []
    for number in range(size):
        text = f"{INSTRUCTION}{number % 10}"
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        dataset.append(
            {
                "message_log": [{"role": "user", "content": text, "token_ids": ids}],
                "length": len(ids),
                "extra_env_info": {"start": number % 10, "turns": turns},
                "loss_multiplier": 1.0,
                "idx": number,
                "task_name": "count",
            }
        )
    return dataset


def run_rollouts(
    generation: Any, policy: Policy, tokenizer: Any, environments: Any
) -> dict[str, Any]:
    """Run NeMo-RL's multi-turn rollouts; half of the digits end a turn."""
    from nemo_rl.data.collate_fn import rl_collate_fn

    stops = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(5)]
    kept = {key: generation.cfg[key] for key in ("stop_token_ids", "max_new_tokens")}
    generation.cfg |= {"stop_token_ids": stops, "max_new_tokens": 40}
    try:
        batch, metrics = run_async_multi_turn_rollout(
            generation, rl_collate_fn(make_dataset(tokenizer, 20, 3)), tokenizer, environments, 480
        )
    finally:
        generation.cfg |= kept
    logs = batch["message_log"]
    answers = [message for log in logs for message in log if message["role"] == "assistant"]
    for log in logs:
        for message in log:
            like = torch.zeros(len(message["token_ids"]))
            message["token_mask"] = like + (message["role"] == "assistant")
            message.setdefault("generation_logprobs", like)
    flat, _ = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})
    data = {
        "input_ids": flat["token_ids"],
        "token_mask": flat["token_mask"],
        "generation_logprobs": flat["generation_logprobs"],
    }
    return {
        "turns": [sum(message["role"] == "assistant" for message in log) for log in logs],
        "roles": sorted({tuple(message["role"] for message in log) for log in logs}),
        "answers": len(answers),
        "ends_right": all(
            message["token_ids"][-1].item() in stops or len(message["token_ids"]) == 40
            for message in answers
        ),
        "dtypes": sorted({str(m["generation_logprobs"].dtype) for m in answers}),
        "truncated": batch["truncated"].tolist(),
        "mismatch": ray.get(policy.worker.measure_mismatch.remote(data)),
        "mean_gen_tokens": metrics["mean_gen_tokens_per_sample"],
    }


def main() -> None:
    question = json.load(sys.stdin)
    # Object store and workers of a small machine.
    # A cluster of its own: without an address, Ray joins any that runs on this machine.
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    for name in ("ReplayBuffer", "AsyncTrajectoryCollector"):
        ACTOR_ENVIRONMENT_REGISTRY[f"nemo_rl.algorithms.async_utils.{name}"] = sys.executable
    Policy.model = question["model"]
    tokenizer = AutoTokenizer.from_pretrained(question["model"])
    steps = question["steps"]
    recipe = make_recipe(
        question, tokenizer, max_num_steps=steps, num_prompts_per_step=PROMPTS,
        num_generations_per_prompt=GENERATIONS, max_rollout_turns=1,
    )  # fmt: skip
    dataset = make_dataset(tokenizer, PROMPTS * (steps + 4), 1)
    result = grpo.setup(recipe, tokenizer, dataset, None, policy_factory=Policy)
    policy, generation, _, _, dataloader, _, loss_fn, logger, checkpointer, state, recipe, *_ = (
        result
    )
    synchronizer = generation.weight_synchronizer
    seen["synchronizer"] = f"{type(synchronizer).__module__}.{type(synchronizer).__name__}"
    rewards: list[float] = []
    refits: list[dict[str, float]] = []
    log_metrics, sync_weights = logger.log_metrics, synchronizer.sync_weights

    def note_metrics(metrics: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("prefix") == "train" or "train" in args:
            rewards.append(float(metrics["reward"]))
        log_metrics(metrics, *args, **kwargs)

    def note_refit(**kwargs: Any) -> Any:
        refits.append(sync_weights(**kwargs))
        return refits[-1]

    logger.log_metrics, synchronizer.sync_weights = note_metrics, note_refit
    environments = {"count": Environment.remote()}
    try:
        grpo.refit_policy_generation(policy, generation, False)
        if question["rollouts"]:
            seen["rollouts"] = run_rollouts(generation, policy, tokenizer, environments)
            ids = dataset[0]["message_log"][0]["token_ids"][None]
            batch = BatchedDataDict(
                {"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])}
            )
            seen["own"] = {"pid": os.getpid()}
            seen["own"]["ids"] = generation.generate(batch, True)["output_ids"].tolist()
            seen["copy"] = ray.get(Elsewhere.remote().try_copy.remote(generation, batch))
        grpo.async_grpo_train(
            policy, generation, dataloader, None, tokenizer, loss_fn, environments, None, logger,
            checkpointer, state, recipe,
            max_trajectory_age_steps=recipe.grpo.async_grpo.max_trajectory_age_steps,
        )  # fmt: skip
    finally:
        generation.shutdown()
    seen.update({"rewards": rewards, "refits": refits, **policy.judged})
    Path(sys.argv[1]).write_text(json.dumps(seen))
    ray.shutdown()


if __name__ == "__main__":
    main()
