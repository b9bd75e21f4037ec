"""Check sampled tokens against a forward pass of the trainer's weights, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rollway.bench.real_model import Weights
from rollway.rollout.client import Rollout

LARGEST_KL = 0.05
"""Rounding in bfloat16 gives 1e-3 to 7e-3 with random weights; other weights, or a KV cache of
other weights, give about 1."""


_TRAINED = (2, 64)
"""Sequences of a training step, and tokens of each."""


class Reference:
    """The model of the trainer's weights. It uses their memory, and so follows every change."""

    def __init__(self, checkpoint: Path, weights: Weights, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(checkpoint)
        with torch.device("meta"):
            self._model = Qwen3ForCausalLM(config).eval()
        self._model.load_state_dict(weights, assign=True)
        # Its frequencies are computed, not loaded, and are still on the meta device.
        self._model.model.rotary_emb = Qwen3RotaryEmbedding(config).to(device)
        self._device = device
        self._optimizer: torch.optim.Optimizer | None = None

    def compare(self, rollouts: Sequence[Rollout], version: int) -> dict[str, Any]:
        """Compare the log-probs of the tokens that were sampled from this version."""
        parts = [self._subtract(rollout, version) for rollout in rollouts]
        d = torch.cat(parts).double() if parts else torch.empty(0)
        if not d.numel():
            return {"tokens": 0, "mismatch_kl": None, "is_of_version": None}
        kl = float((torch.expm1(d) - d).mean())
        largest = float(d.abs().max())
        figures = {"tokens": d.numel(), "mismatch_kl": kl, "largest_difference": largest}
        return {**figures, "is_of_version": kl < LARGEST_KL}

    def train(self, seed: int) -> float:
        """Take one step of AdamW on random tokens, which changes the weights in their place; return
        the loss. Gradients and the optimizer's state stay until `drop_training_state`."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self._model.config.vocab_size, _TRAINED, generator=generator)
        ids = ids.to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=False)
        loss = self._model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def drop_training_state(self) -> None:
        """Release what only the step needed, as a trainer that offloads it."""
        self._optimizer = None
        self._model.zero_grad(set_to_none=True)

    def read_logits(
        self, ids: Tensor, prompt_length: int, head: torch.dtype | None = None
    ) -> Tensor:
        """Return the logits of the tokens after the prompt, of rows of equal length.

        `head` is the dtype of the projection to the vocabulary; None: that of the weights."""
        with torch.no_grad():
            states = self._model.model(ids.to(self._device), use_cache=False).last_hidden_state
            states = states[:, prompt_length - 1 : -1]
            if head is None:
                return self._model.lm_head(states)
            return states.to(head) @ self._model.lm_head.weight.to(head).T

    def _subtract(self, rollout: Rollout, version: int) -> Tensor:
        """Return the trainer's log-probs minus the engine's."""
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        logits = self.read_logits(ids, len(rollout.prompt_ids))
        expected = pick_logprobs(logits, ids, len(rollout.prompt_ids))[0].cpu()
        difference = expected - torch.tensor(rollout.logprobs or [])
        spans = [span for span in rollout.spans if span.version == version]
        return torch.cat([difference[span.start : span.end] for span in spans] or [difference[:0]])


def pick_logprobs(logits: Tensor, ids: Tensor, prompt_length: int) -> Tensor:
    """Return the log-probs of the tokens after the prompt, by a softmax in float32."""
    chosen = ids[:, prompt_length:, None].to(logits.device)
    return logits.float().log_softmax(-1).gather(2, chosen)[:, :, 0]
