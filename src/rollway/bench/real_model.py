"""Models of real size with random weights, for benchmarks: Qwen3 in bfloat16.

The weights are drawn on the device that will train them, which takes a second for 14 GB, and the
checkpoint stays in Rollway's cache for the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollway.weights.planning.scenario import hf_headers

Weights = dict[str, Tensor]
FORMAT = 2
"""Raise it whenever the files change: a checkpoint of another format is written again."""
MARKER = "rollway-bench.json"
CHANGED = 0.01
"""Share of the elements that `change_some` changes."""
_CHUNK = 64 << 20
_THREADS = 8

_HEADS_OF_128 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768}
SHAPES: dict[str, dict[str, int]] = {
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


def draw_weights(size: str, device: torch.device) -> Weights:
    """Draw the weights of a model, the same ones every time on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    # So that logits have about the same spread in narrow models: 0.02 is usual in wide ones.
    deviation = max(0.02, 1.2 / SHAPES[size]["hidden_size"] ** 0.5)
    weights = {}
    for name, header in hf_headers({"model_type": "qwen3", **SHAPES[size]}).items():
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
    marker = {"format": FORMAT, "size": size}
    try:
        if json.loads((directory / MARKER).read_text()) == marker:
            return directory
    except (OSError, ValueError):
        pass
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that an interrupted run leaves no half checkpoint.
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write_model(scratch, size, weights)
        (scratch / MARKER).write_text(json.dumps(marker))
        shutil.rmtree(directory, ignore_errors=True)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def write_model(directory: Path, size: str, weights: Weights) -> None:
    """Write a checkpoint that an engine can serve: config, tokenizer, weights."""
    from transformers import Qwen3Config

    from rollway.demo.model import build_tokenizer, save_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        **SHAPES[size],
        architectures=["Qwen3ForCausalLM"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    write_weights(directory / "model.safetensors", weights)


def write_weights(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file from tensors on any device, several parts at a time.

    `save_file` copies a GPU's tensors one after the other through pageable memory: 14 GB took more
    than a minute. Here each thread has a pinned buffer, and copies and writes by itself."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    buffers = threading.local()
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(part: tuple[int, Tensor]) -> None:
        position, data = part
        if data.device.type != "cpu":
            if not hasattr(buffers, "pinned"):
                buffers.pinned = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
            data = buffers.pinned[: data.numel()].copy_(data)
        view = memoryview(data.numpy())
        while view:  # one call writes at most 2 GiB, or less
            count = os.pwrite(handle, view, start + position)
            view, position = view[count:], position + count

    try:
        os.pwrite(handle, struct.pack("<Q", len(text)) + text, 0)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(write, _split_chunks(weights)))
    finally:
        os.close(handle)


def _split_chunks(weights: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of bounded size as bytes, each with its place in the file's data."""
    place = 0
    for tensor in weights.values():
        data = tensor.detach().reshape(-1).view(torch.uint8)
        for chunk in data.split(_CHUNK):
            yield place, chunk
            place += chunk.numel()
