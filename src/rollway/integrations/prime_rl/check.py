"""Read a user's prime-rl config, and say what will not work with this server, and why.

Generations of prime-rl have different keys, and refuse unknown ones at the start; a value that is
wrong for this server shows much later, as a run with one episode in flight or with old weights.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rollway.errors import Problem, RollwayError, UsageError
from rollway.http import ONCE, Http

_CLIENT_TABLES = (
    ("orchestrator", "model", "client"),
    ("model", "client"),
    ("orchestrator", "client"),
    ("client",),
)
_OFF_POLICY_STEPS = 8  # prime-rl's default of max_off_policy_steps
_SHARED_PORT = 8001
_PROBE_SECONDS = 5.0
_START_FIX = "Start `rollway prime-rl serve`, and use the addresses that it prints."
Plane = Literal["rollouts", "admin"]
_CALLS = {"rollouts": "rollouts", "admin": "admin calls"}


def read_toml(file: Path) -> dict[str, Any]:
    """Read a config file."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}.", "Correct that line.") from error


def find_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong in the file itself."""
    client, name = _find_client(config)
    problems = list(_check_broadcast(config))
    if client or _has_orchestrator(config):
        problems = [*_check_client(client, name), *problems]
    if "inference" in config:
        problems.append(
            Problem(
                "inference",
                "error",
                "prime-rl's launcher would start an inference server of its own.",
                "Remove the block; the addresses in the client say where to sample. Or keep it, "
                "and put Rollway's own on PATH: `rollway prime-rl install-shim DIR`.",
            )
        )
    return problems


async def find_remote_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Ask the addresses in a config; return what they lack."""
    client, name = _find_client(config)
    headers = make_headers(client)
    problems: list[Problem] = []
    async with Http() as http:

        async def ask(path: str) -> Any:
            return await http.get(path, timeout=_PROBE_SECONDS, retry=ONCE, headers=headers)

        rollouts, admin = (
            _list_urls(client.get("base_url")),
            _list_urls(client.get("admin_base_url")),
        )
        for url in admin or rollouts:
            base = url.rstrip("/").removesuffix("/v1")
            key = f"{name}.admin_base_url"
            try:
                problems += check_answers(await ask(f"{base}/health"), url, key, "admin")
                page = await http.get_text(
                    f"{base}/metrics", timeout=_PROBE_SECONDS, headers=headers
                )
                listing = await ask(f"{base}/v1/models")
            except RollwayError as error:
                problems.append(Problem(key, "error", error.message, _find_fix(error, client)))
                continue
            if "vllm:" not in page:
                cause = f"{base}/metrics has no vllm:* series, so one episode stays in flight."
                fix = "Use the server's address, not a frontend's, and workers of vLLM."
                problems.append(Problem(key, "error", cause, fix))
            problems += _check_model(config, client, [m["id"] for m in listing["data"]])
        for url in rollouts if admin else []:
            try:
                health = await ask(f"{url.rstrip('/').removesuffix('/v1')}/health")
            except RollwayError as error:
                problems.append(Problem(f"{name}.base_url", "error", error.message, _START_FIX))
            else:
                problems += check_answers(health, url, f"{name}.base_url", "rollouts")
    return [*problems, *_check_tokenizers(config)]


def _find_fix(error: RollwayError, client: Mapping[str, Any]) -> str:
    """Return what helps: another token if the server refused the one that prime-rl would send."""
    if getattr(error, "status", None) != 401:
        return _START_FIX
    from rollway.integrations.prime_rl.serve import API_KEY, make_export

    name = str(client.get("api_key_var", API_KEY))
    return f"Before prime-rl, run: {make_export().replace(API_KEY, name)}"


