"""`rollway bench refit`: one real vLLM worker refitted over every transport, in one run.

    stock       save a checkpoint, pause, Dynamo's update_weights_from_disk, resume
    files …     publish, refit: staged while the worker generates, swapped under a pause

Two policies take turns, so that every refit changes every parameter; deltas change one element in a
hundred. After each refit the worker's greedy answer is compared with the one it gave on the same
policy after a stock update.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollway.api import Stack, make_spec, up
from rollway.errors import RolloutError
from rollway.rollout.sampling import Sampling
from rollway.stack.state import StackDir
from rollway.versions import taint_of
from rollway.weights.digest.bits import raw_bytes
from rollway.weights.offer import Offer
from rollway.weights.transports.collective import CollectivePublisher
from rollway.weights.transports.delta import DeltaPublisher, Store
from rollway.weights.transports.files import FilesPublisher
from rollway.weights.transports.nixl import NixlPublisher
from rollway.weights.transports.shm import ShmPublisher

ROUNDS = 4
CHANGED = 0.01
"""Share of the elements that a delta changes."""
Say = Callable[[str], None]
State = dict[str, Tensor]
Publish = Callable[[int, State], Offer]
_SPENT = re.compile(r"is served \((.*)\)")


@dataclass(slots=True)
class TransportFigures:
    """Medians over some refits."""

    seconds: float = 0.0
    """Until the bytes are in the worker's memory, verified: publishing and reading."""
    gb_per_s: float = 0.0
    pause_seconds: float = 0.0
    refit_seconds: float = 0.0
    """All of it, from the trainer's tensors to serving."""
    pause_fraction: float = 0.0
    bytes_ratio: float = 1.0
    """Bytes moved for each byte that the worker needed."""
    bytes_fraction: float = 1.0
    """Bytes moved for each byte of the model."""
    ratio_to_memcpy: float = 0.0
    speedup_over_stock: float = 0.0
    """By `seconds`. Dynamo's own update reads, loads and packs in one go, under the pause, so its
    `seconds` are all of that; the next figure compares everything with everything."""
    refit_speedup_over_stock: float = 0.0
    pause_over_stock: float = 0.0
    publish_seconds: float = 0.0
    load_seconds: float = 0.0
    prove_seconds: float = 0.0
    prepare_seconds: float = 0.0
    swap_seconds: float = 0.0


@dataclass(slots=True)
class RefitFigures:
    model_bytes: int = 0
    memcpy_gb_per_s: float = 0.0
    transports: dict[str, TransportFigures] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = _rounded(asdict(self))
        return made


@dataclass(slots=True)
class _Way:
    """One transport as it is measured."""

    publish: Publish
    before: Callable[[State], None] = lambda _: None
    """What the trainer does before, which is not measured."""
    turns: tuple[int, ...] = (0, 1)
    moved: Callable[[Offer], float] = lambda _: 1.0
    """Bytes moved, as a share of the model's."""


@dataclass(slots=True)
class _Bench:
    stack: Stack
    model: Path
    scratch: Path
    policies: list[State]
    """Two that differ in every element, and one that differs from the first in a few."""
    nbytes: int
    answers: dict[int, list[int]] = field(default_factory=dict)
    version: int = 0

    async def stock(self) -> TransportFigures:
        """As Dynamo's guide says."""
        from safetensors.torch import save_file

        (worker,) = await self.stack.fleet.workers()
        admin, found = self.stack.fleet.admin, []
        for index in self._turns((0, 1, 2)):
            directory = self.scratch / f"stock-{self.version}"
            _copy_config(self.model, directory)
            began = time.perf_counter()
            save_file(self.policies[index], directory / "model.safetensors", {"format": "pt"})
            saved = time.perf_counter()
            await admin.pause(worker)
            await admin.update_from_disk(worker, directory, self.version)
            await admin.resume(worker)
            ended = time.perf_counter()
            shutil.rmtree(directory)
            await admin.set_taints(worker, [taint_of(self.version)])  # so that it can be asked
            await self.stack.fleet.read_versions()
            self.answers[index] = await self._answer()
            found.append((saved - began, ended - saved))
        publish, pause = (median(column) for column in zip(*found[1:], strict=True))
        return TransportFigures(
            seconds=publish + pause,
            gb_per_s=self.nbytes / (publish + pause) / 1e9,
            pause_seconds=pause,
            refit_seconds=publish + pause,
            publish_seconds=publish,
        )

    async def measured(self, way: _Way) -> TransportFigures:
        found = []
        for index in self._turns(way.turns):
            way.before(self.policies[index])
            began = time.perf_counter()
            offer = way.publish(self.version, self.policies[index])
            published = time.perf_counter() - began
            report = await self.stack.refit(self.version, offer)
            ended = time.perf_counter() - began
            spent = self._spent()
            parts = (spent.get(name, 0.0) for name in ("load", "prove", "prepare", "swap"))
            found.append((way.moved(offer), published, ended, report.paused_seconds, *parts))
            if self.answers[index] != await self._answer():
                raise RolloutError("The worker answers differently than after a stock update.")
        moved, published, ended, paused, load, prove, prepare, swap = (
            median(column)
            for column in zip(*found[2:], strict=True)  # the first open and map
        )
        return TransportFigures(
            seconds=published + load,
            gb_per_s=self.nbytes / (published + load) / 1e9,
            pause_seconds=paused,
            refit_seconds=ended,
            bytes_fraction=moved,
            publish_seconds=published,
            load_seconds=load,
            prove_seconds=prove,
            prepare_seconds=prepare,
            swap_seconds=swap,
        )

    def _turns(self, indices: tuple[int, ...]) -> Iterator[int]:
        for number in range(ROUNDS + 2):
            self.version += 1
            yield indices[number % len(indices)]

    async def _answer(self) -> list[int]:
        greedy = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
        (rollout,) = await self.stack.rollouts().generate(list(range(10, 40)), greedy)
        return rollout.token_ids

    def _spent(self) -> dict[str, float]:
        """What the worker says in its log about its last swap."""
        state = StackDir(self.stack.name).read()
        assert state is not None
        (log,) = [process.log for process in state.processes if process.role == "worker"]
        lines = _SPENT.findall(Path(log).read_text(errors="replace"))
        if not lines:
            return {}
        return {part.split()[0]: float(part.split()[1]) for part in lines[-1].split(", ")}


