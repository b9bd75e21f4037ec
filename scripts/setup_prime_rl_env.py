"""Create or reuse the environments of prime-rl's clients: `python3 scripts/setup_prime_rl_env.py`.

`renderers` and `verifiers` go with other versions of openai and transformers than the engine, so
they have an environment of their own; `.venv` stays the engine's (docs/prime-rl.md). prime-rl
itself is not on a package index. Where ROLLWAY_PRIME_RL_SRC names a checkout of it, a second
environment gets what its orchestrator imports: it wants an older `mcp` than the released
`verifiers`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import setup_env

# renderers imports it only when it renders.
TOKENIZERS = ["transformers>=5,<6"]
# What prime-rl's orchestrator and env server of August 2026 import, with the verifiers of that
# time, which is not installed but on PYTHONPATH; and pytest for its own tests. GPU packages are
# left out: tests/prime_rl/stand_ins answers for them.
ORCHESTRATOR = [
    *TOKENIZERS, "renderers==0.1.12", "mcp>=1.24,<2", "openai<3", "prime-pydantic-config[toml]",
    "aiohttp", "aiolimiter", "anthropic", "beartype", "datasets", "gepa", "grpcio", "httpx",
    "jaxtyping", "loguru", "math-verify", "msgpack", "msgspec", "nvidia-ml-py", "openai-agents",
    "orjson", "pandas", "prime-runs", "prime-sandboxes", "prime-tunnel", "prometheus-client",
    "psutil", "pybase64", "pytest", "pytest-asyncio", "pyzmq", "rich", "setproctitle",
    "spmd-types", "tenacity", "tomli-w", "tyro", "uvloop", "wandb",
]  # fmt: skip
# Their own requirements (CUDA's nixl, an AWS client) are never imported here.
BARE = ["modelexpress==0.3.0", "prime"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=setup_env.ROOT / ".venv-prime-rl")
    options = parser.parse_args()
    setup_env.ensure(options.venv, _fingerprint(), install)
    if os.environ.get("ROLLWAY_PRIME_RL_SRC"):
        beside = options.venv.with_name(f"{options.venv.name}-src")
        setup_env.ensure(beside, _fingerprint(), install_orchestrator)


def install(venv: Path) -> None:
    print(f"[setup 1/2] virtual environment {venv}", flush=True)
    pip = _create(venv)
    print("[setup 2/2] renderers and verifiers (600 MB)", flush=True)
    packages = [*_read_extras()["prime-rl"], *TOKENIZERS]
    setup_env.pip_run(pip, "install", *packages)


def install_orchestrator(venv: Path) -> None:
    print(f"[setup 1/3] virtual environment {venv}", flush=True)
    pip = _create(venv)
    print("[setup 2/3] CPU torch (200 MB)", flush=True)
    (torch,) = (spec for spec in _read_extras()["cpu"] if spec.startswith("torch=="))
    setup_env.install_torch(pip, torch)
    print("[setup 3/3] what prime-rl's orchestrator imports", flush=True)
    setup_env.pip_run(pip, "install", *ORCHESTRATOR)
    setup_env.pip_run(pip, "install", "--no-deps", *BARE)


def _create(venv: Path) -> list[str]:
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    return [str(venv / "bin" / "python"), "-m", "pip"]


def _read_extras() -> dict[str, list[str]]:
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def _fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in (setup_env.ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