def make_headers(client: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers with the token that prime-rl would send, if there is one."""
    token = os.environ.get(str(client.get("api_key_var", "VLLM_API_KEY")), "EMPTY")
    return {} if token == "EMPTY" else {"Authorization": f"Bearer {token}"}


def check_answers(health: Any, url: str, key: str, wanted: Plane) -> Iterator[Problem]:
    """Yield a problem if the server at an address says that it answers other calls alone: with
    --admin-port, rollouts and admin calls have an address each."""
    answers = health.get("answers", "both") if isinstance(health, dict) else "both"
    if answers not in ("both", wanted):
        cause = f"{url} answers {_CALLS[answers]} alone, and {_CALLS[wanted]} with 404."
        yield Problem(key, "error", cause, f"Use the server's address for {_CALLS[wanted]}.")


def _check_model(
    config: Mapping[str, Any], client: Mapping[str, Any], served: list[str]
) -> Iterator[Problem]:
    """Yield a problem if the model is not served: prime-rl asks for it by name, and ends without
    it."""
    for path in (("orchestrator", "model"), ("model",)):
        name = _find_table(config, path).get("name")
        if isinstance(name, str) and name not in served and not client.get("skip_model_check"):
            cause = f"The server has no model `{name}`, only {', '.join(served)}."
            fix = "Use that name: `rollway prime-rl config` prints it."
            yield Problem(".".join((*path, "name")), "error", cause, fix)


def _check_tokenizers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for a name without a tokenizer. prime-rl's orchestrator loads the one of
    [tokenizer], and its env servers that of the model's name, whatever [tokenizer] says."""
    from transformers import AutoTokenizer

    for place in ("model", "tokenizer") if _has_orchestrator(config) else ():
        for path in (("orchestrator", place), (place,)):
            table = _find_table(config, path)
            name = table.get("name")
            if not isinstance(name, str) or table.get("trust_remote_code"):
                continue  # whose code must not run here
            try:
                AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as error:
                cause = f"prime-rl loads a tokenizer by this name: {str(error).splitlines()[0]}"
                fix = "Use the checkpoint's path, as `rollway prime-rl config` prints it."
                yield Problem(".".join((*path, "name")), "error", cause, fix)


def make_toml(model: str, url: str, admin_url: str) -> str:
    """Return the part of prime-rl's config that names a running server."""
    lines = [
        "[orchestrator.model]",
        f'name = "{model}"',
        "",
        "[orchestrator.model.client]",
        f'base_url = "{url}"',
        f'admin_base_url = ["{admin_url}"]',
        "",
        "[weight_broadcast]",
        'type = "filesystem"',
    ]
    return "\n".join(lines) + "\n"


def _check_client(client: Mapping[str, Any], name: str) -> Iterator[Problem]:
    if not client:
        yield Problem(
            "orchestrator.model.client",
            "error",
            "There is no client table, so prime-rl samples at http://localhost:8000/v1.",
            "Add base_url and admin_base_url; `rollway prime-rl config` prints them.",
        )
        return
    if isinstance(client.get("base_url"), list):
        cause = "base_url is a list, which prime-rl has not accepted since June 2026."
        yield Problem(f"{name}.base_url", "error", cause, "Write one text.")
    for url in _list_urls(client.get("admin_base_url")):
        if urlsplit(url).path.rstrip("/") not in ("", "/v1"):
            cause = f"{url} is not a server's address, but a path of a frontend."
            yield Problem(
                f"{name}.admin_base_url", "error", cause, "Use http://HOST:PORT/v1 of the server."
            )
    if "admin_base_url" in client and len(_list_urls(client["admin_base_url"])) > 1:
        cause = "One address pauses, updates and resumes the whole fleet."
        yield Problem(f"{name}.admin_base_url", "error", cause, "Name the server once.")


def _check_broadcast(config: Mapping[str, Any]) -> Iterator[Problem]:
    tables = (config, config.get("orchestrator", {}), config.get("trainer", {}))
    for table in (t for t in tables if isinstance(t, dict)):
        broadcast = table.get("weight_broadcast")
        if not isinstance(broadcast, dict):
            continue
        kind = broadcast.get("type", "filesystem")
        if kind == "nccl" and _has_lora(config):
            cause = "prime-rl itself refuses NCCL with LoRA."
            yield Problem("weight_broadcast.type", "error", cause, 'Use "filesystem".')
        if kind == "nccl" and "inference_world_size" not in broadcast:
            cause = "Without an [inference] block, prime-rl forms a group of one rank."
            fix = "Set it to the number of ranks of all workers, and start the trainer by itself."
            yield Problem("weight_broadcast.inference_world_size", "error", cause, fix)
        if kind in ("nixl", "mx_refit"):
            cause = f'Only prime-rl\'s own workers read what its "{kind}" trainer lists.'
            yield Problem("weight_broadcast.type", "error", cause, 'Use "filesystem" or "nccl".')
        if broadcast.get("quantize_in_weight_transfer"):
            cause = "The engine makes its own scales; weights would be quantised twice."
            yield Problem(
                "weight_broadcast.quantize_in_weight_transfer", "error", cause, "Use false."
            )
        if kind in ("nixl", "mx_refit") and broadcast.get("port", _SHARED_PORT) == _SHARED_PORT:
            cause = f"ModelExpress and Dynamo's worker listing both use port {_SHARED_PORT}."
            yield Problem(
                "weight_broadcast.port", "error", cause, "Choose another port for one of them."
            )
        keep, steps = broadcast.get("keep_recent"), _find_off_policy_steps(config)
        if isinstance(keep, int) and keep < steps:
            cause = f"Rollouts may be {steps} steps old, and need a directory that is deleted."
            yield Problem("weight_broadcast.keep_recent", "error", cause, f"Keep at least {steps}.")


def _has_orchestrator(config: Mapping[str, Any]) -> bool:
    """Return whether a file is for the orchestrator, and not for the trainer or an env server
    alone: they have no client."""
    return "orchestrator" in config or "train" in config or not {"optim", "env"} & config.keys()


def _find_client(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    for path in _CLIENT_TABLES:
        if table := _find_table(config, path):
            return table, ".".join(path)
    return {}, ".".join(_CLIENT_TABLES[0])


def _find_table(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the table at a path; an empty one if there is none."""
    table: Any = config
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _find_off_policy_steps(config: Mapping[str, Any]) -> int:
    for table in (config.get("orchestrator"), config):
        if isinstance(table, dict) and isinstance(table.get("max_off_policy_steps"), int):
            return int(table["max_off_policy_steps"])
    return _OFF_POLICY_STEPS


def _has_lora(config: Mapping[str, Any]) -> bool:
    tables = [config.get("model"), config.get("trainer", {}).get("model")]
    return any(isinstance(t, dict) and bool(t.get("lora")) for t in tables)


def _list_urls(value: Any) -> list[str]:
    urls = value if isinstance(value, list) else [value]
    return [url for url in urls if isinstance(url, str) and url]
