"""GRPO in plain PyTorch: advantages, the clipped loss, one optimizer step, the mismatch.

One step of training, in the order of this file:

1. The engine samples ``group_size`` completions for each prompt and grades them. A completion
   is as good as it is better than its *group*: ``group_advantages``.
2. The trainer recomputes the log-probs of exactly the sampled token ids: ``token_logprobs``.
3. The gap between those and the log-probs that the engine reported says how far the policy
   that sampled is from the policy being trained: ``mismatch_kl``. With the same weights on
   both sides only floating-point noise is left.
4. ``compute_clipped_loss`` raises the probability of good completions and lowers that of bad
   ones, and ``GrpoTrainer.train_step`` takes the optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

TokenIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class GrpoConfig:
    """Settings of the demo's training run.

    The learning rate is far above what a real model takes: this one has about 0.1 million
    parameters and some thirty steps. It rises over the first ``lr_warmup_steps``, because Adam's
    first steps have their full size however noisy the gradient is. Without the rise some seeds
    lose one digit to such a step, and what is never sampled is never learnt.

    ``temperature`` is the one to sample with. The trainer computes log-probs at temperature 1,
    so another value would be a mismatch by construction.
    """

    groups_per_step: int = 16
    group_size: int = 8
    steps: int = 30
    lr: float = 2e-3
    lr_warmup_steps: int = 10
    clip: float = 0.2
    max_grad_norm: float = 1.0
    temperature: float = 1.0


@dataclass(frozen=True)
class RolloutBatch:
    """The completions of one step, one entry per completion in every list.

    ``engine_logprobs`` are those of the policy that sampled, as the engine reported them. They
    are checked against the completions here, since a shifted list would still train, badly.
    """

    prompt_ids: TokenIds
    completion_ids: TokenIds
    advantages: Sequence[float]
    engine_logprobs: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if {len(self.prompt_ids), len(self.advantages)} != {len(self.completion_ids)}:
            raise ValueError("a batch needs one entry per completion in every list")
        if [len(row) for row in self.engine_logprobs] != [len(ids) for ids in self.completion_ids]:
            raise ValueError("a batch needs one log-prob per sampled token")


@dataclass(frozen=True)
class StepStats:
    """What one training step reports."""

    loss: float
    mismatch_kl: float
    seconds: float


def group_advantages(rewards: Tensor) -> Tensor:
    """Turn rewards ``[groups, group_size]`` into advantages of the same shape.

    The mean of the group takes the place of a value function. A group whose rewards are all
    equal says nothing about which completion was better, so its advantages are exactly zero
    (not rounding noise blown up by a tiny deviation).
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    deviation = rewards.std(dim=1, keepdim=True, correction=0)
    constant = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(constant, torch.zeros_like(rewards), centred / (deviation + 1e-4))


def completion_mask(completion_ids: TokenIds, device: torch.device | str = "cpu") -> Tensor:
    """Return ``[completions, longest]``: 1.0 for sampled tokens, 0.0 for padding."""
    return pad_rows([[1.0] * len(ids) for ids in completion_ids], device)


def pad_rows(rows: Sequence[Sequence[float]], device: torch.device | str = "cpu") -> Tensor:
    """Stack rows of unequal length into one float tensor, with zeros on the right.

    It is built on the CPU and moved whole: rows that move one by one wait for the device each."""
    stacked = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True
    )
    return stacked.to(device)


def token_logprobs(
    model: PreTrainedModel, prompt_ids: TokenIds, completion_ids: TokenIds
) -> Tensor:
    """Return the log-probs of the sampled tokens, ``[completions, longest]``, zero for padding.

    They are computed with the unmodified policy: temperature 1, the whole vocabulary, float32.
    """
    device = model.device
    completions = pad_rows(completion_ids, device).long()
    mask = completion_mask(completion_ids, device)
    rows = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
    # Padding is on the right and attention is causal, so that no real token sees a padded one
    # and an attention mask would change nothing but the speed.
    inputs = pad_rows(rows, device).long()
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    # The token at place t is predicted by the state before it. Picking these states first
    # spares the vocabulary projection of the prompt, the larger part of the row.
    first = torch.tensor([len(prompt) - 1 for prompt in prompt_ids], device=device)
    places = first[:, None] + torch.arange(completions.shape[1], device=device)
    places = places.clamp(max=hidden.shape[1] - 1)
    states = hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[2]))
    logits = model.get_output_embeddings()(states).float()
    logprobs = logits.log_softmax(dim=-1).gather(2, completions[:, :, None]).squeeze(2)
    return logprobs * mask


def mean_over_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over all sampled tokens of the batch, so that each token weighs the same."""
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def mismatch_kl(trainer_lp: Tensor, engine_lp: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(engine || trainer) from the sampled tokens; never negative.

    The mean of ``exp(d) - d - 1`` with ``d = trainer - engine``: unbiased for tokens that the
    engine sampled, and without the sign changes of the plain mean of ``-d``. It is computed in
    float64, since the values of interest (about d * d / 2) would drown in float32 rounding.
    """
    d = (trainer_lp - engine_lp).double() * mask
    return mean_over_mask(torch.expm1(d) - d, mask.double())


def compute_clipped_loss(
    new_lp: Tensor, old_lp: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """Return PPO's clipped surrogate loss over the sampled tokens.

    ``advantages`` has one value per completion: all of its tokens share the credit. The clip
    takes away the incentive to move a token's probability further than ``1 +- clip`` from
    what it was when the token was sampled.
    """
    ratio = torch.exp(new_lp - old_lp)
    credit = advantages[:, None]
    surrogate = torch.minimum(ratio * credit, ratio.clamp(1 - clip, 1 + clip) * credit)
    return -mean_over_mask(surrogate, mask)


class GrpoTrainer:
    """Holds the policy and its optimizer, and takes one optimizer step per batch of rollouts.

    One step, because rollouts are cheap here and a second pass over the same batch would be off
    policy. The clip therefore only acts when the engine sampled with other weights.
    """

    def __init__(self, model: PreTrainedModel, config: GrpoConfig | None = None) -> None:
        self.config = config or GrpoConfig()
        # In eval mode: dropout would make the recomputed log-probs differ from the engine's.
        self.model = model.eval()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.config.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)

    @classmethod
    def from_checkpoint(
        cls, directory: Path, config: GrpoConfig | None = None, device: str = "cpu"
    ) -> GrpoTrainer:
        """Return a trainer for the policy in ``directory``, in float32, on a device."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return cls(model.to(device), config)

    def train_step(self, batch: RolloutBatch) -> StepStats:
        """Update the policy on one batch.

        The log-probs are recomputed before the optimizer step, so with the weights that
        sampled the batch, and serve both the comparison with the engine and the loss. (If the
        engine was behind the trainer, the mismatch shows that lag as well, as it should.)
        """
        started = time.perf_counter()
        device = self.model.device
        mask = completion_mask(batch.completion_ids, device)
        advantages = torch.tensor(batch.advantages, dtype=torch.float32, device=device)
        new_lp = token_logprobs(self.model, batch.prompt_ids, batch.completion_ids)
        old_lp = pad_rows(batch.engine_logprobs, device)
        mismatch = mismatch_kl(new_lp.detach(), old_lp, mask).item()
        loss = compute_clipped_loss(new_lp, old_lp, advantages, mask, self.config.clip)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        return StepStats(loss.item(), mismatch, time.perf_counter() - started)

    def _lr_factor(self, step: int) -> float:
        return min(1.0, (step + 1) / max(1, self.config.lr_warmup_steps))
