"""The arguments of `rollway bench …`, also `python -m benchmarks …`.

Each command is a module, whose `run` returns the exit code and the figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rollway.cli import run_command
from rollway.cli.arguments import SET, add_quiet, add_set, add_spec, make_group
from rollway.errors import require

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command: its name, its help, and the packages that it needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; return its exit status."""
    text = "measure, as ratios within one run"
    parser = argparse.ArgumentParser(prog="rollway bench", description=text)
    make = make_group(parser)

    def add(name: str, text: str, *packages: str) -> argparse.ArgumentParser:
        def run(options: argparse.Namespace) -> int:
            from rollway.cli.output import print_result  # not for `--help`

            require("cpu", *packages)
            module = import_module(f"benchmarks.{name.replace('-', '_')}")
            code, figures = module.run(options)
            print_result(options, figures, _print_lines)
            return int(code)

        return make(name, run, text)

    _add_commands(add)
    return run_command(parser, arguments)


def _print_lines(value: Any, name: str = "") -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _print_lines(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, entry in enumerate(value):
            _print_lines(entry, f"{name}.{number}")
    else:
        print(f"{name}: {value}")


def _add_commands(add: Add) -> None:
    torch = ("torch", "transformers")
    engine = (*torch, "vllm", "dynamo")
    parser = add("fleet", "list and refit many workers, against one", *torch)
    add_spec(parser, "a file")
    parser = add("router", "prefix hits and times, by how requests are routed")
    add_spec(parser, "a stack file (without: only the replay)")
    parser.add_argument("--workers", default="4,8,16,32", metavar="N,M", help="default 4,8,16,32")
    parser.add_argument("--groups", type=int, help="prompts, of 8 rollouts each (2 per worker)")
    parser.add_argument("--no-live", action="store_true", help="do not start stacks")
    parser.add_argument("--no-replay", action="store_true", help="skip the offline replay")
    add_quiet(parser)
    parser = add("curator", "Curator's own backend and ours, one pipeline each", *torch, "dynamo")
    _add_python(parser, "curator", "Curator")
    parser = add("prime-rl", "prime-rl's clients through the server, and without", *engine)
    _add_python(parser, "prime-rl", "renderers")
    add_only(parser)
    parser = add("refit", "load new weights into a worker, over every transport", *torch)
    parser.add_argument("--megabytes", type=int, default=520, help="size of the model")
    text = "only these (and stock)"
    parser.add_argument("transports", nargs="*", metavar="TRANSPORT", help=text)
    parser = add("rollout", "the client and the gateway, against others", *torch, "openai")
    parser.add_argument("--no-real", action="store_true", help="mockers only, no real engine")
    parser = add("gateway", "many requests; memory and files must not grow", *torch)
    add_spec(parser, "a stack file; a stand-in without it")
    parser.add_argument("--requests", type=int, default=100_000, help="how many (default 100000)")
    parser.add_argument("--agents", type=int, default=64, help="how many at once (default 64)")
    parser = add("observe", "recording, dashboard and traces, against none of it")
    add_only(parser)
    parser.add_argument("--rounds", type=int, default=20, help="of rollouts (default 20)")
    parser.add_argument("--workers", type=int, default=2, help="of vLLM (default 2)")
    parser.add_argument("--tokens", type=int, default=32, help="of vLLM's answers (default 32)")
    parser.add_argument("--no-traces", action="store_true", help="all of it but traces")
    add("plan", "planning weight transfers of large models")
    parser = add("ray", "stacks on a Ray cluster, against one machine")
    add_spec(parser, "a stack file (without: only the planning)")
    parser.add_argument("--nodes", type=int, default=4, help="raylets that it starts (default 4)")
    add_only(parser)
    _add_k8s(add("k8s", "runs on a cluster, against the fewest requests"))
    _add_exactness(add("exactness", "trainer against engine, split by cause", *engine))
    _add_gpu_engine(add("gpu-engine", "refits of a model of real size", *engine))


def _add_k8s(parser: argparse.ArgumentParser) -> None:
    text = "the run that is measured: one graph and a job"
    parser.add_argument("--infra", type=Path, required=True, metavar="FILE", help=text)
    add_set(parser, "override a field of the infra file; repeatable")
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG")
    parser.add_argument("--namespace", "-n", help="default: the context's")
    add_only(parser)


def _add_exactness(parser: argparse.ArgumentParser) -> None:
    sizes, text = ["tiny", "2b", "8b"], "size of the model (default tiny)"
    parser.add_argument("--model", choices=sizes, default="tiny", help=text)
    dtypes, text = ["bfloat16", "float32"], "of trainer and engine (default bfloat16)"
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help=text)
    text = "the engine's projection to the vocabulary: in the model's dtype, or float32"
    parser.add_argument("--head", choices=["model", "float32"], default="model", help=text)
    parser.add_argument("--rollouts", type=int, default=32, help="at once (default 32)")
    parser.add_argument("--tokens", type=int, default=64, help="of each rollout (default 64)")
    text = "vLLM's batch-invariant mode (needs a GPU): re-scoring must be bit-equal"
    parser.add_argument("--batch-invariant", action="store_true", help=text)
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=SET)


def _add_gpu_engine(parser: argparse.ArgumentParser) -> None:
    sizes, text = ["tiny", "2b", "8b"], "size of the model (default 2b); tiny also runs on a CPU"
    parser.add_argument("--model", choices=sizes, default="2b", help=text)
    add_only(parser)
    text = "how many run at once (default 256)"
    parser.add_argument("--rollouts", type=int, default=256, help=text)
    parser.add_argument("--tokens", type=int, default=512, help="of each rollout (default 512)")
    parser.add_argument("--repeat", type=int, default=2, help="how often (default 2)")
    text = "of the part colocated, at each level (default 20)"
    parser.add_argument("--steps", type=int, default=20, help=text)
    text = "of the GPU's memory that is filled before the first refit (default 0)"
    parser.add_argument("--filler-gib", type=float, default=0.0, metavar="GIB", help=text)
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    text = "under load, publish from the trainer's own memory (cuda_ipc)"
    parser.add_argument("--in-place", action="store_true", help=text)
    text = "the engine's share of the GPU (default 0.4)"
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help=text)
    text = "for the tokens that are lost in an hour (default 60)"
    parser.add_argument("--refits-per-hour", type=float, default=60.0, help=text)
    text = "start no part after this time (default: no limit)"
    parser.add_argument("--seconds", type=float, metavar="LIMIT", help=text)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=SET)


def _add_python(parser: argparse.ArgumentParser, trainer: str, package: str) -> None:
    python = Path(f".venv-{trainer}/bin/python")
    text = f"interpreter of the environment with {package} ({python})"
    parser.add_argument(f"--{trainer}-python", type=Path, default=python, metavar="PATH", help=text)


def add_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these parts")


if __name__ == "__main__":
    sys.exit(main())
