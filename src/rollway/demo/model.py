"""Build the demo's base policy: a tiny Qwen3 checkpoint with its tokenizer, offline.

Nothing is downloaded: the weights are random apart from a short supervised warm-up, and the
tokenizer has one token per byte. The warm-up teaches the *format*, answering with digits, and some
skill at the task: in its answers about half of the steps count up correctly, and the others jump to
any digit. One mistake spoils the rest of an answer, so the base policy earns about 0.15, where
guessing earns 0.1. The policy learns everything above that by RL. (From a policy that only guesses,
the same RL makes no progress in 80 steps: counting up is rewarded only after a right digit, and
nearly all digits are wrong.)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollway.demo.task import CountingPrompt, CountingTask

# Raise this whenever the builder, the warm-up or the task's prompt changes: a checkpoint with
# another format is built again.
FORMAT = 1
MARKER = "rollway-demo.json"
_SEED = 0

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# The training prompts are raw token ids; the template is for users who try the chat endpoint.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


MAX_POSITIONS = 2048
# Ten prompts a step, one for each start digit. Their answers are longer than the task's: the
# prompt costs most of the time, and a longer answer teaches more for nearly the same.
WARMUP_STEPS = 60
WARMUP_BATCH = 10
WARMUP_ANSWER = 64
WARMUP_LR = 3e-3
# Share of steps in the warm-up's answers that count up; the others are a random digit, which is
# sometimes the right one. At 0.3 the policy never learns one of the digits with some seeds; near 1
# nothing would be left to learn.
WARMUP_SKILL = 0.45


def build_base(directory: Path) -> Path:
    """Build the base checkpoint in ``directory`` unless it is there; return the path.

    The checkpoint is built next to it and renamed into place, so that an interrupted build never
    leaves an incomplete checkpoint.
    """
    if _is_complete(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as path:
        workspace = Path(path)
        _write_checkpoint(workspace / "fresh")
        try:
            if (directory / MARKER).is_file() and not _is_complete(directory):
                # It is outdated. Rename it first, so that no reader sees it half removed.
                directory.rename(workspace / "outdated")
            (workspace / "fresh").rename(directory)
        except OSError:
            # Another process may have finished the same build first; use its result.
            if not _is_complete(directory):
                raise
    return directory


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte: it encodes any text and needs no training."""
    # Sorted, because the alphabet comes in no fixed order and ids must not depend on the run.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN, PAD_TOKEN, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        # Fewer key-value heads than query heads, as in real checkpoints: engines fuse the
        # three projections, and a weight transfer has to get the uneven split right.
        num_attention_heads=4,
        num_key_value_heads=2,
        # CPU attention kernels accept only multiples of 32.
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        # 1 / sqrt(hidden_size). The usual 0.02 suits wide models; at this width the policy then
        # learns about half as fast.
        initializer_range=0.125,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    # Real checkpoints ship such values, and engines adopt them as defaults for whatever a
    # request leaves out. RL samples from the policy itself, so the rollout client must not let
    # them change an RL request. They are here on purpose: if that fails, the demo shows it.
    return GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _write_checkpoint(directory: Path) -> None:
    directory.mkdir()
    tokenizer = build_tokenizer()
    # A library function must not disturb its caller's random stream.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = Qwen3ForCausalLM(_config(tokenizer)).float()
    _warm_up(model, CountingTask(tokenizer), Random(_SEED))
    model.generation_config = _generation_config(tokenizer)
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    # The marker comes last: a directory that has it has everything else.
    (directory / MARKER).write_text(json.dumps({"format": FORMAT, "seed": _SEED}) + "\n")


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save a tokenizer so that engines with transformers 4 and with 5 can read it."""
    tokenizer.save_pretrained(directory)
    # transformers 5 writes a class name that engines with transformers 4 do not know. Both know
    # this one.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _warm_up(model: Qwen3ForCausalLM, task: CountingTask, rng: Random) -> None:
    """Train on prompts with partly wrong answers; only the answers count in the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=WARMUP_LR)
    model.train()
    for _ in range(WARMUP_STEPS):
        prompts = task.prompts(WARMUP_BATCH, rng)
        prompt_length = len(prompts[0].token_ids)
        rows = torch.tensor([p.token_ids + _make_flawed_answer(task, p, rng) for p in prompts])
        logits = model(input_ids=rows[:, :-1]).logits[:, prompt_length - 1 :]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, prompt_length:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def _make_flawed_answer(task: CountingTask, prompt: CountingPrompt, rng: Random) -> list[int]:
    digits, last = [], prompt.start
    for _ in range(WARMUP_ANSWER):
        last = (last + 1) % 10 if rng.random() < WARMUP_SKILL else rng.randrange(10)
        digits.append(task.digit_ids[last])
    return digits


def _is_complete(directory: Path) -> bool:
    marker = directory / MARKER
    return marker.is_file() and json.loads(marker.read_text()) == {"format": FORMAT, "seed": _SEED}
