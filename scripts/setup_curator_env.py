"""Create or reuse the environment of NeMo Curator: `python3 scripts/setup_curator_env.py`.

Curator and Dynamo ask for different versions of vLLM and of much below it, so pipelines have an
environment of their own, without any engine; `.venv` stays the engine's (docs/curator.md). CPU
torch comes first, else Curator's dependencies would bring gigabytes of CUDA. Ray gets the version
that `.venv` has: Ray refuses a driver of another version than the cluster's.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import setup_env

# For the judge workflow, which Curator's own extra brings together with CUDA packages.
JUDGE = ["data-designer==0.9.1"]
TEST_TOOLS = [
    *("hypothesis>=6.100", "pytest>=8.3", "pytest-asyncio>=1.0", "pytest-httpserver"),
    *("pytest-timeout>=2.3", "pytest-xdist>=3.6"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=setup_env.ROOT / ".venv-curator")
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
    print("[setup 3/3] NeMo Curator, Ray and rollway (2 GB)", flush=True)
    packages = [*project["dependencies"], *groups["curator"], _ray_of_engine(), *JUDGE, *TEST_TOOLS]
    setup_env.pip_run(pip, "install", *packages)
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
