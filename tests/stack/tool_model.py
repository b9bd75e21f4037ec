"""A tiny model that has learnt to call one tool, with a tokenizer that does not round-trip.

Asked "add 3 4" it answers with a call in Hermes' form, and told the result it says it. It has
learnt nothing else. Its tokenizer is the awkward one: what it samples at temperature 1 is often
not what its text would be encoded to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests import awkward_tokenizer
from tests.awkward_tokenizer import build

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
# Tools are not shown to the model: it knows one, and has no room for more.
TEMPLATE = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments if call.function.arguments is string
            else call.function.arguments | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
STEPS = 600


def cached_tool_model(directory: Path) -> Path:
    """Return the checkpoint, trained once for each version of these recipes and of torch."""
    recipes = b"".join(Path(file).read_bytes() for file in (__file__, awkward_tokenizer.__file__))
    digest = hashlib.sha256(recipes + torch.__version__.encode()).hexdigest()[:16]
    model = directory / f"tool-model-{digest}"
    if not model.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(dir=directory))
        try:
            built = build_tool_model(workspace / "model")
            with contextlib.suppress(OSError):  # another run was quicker
                built.rename(model)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    return model


def build_tool_model(directory: Path) -> Path:
    """Train it, in half a minute, and write a checkpoint."""
    build(directory, template=TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.125,
            max_position_embeddings=2048, tie_word_embeddings=False, dtype="float32",
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    ).float()  # fmt: skip
    _train(model, tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    return directory


def spoken(a: int, b: int) -> list[dict[str, Any]]:
    """One exchange as it should go."""
    call = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
    return [
        {"role": "user", "content": f"add {a} {b}"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def _train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    exchanges = [_marked(tokenizer, spoken(a, b)) for a in range(5) for b in range(5)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-4)
    for _ in range(STEPS):
        # Two exchanges in a row; all are of one length, since all numbers have one digit.
        rows = [rng.choice(exchanges) + rng.choice(exchanges) for _ in range(12)]
        ids, mask = torch.tensor(rows).unbind(-1)
        logits = model(input_ids=ids[:, :-1]).logits
        own = mask[:, 1:].bool()
        loss = torch.nn.functional.cross_entropy(logits[own], ids[:, 1:][own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def _marked(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    """The ids of an exchange, each with whether the assistant says it."""
    marked: list[tuple[int, int]] = []
    for count, message in enumerate(messages, start=1):
        whole = tokenizer.apply_chat_template(messages[:count], tokenize=True, return_dict=False)
        own = int(message["role"] == "assistant")
        marked += [(token, own) for token in list(whole)[len(marked) :]]
    return marked
