"""megatron-core and megatron-bridge, installed apart; torch is the one of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollway.stack.preset import cache_dir

VERSIONS = {"megatron-core": "0.16.1", "megatron-bridge": "0.3.1"}
SECONDS = 600.0


def install_megatron(package: str = "megatron-core") -> Path:
    """Return the directory to put on the path; skip the test where it cannot be installed."""
    version = VERSIONS[package]
    directory = cache_dir() / f"{package}-{version}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="megatron-", dir=directory.parent) as scratch:
        making = Path(scratch, "made")
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"),
            *("--only-binary", ":all:", "--target", str(making), f"{package}=={version}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed here: {done.stderr.strip()[-500:]}")
        if not directory.is_dir():  # another run may have been faster
            making.rename(directory)
    return directory
