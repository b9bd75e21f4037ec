"""A small trainer on the CPU that reads what an orchestrator ships, and broadcasts each step.

It plays prime-rl's trainer: rollouts come as `rollouts/step_N/rank_0.bin`, weights go to
`broadcasts/step_N`. The model, the loss and the mismatch are those of the demo.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollway.demo.grpo import compute_clipped_loss, mismatch_kl, pad_rows
from rollway.demo.task import INSTRUCTION
from rollway.integrations.prime_rl.broadcast import BroadcastSender, CollectiveSender

ANSWER = 12
STEPS = 10
RISE = 0.1
"""Without training, the reward of two steps varies by a third of this."""
MISMATCH = 1e-3
LR, LORA_LR = 3e-3, 1e-2
LR_WARMUP = 4
STEP_SECONDS = 240.0
"""How long a batch may take; the first one includes the start of all processes."""

Broadcast = Callable[[int], None]


@dataclass(frozen=True)
class Sample:
    """One sequence as prime-rl ships it: which tokens were sampled, and their credit."""

    ids: list[int]
    mask: list[bool]
    advantages: list[float]
    logprobs: list[float]


@dataclass(frozen=True)
class Step:
    """What one step of the trainer has seen."""

    samples: int
    mismatch_kl: float
    stale: int
    """Sequences of other weights: their own mismatch is a thousand times that of rounding."""
    seconds: float


class Adapter:
    """LoRA on every projection of the layers, over frozen weights."""

    RANK, ALPHA = 8, 16
    TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        self.matrices: dict[str, torch.nn.Parameter] = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in self.TARGETS:
                self._adapt(f"base_model.model.{name}", module)

    @property
    def config(self) -> dict[str, Any]:
        """The `adapter_config.json` that PEFT would write."""
        sizes = {"r": self.RANK, "lora_alpha": self.ALPHA, "lora_dropout": 0.0}
        return {"peft_type": "LORA", "target_modules": list(self.TARGETS), **sizes}

    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach().to(torch.bfloat16) for name, p in self.matrices.items()}

    def _adapt(self, name: str, module: torch.nn.Module) -> None:
        assert isinstance(module, torch.nn.Linear)
        down = torch.nn.Parameter(torch.randn(self.RANK, module.in_features) * 0.1)
        up = torch.nn.Parameter(torch.zeros(module.out_features, self.RANK))
        self.matrices |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        scale = self.ALPHA / self.RANK

        def add(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + inputs[0] @ down.T @ up.T * scale

        module.register_forward_hook(add)


class Trainer:
    """The policy and its optimizer."""

    def __init__(self, base: Path, *, lora: bool = False) -> None:
        torch.manual_seed(0)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32
        ).eval()
        self.adapter = Adapter(self.model) if lora else None
        self.parameters = list(
            self.adapter.matrices.values() if self.adapter else self.model.parameters()
        )
        self.optimizer = torch.optim.Adam(self.parameters, lr=LORA_LR if lora else LR)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / LR_WARMUP)
        )

    def step(self, samples: list[Sample]) -> tuple[float, int]:
        """Take an optimizer step on a batch; return the mismatch before it, and how many sequences
        are of other weights."""
        mask = pad_rows([sample.mask for sample in samples])
        engine = pad_rows([sample.logprobs for sample in samples])
        logprobs = self.compute_logprobs([sample.ids for sample in samples])
        mismatch = mismatch_kl(logprobs.detach(), engine, mask).item()
        rows = zip(logprobs.detach(), engine, mask, strict=True)
        stale = sum(mismatch_kl(*row).item() > MISMATCH for row in rows)
        # The credit of a sequence, from any of its sampled tokens: unit variance, as in the demo.
        credit = torch.tensor([max(s.advantages) + min(s.advantages) for s in samples])
        credit = credit / (credit.std() + 1e-4)
        loss = compute_clipped_loss(logprobs, engine, credit, mask)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        return mismatch, stale

    def compute_logprobs(self, rows: list[list[int]]) -> Tensor:
        """Return the log-prob of each token, and 0 for the first of a row."""
        ids = pad_rows(rows).long()
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        own = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(own, (1, 0))

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the weights as prime-rl sends them, in bf16."""
        named = self.model.state_dict().items()
        return [(name, tensor.detach().to(torch.bfloat16)) for name, tensor in named]


