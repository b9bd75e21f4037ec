"""`rollway prime-rl`: commands for prime-rl's orchestrator and trainer."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict

from rollway.cli.output import print_json
from rollway.cli.programs import check_exposure, read_gateway_options
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
    serve_options = server.ServeOptions(
        read_gateway_options(options),
        admin_host=options.admin_host,
        admin_port=options.admin_port,
        output_dir=options.output_dir,
        marker=options.marker,
        gate_seconds=options.gate_seconds,
        weight_broadcast=options.weight_broadcast,
    )
    asyncio.run(server.serve(serve_options, access, tls))
    return 0


def config(options: argparse.Namespace) -> int:
    """Print the part of prime-rl's config that names a running server."""
    from rollway.integrations.prime_rl.check import check_answers, make_headers, make_toml
    from rollway.integrations.prime_rl.serve import find_token_file, make_export, read_token

    url = f"{options.url.rstrip('/').removesuffix('/v1')}/v1"
    admin = f"{(options.admin_url or url).rstrip('/').removesuffix('/v1')}/v1"
    headers, export = make_headers({}), ""
    if not headers and find_token_file().exists():  # prime-rl wants it in the environment
        headers, export = {"Authorization": f"Bearer {read_token().decode()}"}, make_export()

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
    if options.json:
        print_json({"toml": text})
    else:
        print(text, end="")
    return 0


def check(options: argparse.Namespace) -> int:
    """Print what in a config will not work; exit with 1 if there is anything."""
    from rollway.integrations.prime_rl.check import (
        find_problems,
        find_remote_problems,
        read_toml,
    )

    settings = read_toml(options.file)
    problems = find_problems(settings)
    if not options.offline:
        problems += asyncio.run(find_remote_problems(settings))
    if options.json:
        print_json({"problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            print(f"{problem.key}: {problem.cause} {problem.fix}")
        if not problems:
            print("no problem found")
    return 1 if problems else 0


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
    if options.json:
        print_json({"file": str(file)})
    else:
        print(
            f"{file} is written. Put {file.parent} first on PATH, after the environment is active."
        )
    return 0
