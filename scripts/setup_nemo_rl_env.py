"""Create or reuse the environment of NeMo-RL's trainer: `python3 scripts/setup_nemo_rl_env.py`.

NeMo-RL wants an older transformers than the engine, so its trainer has an environment of its own;
`.venv` stays the engine's (docs/nemo-rl.md). NeMo-RL itself is on no package index: tests read it
from the checkout that ROLLWAY_NEMO_RL_SRC names. Packages for GPUs are left out:
tests/nemo_rl/stand_ins answers for them.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import setup_env

# What NeMo-RL's GRPO imports on a CPU, and pytest for its own tests.
TRAINER = [
    "ray[default]>=2.57", "transformers>=5.5,<5.9", "accelerate", "blobfile", "colored",
    "datasets", "hydra-core", "math-verify", "matplotlib", "mlflow-skinny", "num2words",
    "nvidia-ml-py", "omegaconf", "pillow", "pytest>=8.3", "pytest-asyncio>=1.0",
    "pytest-timeout>=2.3", "pyzmq", "scipy", "soundfile", "tensorboard", "tensordict", "tiktoken",
    "torchdata", "typing_extensions",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=setup_env.ROOT / ".venv-nemo-rl")
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
    print("[setup 3/3] what NeMo-RL imports, and rollway (1 GB)", flush=True)
    packages = [*project["dependencies"], *groups["nemo-rl"], *groups["nixl"], *TRAINER]
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
