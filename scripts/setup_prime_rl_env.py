"""Create or reuse the environment of prime-rl's clients: `python3 scripts/setup_prime_rl_env.py`.

`renderers` and `verifiers` go with other versions of openai and transformers than the engine, so
they have an environment of their own; `.venv` stays the engine's (docs/prime-rl.md). prime-rl
itself is not on a package index.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import setup_env

# renderers imports it only when it renders.
TOKENIZERS = ["transformers>=5,<6"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=setup_env.ROOT / ".venv-prime-rl")
    options = parser.parse_args()
    setup_env.ensure(options.venv, _fingerprint(), install)


def install(venv: Path) -> None:
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())["project"]
    pip = [str(venv / "bin" / "python"), "-m", "pip"]

    print(f"[setup 1/2] virtual environment {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    print("[setup 2/2] renderers and verifiers (600 MB)", flush=True)
    packages = [*project["optional-dependencies"]["prime-rl"], *TOKENIZERS]
    setup_env.pip_run(pip, "install", *packages)


def _fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in (setup_env.ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
