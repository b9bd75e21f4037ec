"""Create or reuse the environment of an integration: `python3 scripts/setup_trainer_env.py verl`.

Trainers and pipelines ask for other versions of vLLM, transformers or openai than Dynamo does. So
each has an environment of its own, without any engine; `.venv` stays the engine's. CPU torch comes
first, else their dependencies would bring gigabytes of CUDA.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import setup_env

TEST_TOOLS = ["pytest>=8.3", "pytest-asyncio>=1.0", "pytest-timeout>=2.3"]
# For Curator's judge workflow, whose own extra brings CUDA packages; and for Curator's own tests.
CURATOR = ["data-designer==0.9.1", "hypothesis>=6.100", "pytest-httpserver", "pytest-xdist>=3.6"]
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
# What NeMo-RL's GRPO imports on a CPU; tests/nemo_rl/stand_ins answers for packages of GPUs.
NEMO_RL = [
    "ray[default]>=2.57", "transformers>=5.5,<5.9", "accelerate", "blobfile", "colored",
    "datasets", "hydra-core", "math-verify", "matplotlib", "mlflow-skinny", "num2words",
    "nvidia-ml-py", "omegaconf", "pillow", "pyzmq", "scipy", "soundfile", "tensorboard",
    "tensordict", "tiktoken", "torchdata", "typing_extensions",
]  # fmt: skip
Extras = dict[str, list[str]]


@dataclass(frozen=True)
class Environment:
    """What one environment has."""

    what: str
    packages: Callable[[Extras], list[str]]
    torch: bool = True
    rollway: bool = True
    """Whether Rollway runs in it, with its core dependencies."""
    bare: tuple[str, ...] = ()
    """Packages without their own requirements, which are never imported here."""


ENVIRONMENTS = {
    "verl": Environment(
        "verl, Ray and rollway (1 GB)",
        lambda extras: [*extras["verl"], *extras["nixl"], *TEST_TOOLS],
    ),
    "curator": Environment(
        "NeMo Curator, Ray and rollway (2 GB)",
        # Ray refuses a driver of another version than the cluster's, which is the engine's.
        lambda extras: [*extras["curator"], _ray_of_engine(), *CURATOR, *TEST_TOOLS],
    ),
    "prime-rl": Environment(
        "renderers and verifiers (600 MB)",
        lambda extras: [*extras["prime-rl"], *TOKENIZERS],
        torch=False,
        rollway=False,
    ),
    # It wants an older `mcp` than the released `verifiers`.
    "prime-rl-src": Environment(
        "what prime-rl's orchestrator imports",
        lambda _: ORCHESTRATOR,
        rollway=False,
        bare=("modelexpress==0.3.0", "prime"),
    ),
    "nemo-rl": Environment(
        "what NeMo-RL imports, and rollway (1 GB)",
        lambda extras: [*extras["nemo-rl"], *extras["nixl"], *NEMO_RL, *TEST_TOOLS],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=[name for name in ENVIRONMENTS if name != "prime-rl-src"])
    name = parser.parse_args().name
    _ensure(name)
    # prime-rl is on no package index; its orchestrator is run from a checkout.
    if name == "prime-rl" and os.environ.get("ROLLWAY_PRIME_RL_SRC"):
        _ensure("prime-rl-src")


def _ensure(name: str) -> None:
    venv = setup_env.ROOT / f".venv-{name}"
    setup_env.ensure(venv, _fingerprint(), lambda venv: install(venv, ENVIRONMENTS[name]))


def install(venv: Path, environment: Environment) -> None:
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())["project"]
    extras: Extras = project["optional-dependencies"]
    pip = [str(venv / "bin" / "python"), "-m", "pip"]

    print(f"[setup 1/3] virtual environment {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    setup_env.pip_run(pip, "install", "--upgrade", "pip")
    if environment.torch:
        print("[setup 2/3] CPU torch (200 MB)", flush=True)
        (torch,) = (spec for spec in extras["cpu"] if spec.startswith("torch=="))
        setup_env.install_torch(pip, torch)
    print(f"[setup 3/3] {environment.what}", flush=True)
    core = project["dependencies"] if environment.rollway else []
    setup_env.pip_run(pip, "install", *core, *environment.packages(extras))
    if environment.bare:
        setup_env.pip_run(pip, "install", "--no-deps", *environment.bare)
    if environment.rollway:
        setup_env.pip_run(pip, "install", "--no-deps", "--editable", str(setup_env.ROOT))


def _ray_of_engine() -> str:
    """Return the requirement of the Ray that `.venv` has, or of any that will do."""
    ask = "import importlib.metadata; print(importlib.metadata.version('ray'))"
    engine = setup_env.ROOT / ".venv" / "bin" / "python"
    if not engine.exists():
        return "ray[data,default]>=2.57"
    answer = subprocess.run([str(engine), "-c", ask], capture_output=True, text=True)
    version = answer.stdout.strip()
    return f"ray[data,default]=={version}" if version else "ray[data,default]>=2.57"


def _fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in (setup_env.ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(str(setup_env.ROOT).encode())  # an editable install points into this checkout
    return digest.hexdigest()


if __name__ == "__main__":
    main()