async def bench_refit(
    scratch: Path, say: Say, *, megabytes: int = 520, wanted: tuple[str, ...] = ()
) -> RefitFigures:
    """All transports; `wanted` names some of them only."""
    say(f"building a model of about {megabytes} MB")
    model = build_model(scratch / "model", megabytes)
    first = load_policy(model)
    policies = [first, _other(first), _stepped(first)]
    nbytes = sum(tensor.nbytes for tensor in first.values())
    figures = RefitFigures(nbytes)
    say("starting the stack")
    args = {"dtype": "bfloat16", "max-model-len": 512, "max-num-seqs": 16}
    served = {"path": str(model), "name": "bench", "args": args}
    async with up(make_spec({"name": "bench-refit", "models": [served]})) as stack:
        bench = _Bench(stack, model, scratch, policies, nbytes)
        with ExitStack() as cleanup:
            figures.transports["stock"] = await bench.stock()
            say(_told("stock", figures.transports["stock"]))
            for name, way in _ways(bench, cleanup).items():
                if not wanted or name in wanted:
                    figures.transports[name] = await bench.measured(way)
                    say(_told(name, figures.transports[name]))
                    # Between them, so that it is of the same minutes.
                    speed = memcpy_speed(first)
                    figures.memcpy_gb_per_s = max(figures.memcpy_gb_per_s, speed)
    _compare(figures)
    return figures


def _ways(bench: _Bench, cleanup: ExitStack) -> dict[str, _Way]:
    files = FilesPublisher(bench.scratch / "files", bench.model, keep_recent=2)
    deltas = DeltaPublisher(Store(bench.scratch / "deltas"), snapshot_every=1000)
    shm = cleanup.enter_context(ShmPublisher())
    collective = cleanup.enter_context(CollectivePublisher())
    adopted = cleanup.enter_context(ShmPublisher(keep=1))
    trainer = {
        name: torch.nn.Parameter(tensor.clone(), requires_grad=False)
        for name, tensor in bench.policies[0].items()
    }
    adopted.adopt(trainer)

    def step(state: State) -> None:
        for name, parameter in trainer.items():
            parameter.data.copy_(state[name])

    def moved(offer: Offer) -> float:
        written = deltas.versions.read_manifest(offer.version).delta
        return 1.0 if written is None else written.size / offer.nbytes

    ways = {
        "files": _Way(lambda version, state: files.publish(version, state.items())),
        "shm": _Way(lambda version, _: adopted.publish(version), before=step),
        "shm_copied": _Way(lambda version, state: shm.publish(version, state.items())),
        "collective": _Way(
            lambda version, state: collective.publish(version, state.items(), receivers=1)
        ),
        "delta": _Way(
            lambda version, state: deltas.publish(version, state.items()),
            turns=(0, 2),
            moved=moved,
        ),
    }
    if find_spec("nixl_cu12") is not None:
        nixl = cleanup.enter_context(NixlPublisher(secret=bench.stack.weights_secret))
        ways["nixl"] = _Way(lambda version, state: nixl.publish(version, state.items()))
    return ways


def _compare(figures: RefitFigures) -> None:
    stock = figures.transports["stock"]
    for one in figures.transports.values():
        one.pause_fraction = one.pause_seconds / one.refit_seconds
        one.ratio_to_memcpy = one.gb_per_s / figures.memcpy_gb_per_s
        one.speedup_over_stock = stock.seconds / one.seconds
        one.refit_speedup_over_stock = stock.refit_seconds / one.refit_seconds
        one.pause_over_stock = one.pause_seconds / stock.pause_seconds


def _told(name: str, one: TransportFigures) -> str:
    return f"{name}: {one.refit_seconds:.3f} s, of which paused {one.pause_seconds:.3f} s"


def memcpy_speed(state: State) -> float:
    """GB/s of a memcpy of the same tensors, on one thread of this process, the best of some."""
    sources = [raw_bytes(tensor).numpy() for tensor in state.values()]
    copies = [np.zeros_like(source) for source in sources]
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        for copy, source in zip(copies, sources, strict=True):
            copy[:] = source
        best = min(best, time.perf_counter() - began)
    return float(sum(tensor.nbytes for tensor in state.values()) / best / 1e9)


# --- the model ------------------------------------------------------------------------------------


def build_model(directory: Path, megabytes: int) -> Path:
    """A random Qwen3 in bfloat16 with the layers of the 1.7B, 100 MB each, and the demo's
    tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    base = build_base(cache_dir() / "demo")
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=max(1, -(-(megabytes - 33) // 100)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory)
    return directory


def load_policy(model: Path) -> State:
    from rollway.engine.receivers import checkpoint_tensors

    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model)}


def _other(state: State) -> State:
    """Clearly another policy."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in state.items()
    }


def _stepped(state: State) -> State:
    """The same after a small step: some elements have changed."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, tensor in state.items():
        chosen = torch.rand(tensor.shape, generator=generator) < CHANGED
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        found[name] = torch.where(chosen, tensor + 0.1 * noise, tensor)
    return found


def _copy_config(model: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, directory)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value
