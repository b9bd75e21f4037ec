"""`rollway bench …`: measurements, as ratios within one run."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollway.api import make_spec
from rollway.bench import router_command, verl_command
from rollway.errors import UsageError
from rollway.extras import require


def add_grammar(bench: argparse.ArgumentParser) -> None:
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    child = benches.add_parser("fleet", help="list and refit many workers, against one")
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument("stack", type=Path, help="a stack file")
    child.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override")
    child.set_defaults(command=fleet)
    child = benches.add_parser("router", help="prefix hits and times, by how requests are routed")
    router_command.add_grammar(child)
    child.set_defaults(command=router)
    child = benches.add_parser("refit", help="new weights into a worker, over every transport")
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument("--megabytes", type=int, default=520, help="size of the model")
    child.add_argument("transports", nargs="*", metavar="TRANSPORT", help="only these (and stock)")
    child.set_defaults(command=refit)
    child = benches.add_parser("rollout", help="the client and the gateway, against others")
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument("--no-real", action="store_true", help="mockers only, no real engine")
    child.set_defaults(command=rollout)
    child = benches.add_parser("gateway", help="many requests; memory and files must not grow")
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument("stack", nargs="?", type=Path, help="a stack file; none: a stand-in")
    child.add_argument("--requests", type=int, default=100_000, help="how many (default 100000)")
    child.add_argument("--agents", type=int, default=64, help="how many at once (default 64)")
    child.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override")
    child.set_defaults(command=gateway)
    child = benches.add_parser("verl", help="prefix hits of verl's agent loops, by affinity")
    verl_command.add_grammar(child)
    child.set_defaults(command=verl)
    child = benches.add_parser("plan", help="planning weight transfers of large models")
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.set_defaults(command=plan)
    child = benches.add_parser("gpu", help="weights on a GPU, against a copy of its memory")
    child.add_argument("--json", action="store_true", help="one JSON object on stdout")
    child.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    child.add_argument("--megabytes", type=int, default=4096, help="size of each model")
    child.set_defaults(command=gpu)


def fleet(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.fleet import bench_fleet
    from rollway.demo.model import demo_path

    spec = make_spec(options.stack, overrides=[*demo_path(options.stack), *options.set])
    figures = asyncio.run(bench_fleet(spec)).as_json()
    if options.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value}")
    return 0


def refit(options: argparse.Namespace) -> int:
    require("torch", "transformers")
    from rollway.bench.refit import bench_refit

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
        figures = asyncio.run(
            bench_refit(
                Path(scratch), say, megabytes=options.megabytes, wanted=tuple(options.transports)
            )
        ).as_json()
    if options.json:
        print(json.dumps(figures))
        return 0
    print(f"memcpy {figures['memcpy_gb_per_s']:.1f} GB/s, {figures['model_bytes'] / 1e6:.0f} MB")
    for name, one in figures["transports"].items():
        print(
            f"{name}: {one['refit_seconds']:.3f} s, paused {one['pause_seconds']:.3f} s; moved in "
            f"{one['seconds']:.3f} s ({one['gb_per_s']:.2f} GB/s, {one['ratio_to_memcpy']:.2f} of "
            f"memcpy, {one['speedup_over_stock']:.1f} times stock)"
        )
    return 0


def router(options: argparse.Namespace) -> int:
    if options.stack is not None and not options.no_live:
        require("torch", "transformers")
    return router_command.run_command(options)


def rollout(options: argparse.Namespace) -> int:
    require("torch", "transformers", "openai")
    from rollway.bench.rollout import RolloutFigures, bench_gateway, bench_rollout
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    path = str(build_base(cache_dir() / "demo"))
    # As fast as it can: then it is the clients that are measured.
    mocked = {"max-model-len": 40_000, "speedup-ratio": 1000.0}
    real = {"dtype": "float32", "max-model-len": 2048, "max-num-seqs": 64}

    def spec(engine: str, args: dict[str, Any]) -> Any:
        model = {"path": path, "name": "tiny", "engine": engine, "replicas": 1, "args": args}
        return make_spec({"name": f"bench-{engine}", "models": [model]})

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    found = RolloutFigures()
    found.clients += asyncio.run(bench_rollout(spec("mocker", mocked), say))
    if not options.no_real:
        found.clients += asyncio.run(bench_rollout(spec("vllm", real), say))
        with tempfile.TemporaryDirectory(prefix="rollway-bench-") as scratch:
            found.gateway = asyncio.run(bench_gateway(spec("vllm", real), Path(scratch), say))
    print(json.dumps(found.as_json()) if options.json else _shown(found.as_json()))
    return 0


def gateway(options: argparse.Namespace) -> int:
    if options.requests < 1000 or options.agents < 1:
        raise UsageError("Too few to tell.", "Give at least 1000 requests and one agent.")
    require("torch", "transformers")
    from rollway.bench.gateway import bench_gateway_load, shown
    from rollway.demo.model import build_base, demo_path
    from rollway.stack.preset import cache_dir

    spec = None
    if options.stack is not None:
        spec = make_spec(options.stack, overrides=[*demo_path(options.stack), *options.set])

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    load = asyncio.run(
        bench_gateway_load(
            spec,
            requests=options.requests,
            agents=options.agents,
            tokenizer=str(build_base(cache_dir() / "demo")),
            say=say,
        )
    )
    print(json.dumps(load.as_json()) if options.json else shown(load.as_json()))
    return 0 if load.flat else 1


def verl(options: argparse.Namespace) -> int:
    require("torch", "transformers", "dynamo")
    return verl_command.run_command(options)


def plan(options: argparse.Namespace) -> int:
    from rollway.bench.plan import bench_plan, shown

    figures = bench_plan()
    print(json.dumps(figures) if options.json else shown(figures))
    return 0


def gpu(options: argparse.Namespace) -> int:
    require("torch")
    from rollway.bench.gpu import run_command

    return run_command(options)


def _shown(figures: dict[str, Any]) -> str:
    lines = []
    for one in figures["clients"]:
        lines.append(
            f"{one['engine']}, {one['load']}: {one['requests_per_second']['rollway']} requests/s, "
            f"{one['ratio_to_bare']} of bare, {one['ratio_to_openai']} of openai"
        )
    for engine, one in figures["engines"].items():
        lines.append(
            f"{engine}, all loads: {one['ratio_to_bare']} of bare, {one['ratio_to_openai']} of "
            f"openai, which takes {one['cpu_ratio_to_openai']} times the CPU"
        )
    for one in figures["gateway"]:
        lines.append(
            f"gateway, {one['sessions']} sessions, {one['prompt_tokens']} tokens: "
            f"{one['overhead_ms']} ms more per request"
        )
    return "\n".join(lines)
