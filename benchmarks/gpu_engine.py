"""`rollway bench gpu-engine`: refits and rollouts of a real engine with a model of real size.

    limits            what the device can do at best with the same bytes
    throughput        rollouts through `Rollouts`, no refit
    cuda_ipc … delta  refits of an idle engine; the very first one of the process apart
    in-flight …       refits while rollouts run
    colocated         only if it is named: sleep, train, wake, refit, generate, step after step
    by-turns          only if it is named: rollouts and `LLM.generate` in turn, both engines alive
    stock             Dynamo's pause, update_weights_from_disk, resume
    offline           the same prompts through vLLM's `LLM.generate`, after the stack has stopped
    lost              tokens that refits cost per hour

One stack with one worker serves all parts; the trainer's weights are on the same device. A part
that fails is reported, and the next one runs. Every refit is printed as it ends, so that a run that
is interrupted loses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import Say, round_floats
from benchmarks.delta_parts import measure_parts
from benchmarks.gpu_colocated import measure_colocated
from benchmarks.gpu_load import (
    PROMPT_TOKENS,
    MemoryWatch,
    ProbedLoad,
    make_prompts,
    measure_limits,
    synchronize,
)
from benchmarks.inputs import read_parts
from benchmarks.offline import measure_by_turns, measure_offline
from benchmarks.real_model import (
    SHAPES,
    Reference,
    Weights,
    cache_model,
    change_all,
    change_some,
    draw_weights,
    update_by_stock,
    write_model,
)
from rollway.aio import Stack, up
from rollway.api import make_spec
from rollway.cli.arguments import pick_fields
from rollway.cli.output import print_progress
from rollway.errors import UsageError
from rollway.fleet.report import RefitMode
from rollway.publishing import Transport
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.spec import StackSpec
from rollway.stack.preset import cache_dir

PARTS = (
    "limits", "throughput", "cuda_ipc", "cuda_ipc_in_place", "shm", "files", "delta", "in-flight",
    "keep", "pause-all", "stock", "offline", "lost",
)  # fmt: skip
ON_REQUEST = ("colocated", "by-turns")
"""Parts that run only if they are named: they need another engine, or a second one."""
UNDER_LOAD: tuple[RefitMode, ...] = ("in-flight", "keep", "pause-all")
Change = Callable[[Weights, int], None]
_CHECKED = 8
"""How many rollouts are compared with the trainer's forward pass after a refit."""
_PART_SECONDS = 240.0
"""The longest time of one part: a part that hangs must leave time for the others."""
_COLOCATED_SECONDS = 900.0
_TURNS_SECONDS = 480.0


@dataclass(slots=True)
class Options:
    """The options of a run."""

    model: str = "2b"
    only: tuple[str, ...] = ()
    rollouts: int = 256
    tokens: int = 512
    repeat: int = 2
    steps: int = 20
    """Of the part `colocated`, at each level."""
    filler_gib: float = 0.0
    """Memory of the device that `colocated` fills, so that it is nearly full."""
    eager: bool = False
    in_place: bool = False
    """Whether cuda_ipc publishes the trainer's own memory in the parts under load."""
    gpu_memory_utilization: float = 0.4
    refits_per_hour: float = 60.0
    seconds: float | None = None
    overrides: tuple[str, ...] = ()


