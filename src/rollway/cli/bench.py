"""`rollway bench …`: measurements, as ratios within one run."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollway.api import make_spec
from rollway.cli.output import get_spec_file, print_json, print_progress, print_result, print_table
from rollway.config import StackSpec
from rollway.errors import UsageError, require

if TYPE_CHECKING:
    from rollway.bench.verl import ArmFigures, VerlReport


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
    limit = f"at most {figures['memcpy_ratio_limit']:.2f} of it with a checksum"
    lines = [f"memcpy {figures['memcpy_gb_per_s']:.1f} GB/s, {limit}, {size}"]
    for name, entry in figures["transports"].items():
        lines.append(
            f"{name}: {entry['refit_seconds']:.3f} s, paused {entry['pause_seconds']:.3f} s; "
            f"moved in {entry['seconds']:.3f} s ({entry['gb_per_s']:.2f} GB/s, "
            f"{entry['ratio_to_memcpy']:.2f} of memcpy); everything "
            f"{entry['refit_over_stock']:.2f} times stock"
        )
    return "\n".join(lines)


def disaggregated(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.disaggregated import bench_disaggregated

    args = {"dtype": "float32", "max-model-len": 2048, "stream-interval": 1}
    model = {"path": str(_build_demo_model()), "name": "tiny", "args": args}
    apart = {**model, "serving": "disaggregated", "prefill": {}, "decode": {}}
    split = make_spec({"name": "bench-apart", "models": [apart]})
    whole = make_spec({"name": "bench-whole", "models": [{**model, "replicas": 2}]})

    def to_text(figures: dict[str, Any]) -> str:
        arms = "\n".join(
            f"{arm['serving']}: first token {arm['first_token_ms']} ms, "
            f"{arm['requests_per_second']} requests/s, {arm['tokens_per_second']} tokens/s"
            for arm in figures["arms"]
        )
        difference = figures["largest_logprob_difference"]
        return f"{arms}\nsame tokens; largest difference of a log-prob {difference}"

    figures = asyncio.run(bench_disaggregated(split, whole, print_progress))
    _print_figures(options, figures, to_text)
    return 0


def rollout(options: argparse.Namespace) -> int:
    require("torch", "transformers", "openai")
    from rollway.bench.rollout import RolloutFigures, bench_gateway, bench_rollout

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
    _print_figures(options, figures.as_json(), _describe_rollouts)
    return 0


def _describe_rollouts(figures: dict[str, Any]) -> str:
    clients = [
        f"{entry['engine']}, {entry['load']}: {entry['requests_per_second']['rollway']} "
        f"requests/s, {entry['ratio_to_bare']} of bare, {entry['ratio_to_openai']} of openai"
        for entry in figures["clients"]
    ]
    engines = [
        f"{engine}, all loads: {entry['ratio_to_bare']} of bare, {entry['ratio_to_openai']} of "
        f"openai, which needs {entry['cpu_ratio_to_openai']} times the CPU"
        for engine, entry in figures["engines"].items()
    ]
    gateways = [
        f"gateway, {entry['sessions']} sessions, {entry['prompt_tokens']} tokens: "
        f"{entry['overhead_ms']} ms more per request"
        for entry in figures["gateway"]
    ]
    return "\n".join(clients + engines + gateways)


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


# --- router ----------------------------------------------------------------------------------


def router(options: argparse.Namespace) -> int:
    from rollway.bench.router import RouterReport, bench_live, bench_replay

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
    print_result(options, report.as_json(), _print_routings)
    return 0


def parse_counts(text: str) -> list[int]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise UsageError(
            f"`--workers {text}` is not a list of numbers.", "Give, for example, 4,32."
        )
    return [int(number) for number in numbers]


def _print_routings(report: dict[str, Any]) -> None:
    columns = ("", "workers", "routing", "hits", "first token, mean", "makespan", "requests")
    rows = (
        (
            part,
            str(figures["workers"]),
            figures["routing"],
            f"{figures['hit_rate']:.3f}",
            f"{figures['ttft_mean_seconds']:.3f} s",
            f"{figures['makespan_seconds']:.2f} s",
            str(figures["requests"]),
        )
        for part in ("live", "replay")
        for figures in report[part]
    )
    print_table(columns, rows, text_columns=3)
    for name in ("preset_hit_rate_at_32", "preset_worst_ratio", "preset_never_slower"):
        print(f"{name.replace('_', ' ')}: {report[name]}")


# --- verl ------------------------------------------------------------------------------------

_VERL_COLUMNS = (
    *("load", "affinity", "prefix hits", "first turns", "later turns", "with its group"),
    *("ms per token", "against off"),
)
BEGIN, END = "<!-- rollway bench verl -->", "<!-- end -->"
"""Lines around the table in the docs."""


def verl(options: argparse.Namespace) -> int:
    require("torch", "transformers", "dynamo")
    from rollway.bench.verl import ARMS, bench_verl
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
        rows = (_format_arm(report, row) for row in report.rows)
        print_table(_VERL_COLUMNS, rows, text_columns=2)
    return 0


def format_markdown(report: VerlReport) -> str:
    lines = ["|" + "|".join(f" {name} " for name in _VERL_COLUMNS) + "|"]
    lines.append("|---|---|" + "---:|" * (len(_VERL_COLUMNS) - 2))
    lines += ["| " + " | ".join(_format_arm(report, row)) + " |" for row in report.rows]
    return "\n".join(lines)


def replace_table(text: str, table: str) -> str:
    """Replace the table between the marker lines of a document."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(
            "The document has no place for the table.", f"Add the lines {BEGIN} and {END}."
        )
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _format_arm(report: VerlReport, row: ArmFigures) -> tuple[str, ...]:
    from rollway.bench.verl import LOADS

    prompts = next(load.prompts for load in LOADS if load.name == row.load)
    low, high = row.spread("hit_rate")
    fast, slow = row.spread("ms_per_token")
    ratio = report.time_ratio(row)
    return (
        f"{prompts} prompts, {row.load}",
        row.arm,
        f"{row.mean('hit_rate'):.3f} ({low:.3f} to {high:.3f})",
        f"{row.mean('first_turns'):.3f}",
        f"{row.mean('later_turns'):.3f}",
        f"{row.mean('together'):.2f}",
        f"{row.mean('ms_per_token'):.2f} ({fast:.2f} to {slow:.2f})",
        "" if ratio is None else f"{ratio:.2f}",
    )
