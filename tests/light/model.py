"""The Qwen3 dense forward in float32 numpy, with incremental decoding over a prefix cache."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.light.cache import BLOCK, PrefixCache, block_hash
from tests.light.checkpoint import Array, share_tensors

# Queries computed at once: bounds the attention matrix of a long prompt.
_PREFILL_ROWS = 256


@dataclass(frozen=True, slots=True)
class ModelConfig:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    eps: float
    rope_theta: float
    tied: bool

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        raw = json.loads((directory / "config.json").read_text())
        if raw["model_type"] != "qwen3" or raw.get("attention_bias"):
            raise ValueError(f"{directory} is not a plain Qwen3 checkpoint")
        heads = raw["num_attention_heads"]
        rope = raw.get("rope_parameters") or raw  # transformers 5 moved it
        return cls(
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            eps=raw["rms_norm_eps"],
            rope_theta=float(rope["rope_theta"]),
            tied=bool(raw.get("tie_word_embeddings")),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensors, looked up once and not for every token."""

    norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    q_norm: Array
    k_norm: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array

    @classmethod
    def of(cls, tensors: Mapping[str, Array], index: int) -> _Layer:
        def at(name: str) -> Array:
            return tensors[f"model.layers.{index}.{name}.weight"]

        return cls(
            norm=at("input_layernorm"),
            q=at("self_attn.q_proj"),
            k=at("self_attn.k_proj"),
            v=at("self_attn.v_proj"),
            o=at("self_attn.o_proj"),
            q_norm=at("self_attn.q_norm"),
            k_norm=at("self_attn.k_norm"),
            mlp_norm=at("post_attention_layernorm"),
            gate=at("mlp.gate_proj"),
            up=at("mlp.up_proj"),
            down=at("mlp.down_proj"),
        )


