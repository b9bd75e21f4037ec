"""Models of real size with random weights, for benchmarks: Qwen3 in bfloat16.

The weights are drawn on the device that will train them, which takes a second for 14 GB, and the
checkpoint stays in Rollway's cache for the next run. `Reference` checks sampled tokens against a
forward pass of the same weights.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rollway.aio import Stack
from rollway.rollout.client import Rollout
from rollway.versions import taint_of
from rollway.weights.planning.scenario import hf_headers
from rollway.weights.transports.files import SHARD_BYTES, save_tensors

Weights = dict[str, Tensor]
Shape = dict[str, int]
CHANGED = 0.01
"""Share of the elements that `change_some` changes."""

_HEADS_OF_128 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768}
SHAPES: dict[str, Shape] = {
    # FlashAttention has no heads below 64, and attention on a CPU needs a multiple of 32.
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    },
    "2b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, **_HEADS_OF_128,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, **_HEADS_OF_128,
    },
}  # fmt: skip
"""The sizes of Qwen3-1.7B and Qwen3-8B with a smaller vocabulary, and a model for tests."""


def draw_weights(shape: Shape, device: torch.device) -> Weights:
    """Draw the weights of a model, the same ones every time on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    # So that logits have about the same spread in narrow models: 0.02 is usual in wide ones.
    deviation = max(0.02, 1.2 / shape["hidden_size"] ** 0.5)
    weights = {}
    for name, header in hf_headers({"model_type": "qwen3", **shape}).items():
        tensor = torch.empty(header.shape, dtype=torch.bfloat16, device=device)
        if tensor.dim() > 1:
            tensor.normal_(0.0, deviation, generator=generator)
        else:
            tensor.fill_(1.0)  # the scale of a norm
        weights[name] = tensor
    return weights


def change_all(weights: Weights, _: int) -> None:
    """Change every matrix in place, nearly every element of it."""
    # Each row moves to the next place: the values stay in range over any number of versions, and
    # a token of other weights has a clearly different log-prob (scaling would hide in the norms).
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor.copy_(tensor.roll(1, 0))


def change_some(weights: Weights, version: int) -> None:
    """Move a share of the elements to a neighbouring value, as a small optimizer step does."""
    for tensor in weights.values():
        generator = torch.Generator(tensor.device).manual_seed(version)
        drawn = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        tensor.view(torch.int16).add_((drawn < CHANGED).to(torch.int16))


def cache_model(directory: Path, size: str, weights: Weights) -> Path:
    """Write the checkpoint into the cache unless it is there; return its directory."""
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that an interrupted run leaves no half checkpoint.
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write_model(scratch, SHAPES[size], weights)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def write_model(directory: Path, shape: Shape, weights: Weights) -> None:
    """Write a checkpoint that an engine can serve: config, tokenizer, weights."""
    from transformers import Qwen3Config

    from rollway.demo.model import build_tokenizer, save_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        **shape,
        architectures=["Qwen3ForCausalLM"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    # Copies: torch aborts a process at its end whose tensors were both shared with a worker that
    # was killed and used by a second stream, as the one that saves them.
    copies = ((name, tensor.clone()) for name, tensor in weights.items())
    save_tensors(directory, copies, SHARD_BYTES)


async def update_by_stock(stack: Stack, directory: Path, version: int) -> float:
    """Update the only worker as Dynamo's guide describes; return the seconds of its pause."""
    (worker,) = await stack.fleet.workers()
    admin = stack.fleet.admin
    began = time.perf_counter()
    await admin.pause(worker)
    await admin.update_from_disk(worker, directory, version)
    await admin.resume(worker)
    seconds = time.perf_counter() - began
    # Without the taint of its version, the worker gets no requests.
    await admin.set_taints(worker, [taint_of(version)])
    await stack.fleet.read_versions()
    return seconds


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
