"""`rollway bench …`: measurements, as ratios within one run."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollway.api import make_spec
from rollway.cli.output import get_spec_file, print_json, print_progress, print_result, print_table
from rollway.config import StackSpec
from rollway.errors import UsageError, require


def _print_figures(
    options: argparse.Namespace, figures: dict[str, Any], to_text: Callable[[Any], str]
) -> None:
    print_result(options, figures, lambda result: print(to_text(result)))


def _run_parts(
    options: argparse.Namespace, bench: Any, parts: Sequence[str], to_text: Callable[[Any], str]
) -> int:
    """Run these parts; Ctrl-C prints what was measured until then."""
    code = 0
    try:
        bench.run(parts)
    except KeyboardInterrupt:
        bench.figures["is_interrupted"], code = True, 130
    _print_figures(options, bench.as_json(), to_text)
    return code


def _read_spec(options: argparse.Namespace) -> StackSpec | None:
    """Read the stack file, in which `path: demo` is the demo's model."""
    from rollway.demo.model import demo_path

    file = get_spec_file(options)
    return make_spec(file, overrides=[*demo_path(file), *options.set]) if file else None


def _read_parts(options: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Return the parts that --only names; empty without it."""
    unknown = sorted(set(options.only) - set(known))
    if unknown:
        raise UsageError(f"There is no part `{unknown[0]}`.", f"Parts: {', '.join(known)}.")
    return list(options.only)


def _build_demo_model() -> Path:
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    return build_base(cache_dir() / "demo")


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


def refit(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.refit import bench_refit, format_figures

    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        figures = asyncio.run(
            bench_refit(
                Path(scratch),
                print_progress,
                megabytes=options.megabytes,
                wanted=tuple(options.transports),
            )
        )
    _print_figures(options, figures.as_json(), format_figures)
    return 0


def disaggregated(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.disaggregated import bench_disaggregated, format_figures

    args = {"dtype": "float32", "max-model-len": 2048, "stream-interval": 1}
    model = {"path": str(_build_demo_model()), "name": "tiny", "args": args}
    apart = {**model, "serving": "disaggregated", "prefill": {}, "decode": {}}
    split = make_spec({"name": "bench-apart", "models": [apart]})
    whole = make_spec({"name": "bench-whole", "models": [{**model, "replicas": 2}]})

    figures = asyncio.run(bench_disaggregated(split, whole, print_progress))
    _print_figures(options, figures, format_figures)
    return 0


def rollout(options: argparse.Namespace) -> int:
    require("torch", "transformers", "openai")
    from rollway.bench.rollout import (
        RolloutFigures,
        bench_gateway,
        bench_rollout,
        format_figures,
    )

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
        with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
            figures.gateway = asyncio.run(
                bench_gateway(spec("vllm", real), Path(scratch), print_progress)
            )
    _print_figures(options, figures.as_json(), format_figures)
    return 0


def gateway(options: argparse.Namespace) -> int:
    if options.requests < 1000 or options.agents < 1:
        raise UsageError(
            "That is too little to measure growth.", "Give at least 1000 requests and one agent."
        )
    require("torch", "transformers")
    from rollway.bench.gateway import bench_gateway_load, format_figures

    load = asyncio.run(
        bench_gateway_load(
            _read_spec(options),
            requests=options.requests,
            agents=options.agents,
            tokenizer=str(_build_demo_model()),
            say=print_progress,
        )
    )
    _print_figures(options, load.as_json(), format_figures)
    return 0 if load.flat else 1


def plan(options: argparse.Namespace) -> int:
    from rollway.bench.plan import bench_plan, format_figures

    _print_figures(options, bench_plan(), format_figures)
    return 0


def ray(options: argparse.Namespace) -> int:
    from rollway.bench.ray import PARTS, bench_launching, bench_planning, format_figures

    only = _read_parts(options, PARTS)
    spec = _read_spec(options)
    if spec is None and "launching" in only:
        raise UsageError(
            "No stack is named.", "Give a stack file: rollway bench ray FILE --only launching."
        )
    parts = only or (PARTS if spec is not None else ("planning",))
    figures = {}
    if "planning" in parts:
        figures["planning"] = bench_planning()
    if spec is not None and "launching" in parts:
        run = bench_launching(spec, options.nodes, print_progress)
        figures["launching"] = asyncio.run(run)
    _print_figures(options, figures, format_figures)
    return 0


def k8s(options: argparse.Namespace) -> int:
    require("kubernetes")
    from rollway.bench.k8s import PARTS, Place, bench_k8s, format_figures

    only = _read_parts(options, PARTS)
    place = Place(options.kubeconfig, options.namespace, options.infra, options.set)
    _print_figures(options, bench_k8s(place, tuple(only), print_progress), format_figures)
    return 0


def curator(options: argparse.Namespace) -> int:
    require("torch", "transformers", "dynamo")
    from rollway.bench.curator import bench_curator, format_figures

    python = options.curator_python.absolute()
    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        report = bench_curator(
            python, Path(sys.executable), _build_demo_model(), Path(scratch), print_progress
        )
    _print_figures(options, report.as_json(), format_figures)
    return 0


def prime_rl(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from rollway.bench.prime_rl import PARTS, bench_prime_rl, format_figures

    parts = _read_parts(options, PARTS)
    python = options.prime_rl_python.absolute()
    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        figures = asyncio.run(
            bench_prime_rl(
                python, _build_demo_model(), Path(scratch), print_progress, parts=parts or PARTS
            )
        )
    _print_figures(options, figures, format_figures)
    return 0


def nemo_rl(options: argparse.Namespace) -> int:
    from rollway.bench.nemo_rl import PARTS, NemoRlBench, format_figures

    parts = _read_parts(options, PARTS) or PARTS
    if set(parts) != {"bytes"}:
        require("torch", "transformers", "vllm", "dynamo")
    bench = NemoRlBench(_build_demo_model, print_progress, options.workers, options.tokens)
    return _run_parts(options, bench, parts, format_figures)


def observe(options: argparse.Namespace) -> int:
    from rollway.bench.observe import PARTS, ObserveBench, format_figures

    parts = _read_parts(options, PARTS) or PARTS
    if min(options.rounds, options.workers, options.tokens) < 1:
        raise UsageError("That is too little to measure.", "Give at least 1.")
    bench = ObserveBench(
        _build_demo_model,
        print_progress,
        _read_spec(options),
        options.rounds,
        options.workers,
        options.tokens,
        has_traces=not options.no_traces,
    )
    return _run_parts(options, bench, parts, format_figures)


def gpu(options: argparse.Namespace) -> int:
    require("torch")
    from rollway.bench.gpu import run_command

    return run_command(options)


def gpu_engine(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from rollway.bench.gpu_options import format_figures, run_command

    code, figures = run_command(options, print_progress)
    _print_figures(options, figures, format_figures)
    return code


def exactness(options: argparse.Namespace) -> int:
    require("torch", "transformers", "vllm", "dynamo")
    from rollway.bench.exactness import COLUMNS, ExactnessOptions, format_rows, run_command

    names = ("model", "dtype", "head", "rollouts", "tokens", "batch_invariant", "eager")
    values = {name: getattr(options, name) for name in names}
    code, figures = run_command(
        ExactnessOptions(**values, overrides=tuple(options.set)), print_progress
    )

    def print_rows(figures: dict[str, Any]) -> None:
        print_table(COLUMNS, format_rows(figures))
        names = ("device", "model", "dtype", "head", "cause", "is_bit_equal", "greedy")
        for name in (*names, "told_apart_by_engine", "told_apart_by_trainer"):
            print(f"{name.replace('_', ' ')}: {figures[name]}")

    print_result(options, figures, print_rows)
    return code


def router(options: argparse.Namespace) -> int:
    from rollway.bench.router import COLUMNS, RouterReport, bench_live, bench_replay, format_rows

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

    def print_rows(figures: dict[str, Any]) -> None:
        print_table(COLUMNS, format_rows(figures), text_columns=3)
        for name in ("preset_hit_rate_at_32", "preset_worst_ratio", "preset_never_slower"):
            print(f"{name.replace('_', ' ')}: {figures[name]}")

    print_result(options, report.as_json(), print_rows)
    return 0


def parse_counts(text: str) -> list[int]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise UsageError(
            f"`--workers {text}` is not a list of numbers.", "Give, for example, 4,32."
        )
    return [int(number) for number in numbers]


def verl(options: argparse.Namespace) -> int:
    require("torch", "transformers", "dynamo")
    from rollway.bench.verl import ARMS, bench_verl
    from rollway.bench.verl_table import COLUMNS, format_arm, format_markdown, replace_table
    from rollway.demo.model import copy_bare

    known = [arm.name for arm in ARMS]
    names = [name.strip() for name in options.arms.split(",")] if options.arms else known
    for name in names:
        if name not in known:
            raise UsageError(f"There is no arm `{name}`.", f"Arms are: {', '.join(known)}.")
    arms = [arm for arm in ARMS if arm.name in names]
    if options.write is not None:
        replace_table(options.write.read_text(), "")  # raises before the long measurement
    with ExitStack() as cleanup:
        scratch = options.keep or Path(
            cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rollway-bench-"))
        )
        scratch = scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        model = scratch / "model"
        if not model.is_dir():
            copy_bare(_build_demo_model(), model)
        report = bench_verl(options.verl_python.absolute(), model, scratch, arms, print_progress)
    if options.write is not None:
        options.write.write_text(replace_table(options.write.read_text(), format_markdown(report)))
    if options.json:
        print_json(report.as_json())
    else:
        rows = (format_arm(report, row) for row in report.rows)
        print_table(COLUMNS, rows, text_columns=2)
    return 0
