"""Broadcast weights in prime-rl's layout, from a trainer of your own.

    sender = BroadcastSender("/runs/my-run", max_off_policy_steps=8)
    directory = sender.send(step, model.named_parameters())     # /runs/my-run/broadcasts/step_7

A directory appears whole: every file is on the disk before its markers, and the markers before the
directory has its name. So a crash at any moment, also of the machine, leaves no half-written step
that is marked as complete. Both marker protocols are written: `STABLE`, and the stages of the later
one, all of which have passed when the directory appears.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.adapter import check_config
from rollway.weights.checkpoint import publish_checkpoint
from rollway.weights.transports.base import Source, inspect_source
from rollway.weights.transports.files import SHARD_BYTES, save_tensors
from rollway.weights.transports.versions import check_retention

STAGES = (".sender_ready", ".started", ".finished")
_STEP = re.compile(r"step_(\d{1,15})")
_ADAPTER_FILE, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class BroadcastSender:
    """Writes `<output_dir>/broadcasts/step_N`, and removes steps that nobody needs any more."""

    def __init__(
        self,
        output_dir: Path | str,
        *,
        keep_recent: int = 9,
        max_off_policy_steps: int = 8,
        checkpoint_interval: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """`keep_recent` newest steps stay, and every one that is a multiple of
        `checkpoint_interval`. A rollout may need weights that are `max_off_policy_steps` old, since
        engines read adapters late."""
        check_retention(keep_recent, max_off_policy_steps)
        if checkpoint_interval is not None and checkpoint_interval < 1:
            raise UsageError(
                f"checkpoint_interval is {checkpoint_interval}.", "Use 1 or more, or None."
            )
        self._root = Path(output_dir) / "broadcasts"
        self._keep_recent = keep_recent
        self._interval = checkpoint_interval
        self._shard_bytes = shard_bytes
        self._root.mkdir(parents=True, exist_ok=True)
        self._clean()

    def send(self, step: int, tensors: Source) -> Path:
        """Write the weights of a step; return its directory.

        A step that is there already, from a run that was resumed, is replaced."""
        source = inspect_source(tensors)
        sums: dict[str, int] = {}

        def write(directory: Path) -> None:
            sums.update(save_tensors(directory, source.pairs(), self._shard_bytes))

        return self._publish(step, write, sums)

    def send_adapter(
        self, step: int, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Path:
        """Write a LoRA adapter of a step, as PEFT saves it; return its directory."""
        check_config(config)

        def write(directory: Path) -> None:
            from safetensors.torch import save_file

            save_file(dict(tensors), directory / _ADAPTER_FILE)
            (directory / _ADAPTER_CONFIG).write_text(json.dumps(dict(config)))

        return self._publish(step, write)

    def list_steps(self) -> list[int]:
        """Return the steps that are there, the oldest first."""
        names = (_STEP.fullmatch(path.name) for path in self._root.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _publish(
        self, step: int, write: Callable[[Path], None], sums: Mapping[str, int] | None = None
    ) -> Path:
        if step < 0:
            raise UsageError(f"Step {step} is below 0.", "Steps are whole numbers from 0.")

        def write_all(directory: Path) -> None:
            write(directory)
            for stage in STAGES:
                (directory / stage).touch()

        directory = self._root / f"step_{step}"
        try:
            self._discard(directory)
            publish_checkpoint(directory, write_all, sums)
        except OSError as error:
            raise WeightsError(
                f"Step {step} cannot be written to {self._root}: {error.strerror}."
            ) from error
        self._clean()
        return directory

    def _clean(self) -> None:
        """Remove old steps, and what senders that died have left."""
        for step in self.list_steps()[: -self._keep_recent]:
            if self._interval is None or step % self._interval:
                self._discard(self._root / f"step_{step}")
        for path in self._root.glob(".step_*"):
            is_trash = path.name.endswith(f".{leftovers.TRASH}")
            if is_trash or leftovers.is_abandoned(path.name, _count_idle_seconds(path)):
                shutil.rmtree(path, ignore_errors=True)

    def _discard(self, directory: Path) -> None:
        """Remove a directory, out of sight first: no reader sees half of it."""
        trash = self._root / leftovers.scratch_name(directory.name, leftovers.TRASH)
        try:
            directory.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)


def _count_idle_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
