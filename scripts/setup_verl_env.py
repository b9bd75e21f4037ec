"""Create or reuse the trainer's environment for verl: `python3 scripts/setup_verl_env.py`.

verl and Dynamo ask for different versions of vLLM and transformers, so the trainer has an
environment of its own, without any engine; `.venv` stays the engine's (docs/verl.md). CPU torch
comes first, else verl's dependencies would bring gigabytes of CUDA.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import setup_env

# For verl's own tests, which its wheel brings.
TEST_TOOLS = ["pytest>=8.3", "pytest-asyncio>=1.0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=setup_env.ROOT / ".venv-verl")
    options = parser.parse_args()
    setup_env.ensure(options.venv, _fingerprint(), install)


def install(venv: Path) -> None:
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    (torch,) = (spec for spec in groups["cpu"] if spec.startswith("torch=="))
    pip = [str(venv / "bin" / "python"), "-m", "pip"]

    print(f"[setup 1/3] virtual environment {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    setup_env.pip_run(pip, "install", "--upgrade", "pip")
    print("[setup 2/3] CPU torch (200 MB)", flush=True)
    setup_env.install_torch(pip, torch)
    print("[setup 3/3] verl, Ray and rollway (1 GB)", flush=True)
    packages = [*project["dependencies"], *groups["verl"], *groups["nixl"], *TEST_TOOLS]
    setup_env.pip_run(pip, "install", *packages)
    setup_env.pip_run(pip, "install", "--no-deps", "--editable", str(setup_env.ROOT))


def _fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in (setup_env.ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(str(setup_env.ROOT).encode())  # an editable install points into this checkout
    return digest.hexdigest()


if __name__ == "__main__":
    main()
