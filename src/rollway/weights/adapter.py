"""LoRA adapters beside their tensors: the config, and the name under which a version is served.

Every version has its own name, for example `style@2`. An engine identifies an adapter's cached
blocks by its name and path, and Dynamo answers "success" to a load under a name that is in use and
keeps the old adapter. With a new name neither can mix two versions, and requests that run on the
old version finish on it.

The config is part of the signed offer, because it decides what the tensors mean. The directory that
a worker writes is derived from both; a caller cannot choose any part of its path.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.offer import Offer

HOME = Path("/dev/shm")
_KEY, _PREFIX, _OWNER = "adapter", "rollway-adapters-", ".owner"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_CONFIG_BYTES = 1 << 20
# vLLM ignores these fields of PEFT's config; served without them, it is another adapter.
_IGNORED = ("rank_pattern", "alpha_pattern", "layer_replication", "fan_in_fan_out", "lora_bias")
_GIVE_DICT = "Give the dict of adapter_config.json."


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of an adapter, without its tensors."""

    served: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9]{1,16}\Z")]
    config: dict[str, Any]
    place: Annotated[str, msgspec.Meta(max_length=256)]
    """The worker that has this copy: workers of one machine must not remove each other's."""


class _Config(msgspec.Struct):
    """The fields of PEFT's config that are checked here."""

    r: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    lora_alpha: float
    target_modules: str | list[str]


def served_name(name: str, version: int) -> str:
    """Return the model name that requests use for one version of an adapter."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name}` cannot be the name of an adapter.",
            "Use letters, digits, dots, dashes and underscores.",
        )
    if version < 0:
        raise UsageError(f"Version {version} is below 0.", "Versions are whole numbers from 0.")
    return f"{name}@{version}"


def version_of(served: str) -> int:
    """Return the version in a name that `served_name` returned."""
    return int(served.rpartition("@")[2])


def is_adapter(model: str) -> bool:
    """Return whether a model name that a server lists is the name of an adapter of ours."""
    name, at, version = model.rpartition("@")
    return bool(at and _NAME.fullmatch(name) and version.isdecimal())


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `UsageError` if vLLM would serve another adapter than this config describes.

    The engine checks the rest."""
    ignored = [field for field in _IGNORED if config.get(field)]
    if ignored:
        raise UsageError(
            f"The adapter's config has {ignored[0]}, which vLLM would ignore silently.",
            "Train with one rank and one alpha for all layers.",
        )
    try:
        if not math.isfinite(msgspec.convert(dict(config), _Config).lora_alpha):
            raise ValueError("lora_alpha is not finite")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"The adapter's config has a missing or wrong field: {str(error)[:300]}.",
            "Give PEFT's whole config: the dict of adapter_config.json.",
        ) from error
    try:
        size = len(msgspec.json.encode(dict(config)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"The adapter's config is not plain JSON: {str(error)[:300]}.", _GIVE_DICT
        ) from error
    if size > _MAX_CONFIG_BYTES:
        raise UsageError(
            f"The adapter's config takes {size} bytes, more than {_MAX_CONFIG_BYTES}.", _GIVE_DICT
        )


def attach_adapter(offer: Offer, adapter: Adapter) -> Offer:
    """Return the offer of an adapter's tensors with the adapter in it, to be signed as one."""
    where = {**offer.where, _KEY: msgspec.to_builtins(adapter)}
    return msgspec.structs.replace(offer, where=where, mac="")


def detach_adapter(offer: Offer) -> tuple[Offer, Adapter]:
    """Return the transport's offer and the adapter that `attach_adapter` put together."""
    where = dict(offer.where)
    try:
        adapter = msgspec.convert(where.pop(_KEY), Adapter)
    except (KeyError, msgspec.ValidationError, RecursionError) as error:
        raise WeightsError(
            f"This is no offer of an adapter: {error}.", "Publish the adapter again."
        ) from error
    check_config(adapter.config)
    return msgspec.structs.replace(offer, where=where), adapter


def home_of(place: str) -> Path:
    """Return the directory of one worker's adapters."""
    return HOME / f"{_PREFIX}{_digest(place)}"


def directory_of(offer: Offer, adapter: Adapter) -> Path:
    """Return where a worker writes an adapter; equal only for equal weights and equal configs."""
    return home_of(adapter.place) / _digest(adapter.served, offer.identity, adapter.config)


def remove_abandoned() -> None:
    """Remove the adapters of workers that have ended without removing them."""
    for home in list_abandoned():
        shutil.rmtree(home, ignore_errors=True)


def list_abandoned() -> Iterator[Path]:
    """List the directories of workers that have ended without removing them."""
    for home in HOME.glob(f"{_PREFIX}*"):
        owners = list(home.glob(f"*{_OWNER}"))
        if owners and all(leftovers.is_abandoned(path.name, 0.0) for path in owners):
            yield home


def create_adapter_home(place: str) -> Path:
    """Create the private directory of this worker's adapters, marked with this process."""
    remove_abandoned()
    home = home_of(place)
    home.mkdir(mode=0o700, exist_ok=True)
    # /dev/shm is open to all users: another one may have created the directory, or a link, first.
    status = home.lstat()
    if home.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise WeightsError(
            f"{home} is there already and is not this worker's.", "Remove it, or ask its owner to."
        )
    (home / f"{leftovers.writer_mark()}{_OWNER}").touch()
    return home


def _digest(*facts: Any) -> str:
    encoded = msgspec.json.encode(facts, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]