def describe_stack(options: Options, path: Path, *, on_gpu: bool) -> StackSpec:
    """Return the spec of a stack with one worker that serves the model at `path`."""
    args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max-model-len": PROMPT_TOKENS + 2 * options.tokens + 64,
        # Explicit, since the defaults of a server differ from those of an offline engine. One more
        # than rollouts: a probe runs beside them.
        "max-num-seqs": options.rollouts + 1,
        "max-num-batched-tokens": 8192,
    }
    if on_gpu:
        args["gpu-memory-utilization"] = options.gpu_memory_utilization
        args["enforce-eager"] = options.eager
        if "colocated" in options.only:
            args["enable-sleep-mode"] = True
    model = {"path": str(path), "name": "policy", "args": args}
    fields = {"name": "bench-gpu", "models": [model]}
    return make_spec(fields, overrides=list(options.overrides))


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; return the exit code and the figures, also after Ctrl-C or SIGTERM."""
    if min(options.rollouts, options.tokens, options.repeat, options.steps) < 1:
        raise UsageError(
            "--rollouts, --tokens, --repeat and --steps must be positive.",
            "Give at least 1 for each.",
        )
    if options.filler_gib < 0:
        raise UsageError("--filler-gib must not be negative.", "0 fills nothing.")
    read_parts(options, (*PARTS, *ON_REQUEST))
    fields = pick_fields(Options, options) | {"only": tuple(options.only)}
    bench = GpuEngineBench(Options(**fields, overrides=tuple(options.set)), print_progress)
    code = 0
    # A machine that is lent for a time ends commands by SIGTERM: they still print what they have.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        bench.figures["is_interrupted"], code = True, 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return (code or (1 if bench.failed else 0)), bench.as_json()


class Skip(Exception):
    """A part cannot run here; the message says why."""


@dataclass(slots=True)
class GpuEngineBench:
    """One run: the figures so far, and the parts that were skipped or failed."""

    options: Options
    say: Say
    device: torch.device = field(init=False)
    spec: StackSpec = field(init=False)
    weights: Weights = field(init=False)
    scratch: Path = field(init=False)
    stack: Stack = field(init=False)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    filler: torch.Tensor | None = None
    """Memory of the GPU that is taken so that little is free."""
    version: int = 0
    reference: Reference | None = None
    refits: int = 0
    refit_began: float = 0.0
    turn: int = 0
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    # --- the run -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Measure all parts."""
        cache = cache_dir()
        self._prepare(cache)
        await self._measure("limits", self._measure_limits)
        with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=cache) as scratch:
            self.scratch = Path(scratch)
            try:
                await self._run_with_stack()
            except Exception as error:  # noqa: BLE001 (it is reported, and the rest still runs)
                self._note_failure("stack", error)
        await self._measure("offline", self._measure_offline)
        await self._measure("lost", self._compute_lost)

    def _prepare(self, cache: Path) -> None:
        """Make the model, in the cache and as the trainer's own weights, and the spec."""
        options = self.options
        self.say(f"drawing the weights of the {options.model} model on {self.device}")
        self.weights = draw_weights(SHAPES[options.model], self.device)
        path = cache_model(cache / f"bench-{options.model}", options.model, self.weights)
        self.say(f"the checkpoint is in {path} ({time.perf_counter() - self.began:.1f} s)")
        self.spec = describe_stack(options, path, on_gpu=self.device.type == "cuda")
        self.figures |= {
            "device": torch.cuda.get_device_name(0) if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "model": options.model,
            "model_bytes": sum(tensor.nbytes for tensor in self.weights.values()),
            "rollouts": options.rollouts,
            "tokens": options.tokens,
            "engine_args": self.spec.models[0].args,
        }

    async def _run_with_stack(self) -> None:
        wanted = self.options.only or PARTS
        if set(wanted) <= {"limits", "offline", "lost"}:
            return
        self.say("starting the stack")
        began = time.perf_counter()
        async with up(self.spec) as stack:
            self.stack = stack
            self.figures["start_seconds"] = time.perf_counter() - began
            self.say(f"the stack is ready after {self.figures['start_seconds']:.1f} s")
            self._fill_memory()
            await self._measure("throughput", self._measure_throughput)
            refit = self._measure_refits
            await self._measure("cuda_ipc", partial(refit, "cuda_ipc", in_place=False))
            await self._measure("cuda_ipc_in_place", partial(refit, "cuda_ipc", in_place=True))
            await self._measure("shm", partial(refit, "shm"))
            files = partial(refit, "files", directory=self.scratch / "files", keep_recent=1)
            await self._measure("files", files)
            await self._measure("delta", self._measure_delta)
            for mode in UNDER_LOAD:
                await self._measure(mode, partial(self._measure_under_load, mode))
            if "colocated" in wanted:
                work = partial(measure_colocated, self)
                await self._measure("colocated", work, _COLOCATED_SECONDS)
            if "by-turns" in wanted:
                await self._measure("by-turns", partial(measure_by_turns, self), _TURNS_SECONDS)
            await self._measure("stock", self._measure_stock)
            self.say("stopping the stack")
            self.filler = None

    def _fill_memory(self) -> None:
        """Take memory of the GPU, so that refits are measured where little is free."""
        if self.options.filler_gib and self.device.type == "cuda":
            nbytes = int(self.options.filler_gib * (1 << 30))
            self.filler = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.figures["free_gib"] = torch.cuda.mem_get_info()[0] / (1 << 30)
            self.say(f"memory is filled: {self.figures['free_gib']:.2f} GiB are free")

    async def _measure(
        self,
        name: str,
        work: Callable[[], Awaitable[dict[str, Any]]],
        left: float = _PART_SECONDS,
    ) -> None:
        """Measure a part; if it fails, the others are still measured."""
        if self.options.only and name not in self.options.only:
            return
        if self.options.seconds is not None:
            left = min(left, self.options.seconds - (time.perf_counter() - self.began))
        self.say(f"{name} …")
        try:
            if left <= 0:
                raise Skip("the time limit of the run has passed")
            async with asyncio.timeout(left):
                self.figures[name] = await work()
        except Skip as reason:
            self.skipped[name] = str(reason)
            self.say(f"{name}: skipped: {reason}")
        except Exception as error:  # noqa: BLE001 (it is reported)
            self._note_failure(name, error)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what a publisher held must not count for the next part

    def _note_failure(self, name: str, error: Exception) -> None:
        traceback.print_exception(error, limit=-4, file=sys.stderr)
        self.failed[name] = f"{type(error).__name__}: {error}"[:1000]
        self.say(f"{name}: failed: {self.failed[name]}")

    # --- refits --------------------------------------------------------------------------------

    async def _measure_limits(self) -> dict[str, Any]:
        figures = measure_limits(self.weights.values(), self.device)
        self.say(json.dumps(round_floats(figures, ".4g")))
        return figures

    async def _measure_delta(self) -> dict[str, Any]:
        # No second snapshot: every version after the first is a delta.
        figures = await self._measure_refits("delta", change_some, snapshot_every=1000)
        # Afterwards, and not on the weights that later parts publish.
        copy = {name: tensor.clone() for name, tensor in self.weights.items()}
        parts = await asyncio.to_thread(measure_parts, copy, change_some, self.scratch / "parts")
        self.say(f"delta: {json.dumps(round_floats(parts, '.4g'))}")
        return figures | {"parts": parts}

    async def _measure_refits(
        self, transport: Transport, change: Change = change_all, **options: Any
    ) -> dict[str, Any]:
        """Refit an idle engine several times. The first refit opens and maps memory."""
        if transport == "cuda_ipc" and self.device.type != "cuda":
            raise Skip("there is no GPU that torch can use")
        rows = []
        async with self.stack.publisher(transport, **options) as publisher:
            for _ in range(self.options.repeat + 1):
                row = await self.refit(publisher, "pause-all", change)
                rows.append(row)
                self.say(f"{transport}: {json.dumps(round_floats(row, '.4g'))}")
        names = ("publish_seconds", "refit_seconds", "seconds", "paused_seconds")
        later = {name: median(row[name] for row in rows[1:]) for name in names}
        check = await self.check_fresh(transport)
        return {"later": later, "check": check, "first": rows[0], "refits": rows[1:]}

    async def refit(self, publisher: Any, mode: RefitMode, change: Change) -> dict[str, Any]:
        """Change the weights, publish and refit, and return the seconds and the memory."""
        self.version += 1
        change(self.weights, self.version)
        synchronize(self.device)
        with MemoryWatch(self.device) as memory:
            began = time.perf_counter()
            offer = await publisher.publish(self.version, list(self.weights.items()))
            synchronize(self.device)
            self.refit_began = published = time.perf_counter()
            report = await self.stack.refit(self.version, offer, mode=mode)
            ended = time.perf_counter()
        self.refits += 1
        return {
            "version": self.version,
            "is_first_of_process": self.refits == 1,
            "publish_seconds": published - began,
            "refit_seconds": ended - published,
            "seconds": ended - began,
            "paused_seconds": report.paused_seconds,
            "memory": memory.figures,
            "report": report.as_json(),
        }

    async def _measure_under_load(self, mode: RefitMode) -> dict[str, Any]:
        options, rows = self.options, []
        transport: Transport = "cuda_ipc" if self.device.type == "cuda" else "shm"
        choice: dict[str, Any] = {"in_place": True} if options.in_place else {}
        async with self.stack.publisher(transport, **choice) as publisher:
            await self.refit(publisher, "pause-all", change_all)  # opens and maps memory
            # A pause-all refit waits until the longest rollout has ended: once is enough.
            for _ in range(1 if mode == "pause-all" else options.repeat):
                self.turn += 1
                load = ProbedLoad(self.stack, options.rollouts, 2 * options.tokens, self.turn)
                async with load.run():
                    row = await self.refit(publisher, mode, change_all)
                row["load"] = load.get_figures(
                    self.version, self.refit_began, row["paused_seconds"], self._get_rate()
                )
                row["check"] = self._check(mode, load.results[:_CHECKED])
                row["check_of_new_rollouts"] = await self.check_fresh(mode)
                rows.append(row)
                self.say(f"{mode}: {json.dumps(round_floats(row, '.4g'))}")
        return {"refits": rows}

    async def check_fresh(self, part: str) -> dict[str, Any]:
        """Sample some new rollouts, and compare their log-probs with the trainer's."""
        self.turn += 1
        sampling = Sampling(max_tokens=min(32, self.options.tokens), ignore_eos=True)
        prompts = make_prompts(_CHECKED, self.turn)
        groups = await self.stack.rollouts().generate_batch(prompts, sampling)
        return self._check(part, [group[0] for group in groups])

    def _check(self, part: str, rollouts: list[Rollout]) -> dict[str, Any]:
        """Compare the tokens of the newest version with a forward pass of the trainer."""
        figures = self.get_reference().compare(rollouts, self.version)
        if figures["is_of_version"] is False:
            kl = figures["mismatch_kl"]
            self.failed[f"{part} check"] = f"tokens are not of version {self.version}: KL {kl:.3g}"
        return figures

    def get_reference(self) -> Reference:
        """Return the trainer's model, which uses the memory of its weights."""
        if self.reference is None:
            path = Path(self.spec.models[0].path)
            self.reference = Reference(path, self.weights, self.device)
        return self.reference

    async def _measure_stock(self) -> dict[str, Any]:
        """Update the worker as Dynamo's guide describes."""
        rows = []
        for _ in range(self.options.repeat):
            self.version += 1
            change_all(self.weights, self.version)
            synchronize(self.device)
            directory = self.scratch / f"stock-{self.version}"
            began = time.perf_counter()
            write_model(directory, SHAPES[self.options.model], self.weights)
            saved = time.perf_counter() - began
            with MemoryWatch(self.device) as memory:
                paused = await update_by_stock(self.stack, directory, self.version)
            row: dict[str, Any] = {"save_seconds": saved, "paused_seconds": paused}
            row |= {"memory": memory.figures, "check": await self.check_fresh("stock")}
            shutil.rmtree(directory)  # with 8b, four of them fill a small disk
            rows.append(row)
            self.say(f"stock: {json.dumps(round_floats(row, '.4g'))}")
        return {"paused_seconds": median(row["paused_seconds"] for row in rows), "updates": rows}

    # --- rollouts ------------------------------------------------------------------------------

    async def _measure_throughput(self) -> dict[str, Any]:
        options, rates = self.options, []
        for index in range(options.repeat + 1):
            length = options.tokens if index else min(options.tokens, 32)  # the first one warms up
            rates.append(await self.sample(self.next_prompts(), length))
            self.say(f"throughput: {rates[-1]:.0f} tokens/s, {length} tokens each")
        return {"tokens_per_second": rates[1:], "median_tokens_per_second": median(rates[1:])}

    def next_prompts(self) -> list[list[int]]:
        """Return a prompt for each rollout; no round finds them cached."""
        self.turn += 1
        return make_prompts(self.options.rollouts, self.turn)

    async def sample(self, prompts: list[list[int]], tokens: int) -> float:
        """Sample as many tokens for each prompt, all at once; return the tokens per second."""
        client = self.stack.rollouts(concurrency=len(prompts))
        sampling = Sampling(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        began = time.perf_counter()
        groups = await client.generate_batch(prompts, sampling)
        seconds = time.perf_counter() - began
        return sum(len(group[0].token_ids) for group in groups) / seconds

    async def _measure_offline(self) -> dict[str, Any]:
        options = self.options
        prompts = make_prompts(options.rollouts, 0)
        figures = await measure_offline(self.spec, prompts, options.tokens, options.repeat)
        rate = figures["median_tokens_per_second"] = median(figures["tokens_per_second"])
        figures["ratio_of_rollouts"] = self._get_rate() / rate or None
        self.say(f"offline: {json.dumps(round_floats(figures, '.4g'))}")
        return figures

    def _get_rate(self) -> float:
        """Return the tokens per second without refits; 0 if they were not measured."""
        rate: float = self.figures.get("throughput", {}).get("median_tokens_per_second", 0.0)
        return rate

    async def _compute_lost(self) -> dict[str, Any]:
        """Return how many tokens the pauses of an hour cost, for every kind of refit."""
        rate = self._get_rate()
        if not rate:
            raise Skip("throughput was not measured")
        pauses = {}
        for name, part in self.figures.items():
            if isinstance(part, dict) and part.get("refits"):
                pauses[name] = median(row["paused_seconds"] for row in part["refits"])
            elif name == "stock":
                pauses[name] = part["paused_seconds"]
        count = self.options.refits_per_hour
        return {
            "refits_per_hour": count,
            "tokens_per_hour": {name: pause * rate * count for name, pause in pauses.items()},
            "share": {name: pause * count / 3600 for name, pause in pauses.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """Return what was measured so far."""
        seconds = time.perf_counter() - self.began
        notes = {"skipped": self.skipped, "failed": self.failed, "seconds": seconds}
        return round_floats({**self.figures, **notes}, ".5g")
