"""`rollway bench …`: measurements, as ratios within one run."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollway.api import make_spec
from rollway.cli.grammar import get_spec_file
from rollway.cli.output import print_json, print_progress
from rollway.config import StackSpec
from rollway.errors import UsageError
from rollway.extras import require


def _print_figures(
    options: argparse.Namespace, figures: Any, to_text: Callable[[Any], str]
) -> None:
    if options.json:
        print_json(figures)
    else:
        print(to_text(figures))


def _read_spec(options: argparse.Namespace) -> StackSpec | None:
    """Read the stack file, in which `path: demo` is the demo's model."""
    from rollway.demo.model import demo_path

    file = get_spec_file(options)
    if file is None:
        return None
    return make_spec(file, overrides=[*demo_path(file), *options.set])


def fleet(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.fleet import bench_fleet

    spec = _read_spec(options)
    if spec is None:
        raise UsageError("No stack is named.", "Give a stack file: rollway bench fleet -f FILE.")

    def to_text(figures: dict[str, Any]) -> str:
        return "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in figures.items())

    _print_figures(options, asyncio.run(bench_fleet(spec)).as_json(), to_text)
    return 0


def router(options: argparse.Namespace) -> int:
    from rollway.bench import router_command

    options.stack = get_spec_file(options)
    if options.stack is not None and not options.no_live:
        require("torch", "transformers")
    return router_command.run_command(options)


def refit(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.refit import bench_refit

    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        figures = asyncio.run(
            bench_refit(
                Path(scratch),
                print_progress,
                megabytes=options.megabytes,
                wanted=tuple(options.transports),
            )
        )
    _print_figures(options, figures.as_json(), _describe_refits)
    return 0


def _describe_refits(figures: dict[str, Any]) -> str:
    size = f"{figures['model_bytes'] / 1e6:.0f} MB"
    lines = [f"memcpy {figures['memcpy_gb_per_s']:.1f} GB/s, {size}"]
    for name, entry in figures["transports"].items():
        lines.append(
            f"{name}: {entry['refit_seconds']:.3f} s, paused {entry['pause_seconds']:.3f} s; "
            f"moved in {entry['seconds']:.3f} s ({entry['gb_per_s']:.2f} GB/s, "
            f"{entry['ratio_to_memcpy']:.2f} of memcpy, {entry['speedup_over_stock']:.1f} times "
            "stock)"
        )
    return "\n".join(lines)


def rollout(options: argparse.Namespace) -> int:
    require("torch", "transformers", "openai")
    from rollway.bench.rollout import RolloutFigures, bench_gateway, bench_rollout
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    path = str(build_base(cache_dir() / "demo"))
    # A mocker that answers as fast as it can, so that the clients are measured.
    mocked = {"max-model-len": 40_000, "speedup-ratio": 1000.0}
    real = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 64}

    def spec(engine: str, args: dict[str, Any]) -> StackSpec:
        model = {"path": path, "name": "tiny", "engine": engine, "replicas": 1, "args": args}
        return make_spec({"name": f"bench-{engine}", "models": [model]})

    figures = RolloutFigures()
    figures.clients += asyncio.run(bench_rollout(spec("mocker", mocked), print_progress))
    if not options.no_real:
        figures.clients += asyncio.run(bench_rollout(spec("vllm", real), print_progress))
        with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
            figures.gateway = asyncio.run(
                bench_gateway(spec("vllm", real), Path(scratch), print_progress)
            )
    _print_figures(options, figures.as_json(), _describe_rollouts)
    return 0


def _describe_rollouts(figures: dict[str, Any]) -> str:
    lines = []
    for entry in figures["clients"]:
        lines.append(
            f"{entry['engine']}, {entry['load']}: {entry['requests_per_second']['rollway']} "
            f"requests/s, {entry['ratio_to_bare']} of bare, {entry['ratio_to_openai']} of openai"
        )
    for engine, entry in figures["engines"].items():
        lines.append(
            f"{engine}, all loads: {entry['ratio_to_bare']} of bare, {entry['ratio_to_openai']} of "
            f"openai, which needs {entry['cpu_ratio_to_openai']} times the CPU"
        )
    for entry in figures["gateway"]:
        lines.append(
            f"gateway, {entry['sessions']} sessions, {entry['prompt_tokens']} tokens: "
            f"{entry['overhead_ms']} ms more per request"
        )
    return "\n".join(lines)


def gateway(options: argparse.Namespace) -> int:
    if options.requests < 1000 or options.agents < 1:
        raise UsageError(
            "That is too little to measure growth.", "Give at least 1000 requests and one agent."
        )
    require("torch", "transformers")
    from rollway.bench.gateway import bench_gateway_load, format_figures
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    load = asyncio.run(
        bench_gateway_load(
            _read_spec(options),
            requests=options.requests,
            agents=options.agents,
            tokenizer=str(build_base(cache_dir() / "demo")),
            say=print_progress,
        )
    )
    _print_figures(options, load.as_json(), format_figures)
    return 0 if load.flat else 1


def verl(options: argparse.Namespace) -> int:
    require("torch", "transformers", "dynamo")
    from rollway.bench import verl_command

    return verl_command.run_command(options)


def plan(options: argparse.Namespace) -> int:
    from rollway.bench.plan import bench_plan, format_figures

    _print_figures(options, bench_plan(), format_figures)
    return 0


def gpu(options: argparse.Namespace) -> int:
    require("torch")
    from rollway.bench.gpu import run_command

    return run_command(options)


def gpu_engine(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from rollway.bench.gpu_engine_command import format_figures, run_command

    code, figures = run_command(options, print_progress)
    _print_figures(options, figures, format_figures)
    return code
