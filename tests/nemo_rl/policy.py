"""A policy of two ranks, as NeMo-RL's driver sees one: `policy.worker_group`.

Each rank is a process with its part of an FSDP2 model (DTensors over gloo). It stands in for
NeMo-RL's policy workers, which need CUDA, and answers the calls that `Synchronizer` makes of them:
`checkpoint_engine_rpc` as NeMo-RL's mixin does, and `rollway_rpc`.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rollway.demo.grpo import (
    GrpoConfig,
    GrpoTrainer,
    RolloutBatch,
    completion_mask,
    compute_clipped_loss,
    mismatch_kl,
    pad_rows,
    token_logprobs,
)
from rollway.integrations.nemo_rl.publish import ShardPublishing


class Scoring(torch.nn.Module):
    """The model, with the log-probs of completions as its forward pass: FSDP2 gathers parameters
    only around a forward pass of what it wraps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model

    def forward(self, prompts: Any, completions: Any) -> Tensor:
        return token_logprobs(self.module, prompts, completions)


class Rank(ShardPublishing):
    """One rank of the policy."""

    def __init__(self, rank: int, world: int, port: int, base: Path, config: GrpoConfig) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        self.rank, self._base, self._config = rank, base, config
        self.checkpoint_engine: Any = None
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._reference: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.reset()

    def reset(self) -> None:
        """Begin again with the base weights."""
        inner = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        self.model = Scoring(inner.eval())
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._config.lr)
        schedule = GrpoTrainer._lr_factor
        factor = lambda step: schedule(SimpleNamespace(config=self._config), step)  # noqa: E731
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)

    def train(self, batch: RolloutBatch) -> float:
        """Take one optimizer step; return the mismatch KL. All ranks get the same batch, so the
        mean of their gradients is its gradient."""
        mask = completion_mask(batch.completion_ids)
        new = self.model(batch.prompt_ids, batch.completion_ids)
        old = pad_rows(batch.engine_logprobs)
        mismatch = mismatch_kl(new.detach(), old, mask).item()
        advantages = torch.tensor(batch.advantages, dtype=torch.float32)
        self._optimizer.zero_grad()
        compute_clipped_loss(new, old, advantages, mask, self._config.clip).backward()
        self._clip_gradients()
        self._optimizer.step()
        self._schedule.step()
        return mismatch

    def _clip_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)

    def keep(self, version: int) -> None:
        """Keep the weights as those of a version, and those of the version before, for `compare`:
        rollouts of an asynchronous loop may be one version old."""
        weights = {name: tensor.clone() for name, tensor in self._gather()}
        newest = sorted(self._kept)[-1:]
        self._kept = {**{before: self._kept[before] for before in newest}, version: weights}

    def compare(self, batch: RolloutBatch, version: int) -> tuple[float, float]:
        """Compare the engines' log-probs with those of a version's weights; return the mismatch KL,
        and the largest difference at one token."""
        self._reference.load_state_dict(self._kept[version])
        with torch.no_grad():
            own = token_logprobs(self._reference, batch.prompt_ids, batch.completion_ids)
        theirs, mask = pad_rows(batch.engine_logprobs), completion_mask(batch.completion_ids)
        difference = ((own - theirs) * mask).abs().max()
        return mismatch_kl(own, theirs, mask).item(), difference.item()

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any]) -> Any:
        """Answer as NeMo-RL's policy workers do."""
        engine = self.checkpoint_engine
        match checkpoint_method:
            case "init_checkpoint_engine":
                module, name = method_kwargs["backend"].split(":")
                engine_class = getattr(importlib.import_module(module), name)
                self.checkpoint_engine = engine_class(
                    bucket_size=method_kwargs["bucket_size_bytes"],
                    **method_kwargs["engine_kwargs"],
                )
                return None
            case "init_checkpoint_engine_process_group":
                return engine.init_policy_process_group(worker_rank=self.rank, **method_kwargs)
            case "send_weights_via_checkpoint_engine":
                return asyncio.run(engine.send_weights(self._gather()))
            case "finalize_checkpoint_engine":
                return engine.finalize()
        return getattr(engine, checkpoint_method)(**method_kwargs)

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                yield name.removeprefix("module."), parameter.full_tensor()


def _run_rank(pipe: Connection, rank_class: type[Rank], *arguments: Any) -> None:
    worker = rank_class(*arguments)
    while True:
        try:
            name, fields = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(worker, name)(**fields), None))
        except Exception as error:  # noqa: BLE001 (the test raises it)
            pipe.send((None, f"rank {worker.rank}: {type(error).__name__}: {error}"))


class WorkerGroup:
    """NeMo-RL's worker group, over processes instead of Ray's actors."""

    def __init__(
        self, base: Path, ranks: int, config: GrpoConfig, rank_class: type[Rank] = Rank
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.workers: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            arguments = theirs, rank_class, rank, ranks, port, base, config
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.workers.append(process)
            self._pipes.append(mine)

    def run_all_workers_single_data(self, method_name: str, **fields: Any) -> list[Connection]:
        for pipe in self._pipes:
            pipe.send((method_name, fields))
        return self._pipes

    def close(self) -> None:
        for process in self.workers:
            process.kill()
            process.join()


def get(pipes: list[Connection]) -> list[Any]:
    """Wait for the answers of all ranks, as `ray.get` does."""
    answers = [pipe.recv() for pipe in pipes]
    for _, error in answers:
        if error is not None:
            raise RuntimeError(error)
    return [answer for answer, _ in answers]


class Policy:
    """The driver's side."""

    def __init__(self, base: Path, ranks: int = 2, rank_class: type[Rank] = Rank) -> None:
        self.config = GrpoConfig(lr_warmup_steps=5)
        self.worker_group = WorkerGroup(base, ranks, self.config, rank_class)

    def call(self, method: str, **fields: Any) -> list[Any]:
        return get(self.worker_group.run_all_workers_single_data(method, **fields))
