"""Measure refits as NeMo-RL's driver asks for them: `Synchronizer.sync_weights`, three workers.

    round 1     stock   files   shm   nixl       two refits each, of which the second counts
    round 2     files   shm   nixl   stock       ratios are taken within a round, then their median

The policy has one rank, in this process, so that nothing is gathered. That favours `files`, for
which a policy of several ranks gathers every tensor. Two sets of weights alternate, and after each
refit the workers' greedy answers are compared with those after Dynamo's own update.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rollway.bench import Say
from rollway.bench.refit import PACKED, PACKING_SECONDS, STOCK, State, build_model, change_all
from rollway.errors import RolloutError
from rollway.fleet.discovery import Worker
from rollway.integrations.nemo_rl.config import WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.publish import ShardPublishing
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from rollway.rollout.sampling import Sampling
from rollway.stack.state import StackDir
from rollway.versions import taint_of

WORKERS = 3
ROUNDS = 3
MEGABYTES = 520
_SYNCS: dict[str, dict[str, Any]] = {
    "files": {"method": "files"},
    "shm": {"method": "shm", "shards": True},
    "nixl": {"method": "nixl", "shards": True},
}
_FAST = ("shm", "nixl")
Row = dict[str, float]


def make_config(model: Path | str, name: str, args: dict[str, Any], workers: int) -> dict[str, Any]:
    """Return `policy.generation` for a stack of this many workers."""
    stack = {"name": name, "models": [{"args": args}]}
    return {
        "backend": "dynamo",
        "model_name": str(model),
        "dynamo_cfg": {"stack": stack, "workers": workers},
        "vllm_cfg": {},
        "max_new_tokens": 32,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "_pad_token_id": 0,
    }


class Policy(ShardPublishing):
    """NeMo-RL's policy of one rank, which is in this process: also its worker group."""

    rank = 0

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.worker_group = self
        self.workers = [self]
        self._engine: Any = None

    def run_all_workers_single_data(self, name: str, **fields: Any) -> list[Any]:
        return [getattr(self, name)(**fields)]

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any]) -> Any:
        """Answer as NeMo-RL's policy workers do."""
        match checkpoint_method:
            case "init_checkpoint_engine":
                module, name = method_kwargs["backend"].split(":")
                size, options = method_kwargs["bucket_size_bytes"], method_kwargs["engine_kwargs"]
                kind = getattr(importlib.import_module(module), name)
                self._engine = kind(bucket_size=size, **options)
                return None
            case "init_checkpoint_engine_process_group":
                return self._engine.init_policy_process_group(worker_rank=0, **method_kwargs)
            case "send_weights_via_checkpoint_engine":
                named = ((n, p.detach()) for n, p in self.model.named_parameters())
                return asyncio.run(self._engine.send_weights(named))
            case "finalize_checkpoint_engine":
                return self._engine.finalize()
        return getattr(self._engine, checkpoint_method)(**method_kwargs)


def measure_refits(scratch: Path, say: Say, figures: dict[str, Any]) -> None:
    """Refit by each transport and by Dynamo's own update; fill `figures` after every round."""
    from transformers import AutoModelForCausalLM

    say(f"refit: building a model of about {MEGABYTES} MB, starting {WORKERS} workers")
    path = build_model(scratch / "model", MEGABYTES)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    args = {"dtype": "bfloat16", "max-model-len": 512, "max-num-seqs": 16}
    generation = Generation(None, make_config(path, "bench-nemo-rl", args, WORKERS))
    synchronizers: dict[str, Synchronizer] = {}
    try:
        for name, sync in _SYNCS.items():
            policy = Policy(model)
            synchronizers[name] = Synchronizer(policy, generation, WeightSync(**sync), get=list)
        bench = _Bench(generation, model, path, scratch, synchronizers)
        rounds = []
        for number, rows in enumerate(bench.run_rounds(say)):
            if number:  # the first one opens and maps memory
                rounds.append(rows)
                figures |= compare_refits(rounds, bench.model_bytes)
    finally:
        for synchronizer in synchronizers.values():
            synchronizer.shutdown()
        generation.shutdown()


def compare_refits(rounds: Sequence[dict[str, Row]], model_bytes: int) -> dict[str, Any]:
    """Return medians, and the ratios of the fastest transport."""
    rows = {
        name: {field: median(row[name][field] for row in rounds) for field in ("seconds", "pause")}
        for name in rounds[0]
    }
    fastest = min(_FAST, key=lambda name: rows[name]["seconds"])
    refits = [row[fastest]["seconds"] / row["files"]["seconds"] for row in rounds]
    pauses = [row[fastest]["pause"] / row[STOCK]["pause"] for row in rounds]
    return {
        "workers": WORKERS,
        "model_bytes": model_bytes,
        "transports": rows,
        "fastest": fastest,
        "refit_ratio": median(refits),
        "refit_ratios": refits,
        "pause_ratio": median(pauses),
        "pause_ratios": pauses,
    }


