"""Broadcast weights in prime-rl's layout, from a trainer of your own.

    sender = BroadcastSender("/runs/my-run", max_off_policy_steps=8)
    directory = sender.send(step, model.named_parameters())     # /runs/my-run/broadcasts/step_7

A directory appears whole: every file is on the disk before its markers, and the markers before the
directory has its name. So a crash at any moment, also of the machine, leaves no half-written step
that is marked as complete. Both marker protocols are written: `STABLE`, and the stages of the later
one, all of which have passed when the directory appears.

`CollectiveSender` sends the same weights as prime-rl's `nccl` broadcast does: over NCCL from a GPU,
over gloo from CPU memory.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollway.errors import UsageError, WeightsError
from rollway.integrations.prime_rl.directories import OFFER_FILE
from rollway.weights import leftovers
from rollway.weights.adapter import check_config
from rollway.weights.checkpoint import publish_checkpoint
from rollway.weights.transports.base import Source, check_retention, inspect_source
from rollway.weights.transports.files import SHARD_BYTES, save_tensors

if TYPE_CHECKING:
    from rollway.weights.offer import Offer
    from rollway.weights.transports.group import Group

STAGES = (".sender_ready", ".started", ".finished")
_RECEIVER_MARKERS = ("NCCL_READY", ".receiver_ready")
_POLL_SECONDS = 0.1
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
        """Keep the `keep_recent` newest steps, and every one that is a multiple of
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
            _write_json(directory / _ADAPTER_CONFIG, config)

        return self._publish(step, write)

    def send_offer(self, step: int, offer: Offer) -> Path:
        """Write what a publisher returned for the weights of a step, for `nixl`: workers then read
        them from the trainer's memory. Return its directory."""
        return self._publish(step, lambda path: _write_json(path / OFFER_FILE, offer.as_json()))

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


class CollectiveSender:
    """The trainer's side of prime-rl's `nccl` weight broadcast, as rank 0 of a group with all ranks
    of all engines.

    Example:
        with CollectiveSender("127.0.0.1", 29501, 2, output_dir="/runs/my-run") as sender:
            sender.connect()  # the orchestrator sends /init_broadcaster meanwhile
            for step in range(steps):
                sender.send(step, model.named_parameters())  # and /update_weights meanwhile
    """

    def __init__(
        self,
        host: str,
        port: int,
        inference_world_size: int,
        timeout: float = 1200.0,
        *,
        output_dir: Path | str | None = None,
        device: str = "cpu",
    ) -> None:
        """Listen at once, and return; port 0 uses any free one.

        `inference_world_size` counts every rank of every worker. All must join within `timeout`
        seconds, and each message must reach them within `timeout`. With `output_dir`, `send`
        announces each step by markers in `<output_dir>/broadcasts/step_N`, as prime-rl does, and
        waits for the orchestrator's; without it, the caller coordinates. `device` is "cpu" or
        "cuda"."""
        from rollway.weights.transports.group import serve_store

        if inference_world_size < 1 or timeout <= 0:
            raise UsageError("There must be at least one rank, and a time limit above 0.")
        self._store, self.port = serve_store(host, port, timeout)
        self._host, self._ranks, self._timeout = host, inference_world_size, timeout
        self._root = None if output_dir is None else Path(output_dir) / "broadcasts"
        self._device_name = device
        self._group: Group | None = None
        self._is_closed = False

    def connect(self) -> None:
        """Wait until all ranks have joined; raise `WeightsError` if they do not within the time.
        `send` does it too."""
        import torch

        from rollway.weights.transports.group import Place, form_group

        if self._group is None:
            place = Place(
                host=self._host,
                port=self.port,
                receivers=self._ranks,
                init_seconds=self._timeout,
                step_seconds=self._timeout,
            )
            device = torch.device(self._device_name)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            self._group = form_group(place, 0, self._store, device, self._check)

    def send(self, step: int, tensors: Source) -> Path | None:
        """Send the weights of a step to all ranks; return the directory of its markers, if any.

        After an error the group is of no use: close this sender, and open another one."""
        from rollway.weights.transports.group import send
        from rollway.weights.transports.state_dicts import make_messages, split_in_layers

        self.connect()
        assert self._group is not None
        state_dicts = split_in_layers(inspect_source(tensors).pairs())
        directory = None if self._root is None else self._announce(self._root / f"step_{step}")
        send(self._group, make_messages(state_dicts, self._group.device))
        if directory is not None:
            (directory / ".finished").touch()
        return directory

    def close(self) -> None:
        """Leave the group; a `send` under way on another thread breaks off."""
        self._is_closed = True
        if self._group is not None:
            self._group.close()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _announce(self, directory: Path) -> Path:
        """Mark a step as ready to be received, and wait until the orchestrator is, by either
        protocol of markers."""
        # Markers of an earlier run would start the transfer before anybody receives.
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for marker in ("STABLE", ".sender_ready"):
            (directory / marker).touch()
        deadline = time.monotonic() + self._timeout
        while not any((directory / marker).exists() for marker in _RECEIVER_MARKERS):
            self._check()
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"No receiver was ready for {directory} within {self._timeout:g} s.",
                    "Check that the orchestrator runs, and watches this directory.",
                )
            time.sleep(_POLL_SECONDS)
        (directory / ".started").touch()
        return directory

    def _check(self) -> None:
        if self._is_closed:
            raise WeightsError("The sender was closed.")


def _write_json(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(fields)))


def _count_idle_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
