"""Check a directory that prime-rl's trainer has broadcast, before any worker is touched.

    <output_dir>/broadcasts/step_7/
        model-00001-of-00002.safetensors …   no config.json; bf16; or an adapter, as PEFT saves it
        STABLE                               the trainer has written all of it (until August 2026)
        .sender_ready .receiver_ready .started .finished        the same, later

A marker says that the directory is complete. prime-rl neither flushes the files nor, before August,
removes an old marker when it writes a step again, so a marker that is older than a file counts for
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollway.errors import UsageError
from rollway.weights.checkpoint import Checkpoint, check_checkpoint, read_config
from rollway.weights.layout import is_kernel_layout

OFFER_FILE = "rollway_offer.json"
Marker = Literal["either", "STABLE", ".finished"]
_STEP = re.compile(r"step[_-](\d{1,15})")
_FILES = (".safetensors", ".json")
FileStamp = tuple[tuple[str, int, int], ...]
"""Name, time and size of the files in a directory, without the markers."""
_MARKER_SECONDS = 10.0
"""How long a marker may take to appear: the orchestrator has seen it, possibly on another machine,
and network file systems show new files a few seconds later."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class BroadcastRules:
    """Where broadcasts may be, and what marks them as complete."""

    roots: Sequence[Path] = ()
    """`checkpoint_roots` of the stack; empty allows every directory."""
    output_dir: Path | None = None
    """The trainer's output directory, for relative paths; without `roots` also the only root."""
    marker: Marker = "either"
    marker_seconds: float = _MARKER_SECONDS

    async def find(self, name: str) -> Path:
        """Return the directory that a request names, once its marker is there."""
        path = self._resolve(name)
        deadline = time.monotonic() + self.marker_seconds
        while problem := self._find_problem(name, path):
            if time.monotonic() >= deadline:
                raise problem
            await asyncio.sleep(_POLL_SECONDS)
        return path

    async def check_weights(self, path: Path) -> Checkpoint:
        """Read the headers of a whole model; raise if it cannot be served."""
        checkpoint = await asyncio.to_thread(
            check_checkpoint, path, roots=self.allowed_roots, whole=False, needs_config=False
        )
        tensors = checkpoint.tensors
        quantised = [name for name, t in tensors.items() if is_kernel_layout(name, t.dtype)]
        if quantised:
            raise UsageError(
                f"{path} has weights in a kernel's layout ({min(quantised)}). The engine makes its "
                "own scales, so they would be quantised twice.",
                "Broadcast plain bf16 weights: quantize_in_weight_transfer = false.",
            )
        return checkpoint

    def read_stamp(self, name: str) -> FileStamp:
        """Return which files a directory has, and when they were written; none if it is not one
        that may be read."""
        with contextlib.suppress(UsageError, OSError):
            entries = [(f.name, f.stat()) for f in self._resolve(name).iterdir()]
            return tuple(
                sorted(
                    (file, stat.st_mtime_ns, stat.st_size)
                    for file, stat in entries
                    if file.endswith(_FILES)
                )
            )
        return ()

    @property
    def allowed_roots(self) -> list[Path]:
        """The directories that broadcasts must be in; none allows all."""
        return list(self.roots) or ([self.output_dir] if self.output_dir else [])

    def _resolve(self, name: str) -> Path:
        path = Path(name)
        if not path.is_absolute():
            if self.output_dir is None:
                raise UsageError(
                    f"`{name}` is a relative path.",
                    "Start the server with --output-dir, the directory that the trainer's "
                    "output_dir is relative to, or use an absolute output_dir.",
                )
            path = self.output_dir / path
        try:
            path = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a link to itself, NUL
            raise self._make_refusal(name) from error
        roots = [root.resolve() for root in self.allowed_roots]
        if roots and not any(path.is_relative_to(root) for root in roots):
            raise self._make_refusal(name)
        return path

    def _make_refusal(self, name: str) -> UsageError:
        """Return one answer for all that may not be read: the caller must not learn what exists."""
        roots = ", ".join(map(str, self.allowed_roots))
        return UsageError(
            f"{name!a} is absent, of another user, or outside the allowed checkpoint roots"
            f"{f' ({roots})' if roots else ''}.",
            "Broadcast below `checkpoint_roots` of the stack, or below --output-dir, as the user "
            "of this server or as the owner of that directory.",
        )

    def _is_trusted(self, path: Path) -> bool:
        """Return whether a directory and its files are of users whose weights may be served: the
        server's own, root, and whoever owns a directory that the server was started with."""
        try:
            users = {os.geteuid(), 0} | {root.stat().st_uid for root in self.allowed_roots}
            return path.is_dir() and users.issuperset(
                file.stat().st_uid for file in (path, *path.iterdir())
            )
        except OSError:
            return False

    def _find_problem(self, name: str, path: Path) -> UsageError | None:
        """Return why a directory cannot be served now; None if it is there, and complete."""
        if not self._is_trusted(path):
            return self._make_refusal(name)
        markers = ["STABLE", ".finished"] if self.marker == "either" else [self.marker]
        marked = [_read_time(path / marker) for marker in markers]
        cause = "" if any(marked) else f"{path} has no marker {' or '.join(markers)}."
        # Markers have their own times; only what the trainer wrote as data must be older.
        written = max((_read_time(f) for f in path.iterdir() if f.suffix in _FILES), default=0)
        if any(marked) and written > max(marked):
            cause = f"{path} has files that are newer than its marker."
        hint = "Send it once the trainer has written all of it."
        return UsageError(cause, hint) if cause else None


def read_step(path: Path) -> int | None:
    """Return the step in the name of a directory; None if it names none."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def read_adapter_config(path: Path) -> dict[str, object]:
    """Return PEFT's config of an adapter directory."""
    if not (path / "adapter_config.json").is_file():
        raise UsageError(
            f"{path} has no adapter_config.json, so it is not an adapter.",
            "/load_lora_adapter takes adapters, /update_weights whole models.",
        )
    return read_config(path / "adapter_config.json")


def _read_time(path: Path) -> int:
    """Return when a file was written, in nanoseconds; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