class _Bench:
    def __init__(
        self,
        generation: Generation,
        model: Any,
        path: Path,
        scratch: Path,
        synchronizers: dict[str, Synchronizer],
    ) -> None:
        self._generation, self._model, self._path = generation, model, path
        self._scratch, self._synchronizers = scratch, synchronizers
        first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self._policies: list[State] = [first, change_all(first)]
        self.model_bytes = sum(tensor.nbytes for tensor in first.values())
        self._answers: list[list[list[int]]] = []

    def run_rounds(self, say: Say) -> Iterator[dict[str, Row]]:
        for index in range(2):
            self._update_by_stock(index)
            self._answers.append(self._answer())
        names = [STOCK, *self._synchronizers]
        for number in range(ROUNDS + 1):
            rows: dict[str, Row] = {}
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name == STOCK:
                    rows[name] = self._update_by_stock(number % 2)
                else:
                    # The first refit follows one of another transport, which no run has.
                    for index in (0, 1) if number % 2 else (1, 0):
                        rows[name] = self._refit(name, index)
                row = rows[name]
                say(f"refit, {name}: {row['seconds']:.3f} s, paused {row['pause']:.3f} s")
            yield rows

    def _refit(self, name: str, index: int) -> Row:
        with torch.no_grad():
            for key, parameter in self._model.named_parameters():
                parameter.copy_(self._policies[index][key])
        packings = self._count_packings()
        began = time.perf_counter()
        report = self._synchronizers[name].sync_weights()
        seconds = time.perf_counter() - began
        if self._answer() != self._answers[index]:
            raise RolloutError(f"The workers answer differently over {name} than by Dynamo's own.")
        self._wait_until_packed([count + 1 for count in packings])
        return {"seconds": seconds, "pause": report["pause_seconds"]}

    def _update_by_stock(self, index: int) -> Row:
        """Update all workers at once, as Dynamo's guide describes it for one."""
        from safetensors.torch import save_file

        connection = self._generation.connection
        fleet, admin = connection.fleet, connection.fleet.admin
        directory = self._scratch / "stock"
        shutil.copytree(self._path, directory, ignore=shutil.ignore_patterns("*.safetensors"))

        async def update(worker: Worker, version: int) -> None:
            await admin.pause(worker)
            await admin.update_from_disk(worker, directory, version)
            await admin.resume(worker)

        async def update_all() -> float:
            await fleet.read_versions()
            version = 1 + (fleet.versions.newest or 0)
            workers = await fleet.workers()
            began = time.perf_counter()
            await asyncio.gather(*(update(worker, version) for worker in workers))
            seconds = time.perf_counter() - began
            for worker in workers:  # without the taint of its version, it gets no requests
                await admin.set_taints(worker, [taint_of(version)])
            await fleet.read_versions()
            return seconds

        began = time.perf_counter()
        save_file(self._policies[index], directory / "model.safetensors", {"format": "pt"})
        saved = time.perf_counter() - began
        pause = connection.run(update_all())
        shutil.rmtree(directory)
        return {"seconds": saved + pause, "pause": pause}

    def _answer(self) -> list[list[int]]:
        greedy = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        connection = self._generation.connection

        async def ask() -> list[list[int]]:
            prompts = [list(range(10 + n, 40 + n)) for n in range(2 * WORKERS)]
            asked = (connection.rollouts.generate(prompt, greedy) for prompt in prompts)
            return [rollout.token_ids for (rollout,) in await asyncio.gather(*asked)]

        return connection.run(ask())

    def _wait_until_packed(self, wanted: list[int]) -> None:
        """Wait until the workers have packed their layers: the next measurement needs the cores."""
        deadline = time.perf_counter() + PACKING_SECONDS
        while any(a < b for a, b in zip(self._count_packings(), wanted, strict=True)):
            if time.perf_counter() > deadline:
                raise RolloutError("A worker does not say that it has packed its layers.")
            time.sleep(0.05)

    def _count_packings(self) -> list[int]:
        state = StackDir(self._generation.connection.stack.name).read()
        assert state is not None
        logs = [process.log for process in state.processes if process.role == "worker"]
        return [len(PACKED.findall(Path(log).read_text(errors="replace"))) for log in logs]
