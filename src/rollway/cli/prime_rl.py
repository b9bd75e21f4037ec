"""`rollway prime-rl`: commands for prime-rl's orchestrator and trainer."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rollway.cli.arguments import Parser, add_flag, add_set, make_group, pick_fields, port
from rollway.cli.gateway import add_gateway_options, check_exposure, read_gateway_options
from rollway.cli.output import print_json, print_result, report_problems
from rollway.errors import UsageError
from rollway.http import Http


def serve(options: argparse.Namespace) -> int:
    """Run prime-rl's inference server until a signal ends it."""
    from rollway.integrations.prime_rl import serve as server

    if options.gate_seconds <= 0:
        raise UsageError(f"--gate-seconds is {options.gate_seconds:g}.", "Use more than 0.")
    if options.output_dir is not None and not options.output_dir.is_dir():
        raise UsageError(
            f"--output-dir {options.output_dir} is not a directory.",
            "Give the directory in which the trainer is started, and create it first.",
        )
    hosts = [options.host] if options.admin_port is None else [options.host, options.admin_host]
    access, tls = check_exposure(options, hosts)
    chosen = pick_fields(server.ServeOptions, options)
    serve_options = server.ServeOptions(read_gateway_options(options), **chosen)
    asyncio.run(server.serve(serve_options, access, tls))
    return 0


def config(options: argparse.Namespace) -> int:
    """Print the part of prime-rl's config that names a running server."""
    from rollway.integrations.prime_rl.check import check_answers, make_headers, make_toml
    from rollway.integrations.prime_rl.serve import ensure_token, find_token_file, make_export

    url = f"{options.url.rstrip('/').removesuffix('/v1')}/v1"
    admin = f"{(options.admin_url or url).rstrip('/').removesuffix('/v1')}/v1"
    headers, export = make_headers({}), ""
    if not headers and find_token_file().exists():  # prime-rl wants it in the environment
        headers, export = {"Authorization": f"Bearer {ensure_token().decode()}"}, make_export()

    async def read_model() -> str:
        async with Http() as http:
            answer = await http.get(f"{url}/models", timeout=10.0, headers=headers)
            path = f"{admin.removesuffix('/v1')}/health"
            health = await http.get(path, timeout=10.0, headers=headers)
        for problem in check_answers(health, admin, "--admin-url", "admin"):
            raise UsageError(problem.cause, "Add --admin-url, with the address that serve printed.")
        return str(answer["data"][0]["id"])

    model = asyncio.run(read_model())
    text = make_toml(model, url, admin)
    if export:
        text = f"# Before prime-rl: {export}\n{text}"
    print_result(options, {"toml": text}, lambda _: print(text, end=""))
    return 0


def check(options: argparse.Namespace) -> int:
    """Print what in a config will not work; exit with 1 if there is anything."""
    from rollway.integrations.prime_rl.check import find_problems, find_remote_problems, read_toml

    settings = read_toml(options.file)
    problems = find_problems(settings)
    if not options.offline:
        problems += asyncio.run(find_remote_problems(settings))
    return report_problems(options, problems)


def inference(options: argparse.Namespace) -> int:
    """Serve what a resolved inference config of prime-rl describes, until a signal ends it."""
    from rollway.api import make_spec
    from rollway.integrations.prime_rl import inference as child

    config = child.read_config(options.file)
    spec = make_spec(child.make_stack(config), overrides=options.set)
    if options.json or config.raw.get("dry_run"):
        print_json(spec.model_dump(mode="json", exclude_defaults=True))
        return 0
    options.tls_cert = options.tls_key = None
    access, _ = check_exposure(options, [config.host])
    asyncio.run(child.run(config, spec, access))
    return 0


def install_shim(options: argparse.Namespace) -> int:
    """Write the executable `inference`."""
    from rollway.integrations.prime_rl.inference import write_shim

    file = write_shim(options.directory.expanduser().resolve())
    text = f"{file} is written. Put {file.parent} first on PATH, after the environment is active."
    print_result(options, {"file": str(file)}, lambda _: print(text))
    return 0


def add_prime_rl(parser: Parser) -> None:
    add = make_group(parser)
    parser = add("serve", serve, "look like one prime-rl inference server of any size")
    add_gateway_options(parser)
    text = "serve admin calls there instead of at --port"
    parser.add_argument("--admin-port", type=port, help=text)
    text = "of --admin-port (default: loopback)"
    parser.add_argument("--admin-host", default="127.0.0.1", help=text)
    parser.add_argument("--output-dir", type=Path, help="where the trainer's relative paths begin")
    markers = ["either", "STABLE", ".finished"]
    text = "the file that marks a broadcast as complete (default: either of the two)"
    parser.add_argument("--marker", choices=markers, default="either", help=text)
    text = "what the trainer broadcasts by (default: as /init_broadcaster says, else files)"
    types = ["auto", "filesystem", "nccl", "nixl"]
    parser.add_argument("--weight-broadcast", choices=types, default="auto", help=text)
    text = "how long a request waits between /pause and /resume (default 1800)"
    parser.add_argument("--gate-seconds", type=float, default=1800.0, help=text)
    parser = add("config", config, "print the TOML for a running server")
    parser.add_argument("url", metavar="URL", help="the address that `serve` printed")
    parser.add_argument("--admin-url", metavar="URL", help="of admin calls, if it is another")
    parser = add("check", check, "say what in a prime-rl config will not work, and why")
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="a prime-rl config")
    add_flag(parser, "--offline", "do not ask the addresses in it")
    parser = add("inference", inference, "be the inference child of prime-rl's `rl` command")
    parser.add_argument("at", choices=["@"], metavar="@", help="as prime-rl's launcher writes it")
    text = "prime-rl's resolved inference config (JSON), or a TOML of the same fields"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    add_set(parser)
    parser = add("install-shim", install_shim, "write `inference`, for prime-rl's launcher to find")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to")