class Qwen3:
    """Weights that can be swapped under a running engine."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Array]) -> None:
        self.config = config
        half = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
        self._inv_freq = (1.0 / np.float32(config.rope_theta) ** half).astype(np.float32)
        self.swap(tensors)

    @classmethod
    def load(cls, directory: Path) -> Qwen3:
        return cls(ModelConfig.read(directory), share_tensors(directory))

    def swap(self, tensors: Mapping[str, Array]) -> None:
        """Compute with these from now on; KV that exists is not touched."""
        self.tensors = tensors
        self._embedding = tensors["model.embed_tokens.weight"]
        self._layers = [_Layer.of(tensors, i) for i in range(self.config.layers)]
        self._norm = tensors["model.norm.weight"]
        self._head = self._embedding if self.config.tied else tensors["lm_head.weight"]

    def forward(self, tokens: Sequence[int], kv: Array, past: int) -> Array:
        """Append the KV of `tokens` to `kv[:, :, past:]`; returns their last hidden states.

        `kv` has the axes layer, key or value, position, head, feature."""
        rows = [
            self._forward(tokens[start : start + _PREFILL_ROWS], kv, past + start)
            for start in range(0, len(tokens), _PREFILL_ROWS)
        ]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def logits(self, hidden: Array) -> Array:
        return hidden @ self._head.T

    def _forward(self, tokens: Sequence[int], kv: Array, past: int) -> Array:
        count, eps = len(tokens), self.config.eps
        x = self._embedding[np.asarray(tokens)]
        rotation = self._rotation(past, count)
        for layer, cache in zip(self._layers, kv, strict=True):
            x = x + self._attention(layer, _rms(x, layer.norm, eps), cache, past, rotation)
            h = _rms(x, layer.mlp_norm, eps)
            x = x + (_silu(h @ layer.gate.T) * (h @ layer.up.T)) @ layer.down.T
        return _rms(x, self._norm, eps)

    def _attention(
        self, layer: _Layer, h: Array, cache: Array, past: int, rotation: tuple[Array, Array]
    ) -> Array:
        config, count = self.config, len(h)
        total, dim, groups = past + count, config.head_dim, config.heads // config.kv_heads
        q = _rms((h @ layer.q.T).reshape(count, config.heads, dim), layer.q_norm, config.eps)
        k = _rms((h @ layer.k.T).reshape(count, config.kv_heads, dim), layer.k_norm, config.eps)
        cache[0, past:total] = _rotate(k, *rotation)
        cache[1, past:total] = (h @ layer.v.T).reshape(count, config.kv_heads, dim)
        # Axes of the queries: key-value head, query head of that group, position, feature.
        q = _rotate(q, *rotation).reshape(count, config.kv_heads, groups, dim)
        q = q.transpose(1, 2, 0, 3)
        keys = cache[0, :total].transpose(1, 2, 0)[:, None]
        values = cache[1, :total].transpose(1, 0, 2)[:, None]
        scores = q @ keys * np.float32(dim**-0.5)
        if count > 1:
            ahead = np.arange(total)[None] > (past + np.arange(count))[:, None]
            scores[..., ahead] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        out: Array = (scores @ values).transpose(2, 0, 1, 3).reshape(count, -1)
        return out @ layer.o.T

    def _rotation(self, start: int, count: int) -> tuple[Array, Array]:
        angles = np.outer(np.arange(start, start + count, dtype=np.float32), self._inv_freq)
        return np.cos(angles)[:, None], np.sin(angles)[:, None]


class Decoding:
    """One sequence being decoded. Whole blocks come from the prefix cache and go to it."""

    def __init__(
        self, model: Qwen3, cache: PrefixCache, prompt: Sequence[int], salt: str = ""
    ) -> None:
        self.tokens = list(prompt)
        self.cached_tokens = 0
        self._model = model
        self._cache = cache
        self._salt = salt
        self._hashes: list[int] = []
        self._kv: Array | None = None
        self._computed = 0

    @property
    def holds_blocks(self) -> bool:
        return self._kv is not None

    def next_logits(self) -> Array:
        """Compute what is not computed yet; returns the logits of the token to come."""
        first_time = self._kv is None
        kv = self._room_for(len(self.tokens))
        if first_time:
            self._reuse_prefix(kv)
        hidden = self._model.forward(self.tokens[self._computed :], kv, self._computed)
        stored = self._computed // BLOCK
        self._computed = len(self.tokens)
        self._store_blocks(kv, stored)
        return self._model.logits(hidden[-1])

    def uncached_tokens(self) -> int:
        """How many tokens the first step would compute now."""
        return len(self.tokens) - BLOCK * len(self._cache.find(self._usable_chain()))

    def export_kv(self, count: int) -> dict[str, Any]:
        """The keys and values of the first tokens, for another worker."""
        assert self._kv is not None
        kv = np.ascontiguousarray(self._kv[:, :, :count])
        packed = base64.b64encode(zlib.compress(kv.tobytes(), 1)).decode()
        return {"shape": list(kv.shape), "kv": packed}

    def import_kv(self, sent: Mapping[str, Any]) -> None:
        """Decode on what another worker has computed, whichever weights it had."""
        raw = zlib.decompress(base64.b64decode(sent["kv"]))
        received = np.frombuffer(raw, np.float32).reshape(sent["shape"])
        # The last token of the prompt is computed here: its logits are sampled from.
        self._computed = min(received.shape[2], len(self.tokens) - 1)
        kv = self._room_for(len(self.tokens))
        kv[:, :, : self._computed] = received[:, :, : self._computed]

    def drop_kv(self) -> None:
        """Give the KV up; the next step computes it again, under the weights of then."""
        self._kv, self._computed = None, 0

    def _room_for(self, count: int) -> Array:
        old, config = self._kv, self._model.config
        if old is None or old.shape[2] < count:
            capacity = -(-2 * count // BLOCK) * BLOCK
            shape = (config.layers, 2, capacity, config.kv_heads, config.head_dim)
            self._kv = np.empty(shape, np.float32)
            if old is not None:
                self._kv[:, :, : self._computed] = old[:, :, : self._computed]
        assert self._kv is not None
        return self._kv

    def _reuse_prefix(self, kv: Array) -> None:
        blocks = self._cache.find(self._usable_chain())
        for index, block in enumerate(blocks):
            kv[:, :, index * BLOCK : (index + 1) * BLOCK] = block
        self._computed = len(blocks) * BLOCK
        self.cached_tokens = self.cached_tokens or self._computed

    def _store_blocks(self, kv: Array, first: int) -> None:
        last = self._computed // BLOCK
        if last == first:
            return
        chain = self._chain(last)
        self._cache.store(
            [kv[:, :, i * BLOCK : (i + 1) * BLOCK] for i in range(first, last)],
            chain[first:],
            self.tokens[first * BLOCK : last * BLOCK],
            chain[first - 1] if first else None,
            self._salt,
        )

    def _usable_chain(self) -> list[int]:
        # One token at least is computed, else there would be no logits to sample from.
        return self._chain((len(self.tokens) - 1) // BLOCK)

    def _chain(self, count: int) -> list[int]:
        """The hashes of the first `count` blocks."""
        while len(self._hashes) < count:
            start = len(self._hashes) * BLOCK
            parent = self._hashes[-1] if self._hashes else None
            tokens = self.tokens[start : start + BLOCK]
            self._hashes.append(block_hash(parent, tokens, self._salt))
        return self._hashes[:count]


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
