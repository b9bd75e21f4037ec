"""The arguments of all commands; large groups have a `…_grammar.py` of their own.

These modules import no command: `command` is "module:function", which `main` imports when it is
chosen. So `rollway --help` loads neither HTTP nor torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import rollway
from rollway.cli.arguments import SET, Add, add_name, add_on, add_quiet, add_spec, port
from rollway.cli.bench_grammar import add_bench_commands
from rollway.cli.k8s_grammar import add_k8s_commands
from rollway.cli.observe_grammar import add_observe_commands


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollway", description="NVIDIA Dynamo as the rollout backend of any RL trainer."
    )
    parser.add_argument("--version", action="version", version=f"rollway {rollway.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add = _make_add(commands)
    _add_stack_commands(add)
    for name, text, add_commands in (
        ("fleet", "list, pause, refit, sleep, watch the workers of a stack", _add_fleet_commands),
        ("weights", "inspect weights, compare them, plan their transfer", _add_weights_commands),
        ("bench", "measure, as ratios within one run", add_bench_commands),
        ("observe", "give a stack to Prometheus, Grafana, Kubernetes", add_observe_commands),
        ("prime-rl", "serve prime-rl's orchestrator and trainer", _add_prime_rl_commands),
        ("nemo-rl", "run NeMo-RL's trainers on a stack", _add_nemo_rl_commands),
        ("k8s", "run inference and training on Kubernetes", add_k8s_commands),
    ):
        group = commands.add_parser(name, help=text, description=text).add_subparsers(
            title="commands", metavar="COMMAND", required=True
        )
        add_commands(_make_add(group))
    _add_gateway(add("gateway", "programs:gateway", "serve an OpenAI endpoint that records tokens"))
    _add_dash(add("dash", "dash:dash", "show a stack, or a recorded run, as a page in the browser"))
    _add_top(add("top", "dash:top", "show a stack, or a recorded run, in the terminal"))
    text = "tell what happened in a recorded run, as one HTML file, or compare two"
    _add_report(add("report", "dash:report", text))
    _add_chaos(add("chaos", "programs:chaos", "refit while things break, and check every token"))
    _add_demo(add("demo", "programs:demo", "train a tiny policy with GRPO on a real stack"))
    return parser


def _make_add(commands: Any) -> Add:
    """Return the function that adds a command to a group; every command has `--json`."""

    def add(name: str, command: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        parser.add_argument("--json", action="store_true", help="print JSON on stdout")
        parser.set_defaults(command=command)
        return parser

    return add


# --- stacks --------------------------------------------------------------------------------


def _add_stack_commands(add: Add) -> None:
    parser = add("up", "stack:up", "start a stack and return when it is ready")
    add_spec(parser, "a stack file (YAML), see docs/stack.md")
    parser.add_argument("--model", help="serve this checkpoint, without a stack file")
    parser.add_argument("--workers", type=int, help="replicas of the first model")
    parser.add_argument("--name", help="name of the stack (default: default)")
    add_on(parser, "where to run it: local (default), ray, or ray=HOST:PORT")
    parser.add_argument("--foreground", action="store_true", help="stay, and stop it on Ctrl-C")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    add_quiet(parser)
    parser = add("status", "stack:status", "show running stacks, processes and weight versions")
    add_name(parser, "one stack, or the address of any frontend; all stacks without it")
    add_on(parser)
    parser = add("logs", "stack:show_logs", "show the log of a process")
    parser.usage = "rollway logs [-h] [-f] [-n LINES] [--json] [NAME] [PROCESS]"
    parser.add_argument(
        "names",
        nargs="*",
        metavar="[NAME] [PROCESS]",
        help="a stack (optional when there is one) and a process (the list of logs without it)",
    )
    add_on(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="wait for new lines")
    parser.add_argument("-n", "--lines", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--name", help=argparse.SUPPRESS)  # from before NAME was positional
    parser = add("down", "stack:down", "stop a stack, and clear what killed stacks left")
    add_name(parser, "a stack; optional when there is one")
    add_on(parser)
    parser.add_argument("--all", action="store_true", help="every stack of this user")
    add_quiet(parser)
    parser = add("doctor", "stack:doctor", "check this machine: versions, ports, memory, GPUs")
    text = "check a stack that runs (NAME, or a frontend's address) with a few short requests"
    parser.add_argument("--stack", nargs="?", const="", metavar="NAME", help=text)
    text = "with --stack: address of the RL worker listing, if it is elsewhere"
    parser.add_argument("--rl-url", help=text)
    text = "list where running stacks (or one) listen, and who can reach them"
    parser.add_argument("--ports", nargs="?", const="", metavar="NAME", help=text)


def _add_prime_rl_commands(add: Add) -> None:
    parser = add("serve", "prime_rl:serve", "look like one prime-rl inference server of any size")
    _add_gateway(parser)
    text = "serve admin calls here instead, and not at --port (0 for a free one)"
    parser.add_argument("--admin-port", type=port, help=text)
    text = "where --admin-port listens (default: loopback)"
    parser.add_argument("--admin-host", default="127.0.0.1", help=text)
    text = "the directory that the trainer's relative paths begin at"
    parser.add_argument("--output-dir", type=Path, help=text)
    markers = ["either", "STABLE", ".finished"]
    text = "the file that marks a broadcast as complete (default: either of the two)"
    parser.add_argument("--marker", choices=markers, default="either", help=text)
    text = "what the trainer broadcasts by (default: as /init_broadcaster says, else files)"
    types = ["auto", "filesystem", "nccl", "nixl"]
    parser.add_argument("--weight-broadcast", choices=types, default="auto", help=text)
    text = "how long a request waits between /pause and /resume (default 1800)"
    parser.add_argument("--gate-seconds", type=float, default=1800.0, help=text)
    parser = add("config", "prime_rl:config", "print the TOML for a running server")
    parser.add_argument("url", metavar="URL", help="the address that `serve` printed")
    text = "the address of admin calls, if it is another"
    parser.add_argument("--admin-url", metavar="URL", help=text)
    parser = add("check", "prime_rl:check", "say what in a prime-rl config will not work, and why")
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="a prime-rl config")
    text = "do not ask the addresses in it"
    parser.add_argument("--offline", action="store_true", help=text)
    text = "be the inference child of prime-rl's `rl` command"
    parser = add("inference", "prime_rl:inference", text)
    parser.add_argument("at", choices=["@"], metavar="@", help="as prime-rl's launcher writes it")
    text = "prime-rl's resolved inference config (JSON), or a TOML of the same fields"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=SET)
    text = "write the executable `inference`, for prime-rl's launcher to find on PATH"
    parser = add("install-shim", "prime_rl:install_shim", text)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to")


def _add_nemo_rl_commands(add: Add) -> None:
    text = "run an entry script of NeMo-RL with Rollway as its backend `dynamo`"
    parser = add("run", "nemo_rl:run", text)
    parser.add_argument("script", type=Path, metavar="SCRIPT.py", help="for example run_grpo.py")
    text = "the script's own arguments"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help=text)
    text = "say what in a recipe of NeMo-RL will not work, and why"
    parser = add("check", "nemo_rl:check", text)
    parser.add_argument("file", type=Path, metavar="CONFIG.yaml", help="a recipe")
    text = "as on NeMo-RL's command line: a.b=c, +a.b=c, ~a.b"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=text)


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--model", help="one of several served models")
    parser.add_argument("--tokenizer", help="a directory or a name (default: the model's own)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: loopback)")
    parser.add_argument("--port", type=port, default=8100, help="0 for a free one (default 8100)")
    parser.add_argument("--rl-url", help="address of the RL worker listing, if it is elsewhere")
    parser.add_argument("--journal", type=Path, help="where to record (default: Rollway's home)")
    text = "wait for the disk before each answer, so that a power cut loses no turn"
    parser.add_argument("--journal-sync", action="store_true", help=text)
    modes, text = ["asked", "always", "never"], "whether answers carry their token ids"
    parser.add_argument("--bundle", choices=modes, default="asked", help=text)
    text = "record which experts ran for each token (MoE; workers that return them)"
    parser.add_argument("--routed-experts", action="store_true", help=text)
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM), to serve https")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")


def _add_dash(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="a recorded run instead")
    text = "a gateway's journal, for its conversations (default: that of the stack)"
    parser.add_argument("--journal", type=Path, metavar="FILE", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: loopback)")
    parser.add_argument("--port", type=port, default=8180, help="0 for a free one (default 8180)")
    text = "admit only who has a token: that of ROLLWAY_DASH_TOKEN, or a random one"
    parser.add_argument("--token", action="store_true", help=text)
    text = "whether to open a browser (default: if a person starts it)"
    parser.add_argument("--open", action=argparse.BooleanOptionalAction, default=True, help=text)


def _add_top(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="a recorded run instead")
    parser.add_argument("--once", action="store_true", help="print it once, without Textual")
    text = "seconds between two looks (default 1; more for a slow line)"
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help=text)


def _add_report(parser: argparse.ArgumentParser) -> None:
    text = "a run directory, or its name; the newest run without it; two are compared"
    parser.add_argument("runs", nargs="*", metavar="DIR", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: <name of DIR>.html")


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    add_spec(parser, "a stack file; two vLLM workers without it")
    text = "where those two run (default: on a GPU if vLLM has one)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=text)
    parser.add_argument("--rounds", type=int, default=20, help="how many refits (default 20)")
    text = "end with the report after the round in progress, as SIGTERM and Ctrl-C do"
    parser.add_argument("--seconds", type=float, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of faults, steps, modes and prompts")
    parser.add_argument("--fault", action="append", default=[], help="only this one; repeatable")
    text = "refit and sample by the calls of this trainer"
    parser.add_argument("--through", choices=["prime-rl"], help=text)
    text = "the control: it must find stale tokens"
    parser.add_argument("--unprotected", action="store_true", help=text)
    text = "break the gateway instead, and check every turn"
    parser.add_argument("--gateway", action="store_true", help=text)
    parser.add_argument("--agents", type=int, default=64, help="with --gateway: how many at once")
    text = "the control of --gateway: it must lose turns"
    parser.add_argument("--old-journal", action="store_true", help=text)
    add_quiet(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", choices=["vllm", "mocker"], default="vllm")
    text = "of trainer and workers (default auto: a GPU if vLLM has one)"
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=text)
    text = "of new weights (default: cuda_ipc, in place, on a GPU; else checkpoint)"
    parser.add_argument("--transport", choices=["checkpoint", "cuda_ipc"], help=text)
    text = "the control: train, but never update the workers"
    parser.add_argument("--no-refit", dest="refit", action="store_false", help=text)
    parser.add_argument("--name", default="demo", help="name of its stack, to run several at once")
    parser.add_argument(
        "--out", dest="directory", type=Path, metavar="DIR", help="for the report and plot"
    )


# --- groups --------------------------------------------------------------------------------


def _add_fleet_commands(add_command: Add) -> None:
    def add(name: str, text: str) -> argparse.ArgumentParser:
        parser = add_command(name, f"fleet:{name}", text)
        add_name(parser)
        parser.add_argument("--stack", help=argparse.SUPPRESS)  # from before NAME was positional
        parser.add_argument("--rl-url", help="address of the RL worker listing, if elsewhere")
        parser.add_argument("--model", help="one of several served models")
        text = "limit of a call: probe, pause (also the wait for running requests), update"
        parser.add_argument(
            "--timeout", action="append", default=[], metavar="CALL=SECONDS", help=text
        )
        return parser

    add("ls", "list the workers, also those in error")
    parser = add("pause", "stop generation and remove the workers from routing")
    parser.add_argument("--mode", choices=["wait", "keep", "abort"], default="wait")
    add("resume", "resume generation")
    parser = add("sleep", "release the workers' memory until a wake or a refit")
    text = "1 keeps the weights in the host's memory (default), 2 forgets them"
    parser.add_argument("--level", type=int, choices=[1, 2], default=1, help=text)
    parser.add_argument("--mode", choices=["wait", "abort"], default="wait")
    add("wake", "return workers that sleep at level 1 to service")
    parser = add("refit", "load a checkpoint into every worker")
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint directory")
    parser.add_argument("--version", type=int, required=True, help="higher than all before")
    modes = ["pause-all", "rolling", "in-flight"]
    parser.add_argument("--mode", choices=modes, default="pause-all")
    parser.add_argument("--share", type=float, default=0.5, help="of the workers at a time")
    text = "accept another dtype than the served one"
    parser.add_argument("--allow-cast", action="store_true", help=text)
    add("versions", "show which weight version each worker serves")
    parser = add("watch", "show who joins and leaves; update workers that join")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two polls (default 2)")


def _add_weights_commands(add: Add) -> None:
    text = "show the tensors of a checkpoint, or of a trainer's ranks"
    parser = add("inspect", "weights:inspect", text)
    parser.add_argument("path", type=Path, metavar="PATH", help="a directory")
    parser = add("diff", "weights:diff", "compare two checkpoints; exit code 1 when they differ")
    parser.add_argument("first", type=Path, metavar="A", help="a checkpoint directory")
    parser.add_argument("second", type=Path, metavar="B", help="another one")
    text = "show which bytes would move, from where to where, and how"
    parser = add("plan", "weights:plan", text)
    text = "a checkpoint directory, or a config.json"
    parser.add_argument("--model", type=Path, required=True, help=text)
    text = "hf, fsdp:8, or megatron:tp=2,pp=1,ep=8,etp=1"
    parser.add_argument("--source", required=True, help=text)
    parser.add_argument("--target", required=True, help="hf, or vllm:tp=2,ep=1,replicas=4")
    parser.add_argument("--wire", type=float, help="GB/s of a receiver")
    text = "GB/s of copying at a source; 0: sources are only read"
    parser.add_argument("--pack", type=float, help=text)
    parser.add_argument("--unpack", type=float, help="GB/s of copying at a receiver")
    parser.add_argument("--block", type=float, help="seconds of one block on the wire")
    parser.add_argument("--arity", type=int, default=2, help="replicas that one serves (default 2)")