def read_samples(path: Path) -> list[Sample]:
    """Read a file of micro batches; sequences without credit teach nothing."""
    samples = []
    for ids, mask, advantages, logprobs, _, lengths, *_ in msgspec.msgpack.decode(
        path.read_bytes()
    ):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            start += length
            sample = Sample(ids[part], mask[part], advantages[part], logprobs[part])
            if any(sample.mask):
                samples.append(sample)
    return samples


def run_steps(
    trainer: Trainer,
    output_dir: Path,
    steps: int,
    broadcast: Broadcast,
    orchestrator: subprocess.Popen[bytes],
    *,
    last: bool = True,
) -> list[Step]:
    """Train while the orchestrator runs. `last` says whether it waits for the last broadcast."""
    broadcast(0)
    results = []
    for number in range(1, steps + 1):
        path = output_dir / "rollouts" / f"step_{number}" / "rank_0.bin"
        wait_for(path, orchestrator)
        samples = read_samples(path)
        began = time.monotonic()
        mismatch, stale = trainer.step(samples)
        results.append(Step(len(samples), mismatch, stale, time.monotonic() - began))
        if number < steps or last:
            broadcast(number)
    assert orchestrator.wait(STEP_SECONDS) == 0
    return results


def wait_for(path: Path, orchestrator: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STEP_SECONDS
    while not path.exists():
        assert orchestrator.poll() is None, "the orchestrator ended"
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)  # between two looks


def send_files(trainer: Trainer, output_dir: Path) -> Broadcast:
    """Return a broadcast of whole weights as files."""
    sender = BroadcastSender(output_dir)
    return lambda step: void(sender.send(step, trainer.tensors()))


@contextlib.contextmanager
def send_by_group(trainer: Trainer, output_dir: Path) -> Iterator[tuple[Broadcast, dict[str, Any]]]:
    """Yield a broadcast to the ranks of two workers over gloo, and what they need to join."""
    with CollectiveSender("127.0.0.1", 0, 2, STEP_SECONDS, output_dir=output_dir) as sender:
        place = {"host": "127.0.0.1", "port": sender.port, "timeout": int(STEP_SECONDS)}
        join = {**place, "inference_world_size": 2, "quantize_in_weight_transfer": False}
        yield (lambda step: void(sender.send(step, trainer.tensors()))), join


def send_adapters(trainer: Trainer, output_dir: Path) -> Broadcast:
    """Return a broadcast of the adapter alone."""
    sender, adapter = BroadcastSender(output_dir), trainer.adapter
    assert adapter is not None
    return lambda step: void(sender.send_adapter(step, adapter.tensors(), adapter.config))


def send_first_adapter_only(trainer: Trainer, output_dir: Path) -> Broadcast:
    """Return the control's broadcast of adapters."""
    sender, adapter = BroadcastSender(output_dir), trainer.adapter
    assert adapter is not None
    first = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    return lambda step: void(sender.send_adapter(step, first, adapter.config))


def send_first_weights_only(trainer: Trainer, output_dir: Path) -> Broadcast:
    """Return the control's broadcast: every step has the weights of the first."""
    sender = BroadcastSender(output_dir)
    first = [(name, tensor.clone()) for name, tensor in trainer.tensors()]
    return lambda step: void(sender.send(step, first))


def void(_: Any) -> None:
    return None


def counting_env(turns: int) -> dict[str, Any]:
    """Return the config of one environment of `verifiers`."""
    taskset = {"id": "rollway_counting", "instruction": INSTRUCTION, "turns": turns}
    agent = {"harness": {"id": "rollway_counting"}, "runtime": {"type": "subprocess"}}
    return {"taskset": taskset, "agent": agent}


RENDERER = {"name": "custom", "import_path": "rollway_counting.CountingRenderer"}


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(steps: list[Step], metrics: list[dict[str, Any]]) -> tuple[float, float]:
    """Print the figures; return how much the reward has risen, and the largest mismatch."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].partition(" ")[0]
    rewards = [row["reward"] for row in metrics]
    rise = statistics.fmean(rewards[-2:]) - statistics.fmean(rewards[:2])
    worst = max(step.mismatch_kl for step in steps)
    print(f"\n{name}: reward {' '.join(f'{reward:.3f}' for reward in rewards)}")
    print(f"{name}: mismatch KL {' '.join(f'{step.mismatch_kl:.1e}' for step in steps)}")
    print(f"{name}: sequences of other weights {' '.join(str(step.stale) for step in steps)}")
    return rise, worst
