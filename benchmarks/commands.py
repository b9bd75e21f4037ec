"""`rollway bench …`: measurements, as ratios within one run."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollway.api import make_spec
from rollway.cli.output import get_spec_file, print_progress, print_result
from rollway.errors import UsageError, require
from rollway.spec import StackSpec


def _print(options: argparse.Namespace, figures: dict[str, Any], code: int = 0) -> int:
    """Print figures, as JSON or a line for each; return the exit code."""
    print_result(options, figures, _print_lines)
    return code


def _print_lines(value: Any, name: str = "") -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _print_lines(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, entry in enumerate(value):
            _print_lines(entry, f"{name}.{number}")
    else:
        print(f"{name}: {value}")


def _run_parts(options: argparse.Namespace, bench: Any, parts: Sequence[str]) -> int:
    """Run these parts; Ctrl-C prints what was measured until then."""
    code = 0
    try:
        bench.run(parts)
    except KeyboardInterrupt:
        bench.figures["is_interrupted"], code = True, 130
    return _print(options, bench.as_json(), code)


def _read_spec(options: argparse.Namespace) -> StackSpec | None:
    """Read the stack file, in which `path: demo` is the demo's model."""
    from chaos.target import demo_path

    file = get_spec_file(options)
    return make_spec(file, overrides=[*demo_path(file), *options.set]) if file else None


def _read_parts(options: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Return the parts that --only names; all without it."""
    unknown = sorted(set(options.only) - set(known))
    if unknown:
        raise UsageError(f"There is no part `{unknown[0]}`.", f"Parts: {', '.join(known)}.")
    return list(options.only or known)


def _build_demo_model() -> Path:
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    return build_base(cache_dir() / "demo")


def _make_scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rollway-bench-")


def fleet(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from benchmarks.fleet import bench_fleet

    spec = _read_spec(options)
    if spec is None:
        raise UsageError("No stack is named.", "Give a stack file: rollway bench fleet -f FILE.")
    return _print(options, asyncio.run(bench_fleet(spec)).as_json())


def refit(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from benchmarks.refit import bench_refit

    size, wanted = options.megabytes, tuple(options.transports)
    with _make_scratch() as scratch:
        run = bench_refit(Path(scratch), print_progress, megabytes=size, wanted=wanted)
        return _print(options, asyncio.run(run).as_json())


def rollout(options: argparse.Namespace) -> int:
    require("torch", "transformers", "openai")
    from benchmarks.rollout import RolloutFigures, bench_gateway, bench_rollout

    path = str(_build_demo_model())
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
        with _make_scratch() as scratch:
            run = bench_gateway(spec("vllm", real), Path(scratch), print_progress)
            figures.gateway = asyncio.run(run)
    return _print(options, figures.as_json())


def gateway(options: argparse.Namespace) -> int:
    if options.requests < 1000 or options.agents < 1:
        raise UsageError(
            "That is too little to measure growth.", "Give at least 1000 requests and one agent."
        )
    require("torch", "transformers")
    from benchmarks.gateway import bench_gateway_load

    run = bench_gateway_load(
        _read_spec(options),
        requests=options.requests,
        agents=options.agents,
        tokenizer=str(_build_demo_model()),
        say=print_progress,
    )
    load = asyncio.run(run)
    return _print(options, load.as_json(), 0 if load.flat else 1)


def plan(options: argparse.Namespace) -> int:
    from benchmarks.plan import bench_plan

    return _print(options, bench_plan())


def ray(options: argparse.Namespace) -> int:
    from benchmarks.ray import bench_planning

    _read_parts(options, ("planning",))
    return _print(options, {"planning": bench_planning()})


def curator(options: argparse.Namespace) -> int:
    require("torch", "transformers", "dynamo")
    from benchmarks.curator import bench_curator

    python, engine = options.curator_python.absolute(), Path(sys.executable)
    with _make_scratch() as scratch:
        model = _build_demo_model()
        figures = bench_curator(python, engine, model, Path(scratch), print_progress)
    return _print(options, figures)


def prime_rl(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from benchmarks.prime_rl import PARTS, bench_prime_rl

    parts, python = _read_parts(options, PARTS), options.prime_rl_python.absolute()
    with _make_scratch() as scratch:
        run = bench_prime_rl(
            python, _build_demo_model(), Path(scratch), print_progress, parts=parts
        )
        return _print(options, asyncio.run(run))


def observe(options: argparse.Namespace) -> int:
    from benchmarks.observe import PARTS, ObserveBench

    parts = _read_parts(options, PARTS)
    if min(options.rounds, options.workers, options.tokens) < 1:
        raise UsageError("That is too little to measure.", "Give at least 1.")
    bench = ObserveBench(
        _build_demo_model,
        print_progress,
        options.rounds,
        options.workers,
        options.tokens,
        has_traces=not options.no_traces,
    )
    return _run_parts(options, bench, parts)


def gpu_engine(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from benchmarks.gpu_options import run_command

    code, figures = run_command(options, print_progress)
    return _print(options, figures, code)


def exactness(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from benchmarks.exactness import ExactnessOptions, run_command

    names = ("model", "dtype", "head", "rollouts", "tokens", "batch_invariant", "eager")
    values = {name: getattr(options, name) for name in names}
    chosen = ExactnessOptions(**values, overrides=tuple(options.set))
    code, figures = run_command(chosen, print_progress)
    return _print(options, figures, code)


def router(options: argparse.Namespace) -> int:
    from benchmarks.router import RouterReport, bench_live, bench_replay

    counts = parse_counts(options.workers)
    if options.groups is not None and options.groups < 1:
        raise UsageError(f"--groups is {options.groups}.", "Give at least 1.")
    live = get_spec_file(options) is not None and not options.no_live
    if not live and options.no_replay:
        raise UsageError("There is nothing to measure.", "Give a stack file, or drop --no-replay.")

    def say(message: str) -> None:
        if not options.quiet:
            print_progress(message)

    report = RouterReport()
    if live:
        require("torch", "transformers")
        spec = _read_spec(options)
        assert spec is not None
        report.live = asyncio.run(bench_live(spec, counts, options.groups, say))
    if not options.no_replay:
        report.replay = bench_replay(counts, options.groups, say)
    return _print(options, report.as_json())


def parse_counts(text: str) -> list[int]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise UsageError(
            f"`--workers {text}` is not a list of numbers.", "Give, for example, 4,32."
        )
    return [int(number) for number in numbers]
