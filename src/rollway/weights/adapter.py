"""What goes with the tensors of a LoRA adapter: its config, and the name that it is served under.

Every version has a name of its own, `style@2`. An engine knows an adapter's cached blocks by its
name and path, Dynamo answers "success" to a load under a name that is taken and keeps the old one:
with a new name neither can mix two versions, and what runs on the old one ends on it.

The config travels in the signed offer, since it decides what the tensors mean. The directory that
a worker writes is derived from both, and from nothing that a caller could choose as a path.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.offer import Offer

HOME = Path("/dev/shm")
_KEY, _PREFIX, _OWNER = "adapter", "rollway-adapters-", ".owner"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Fields of PEFT's config that vLLM passes over; served without them, it is another adapter.
_MOST_CONFIG_BYTES = 1 << 20
_MOST_RANK = 1 << 16
_IGNORED = ("rank_pattern", "alpha_pattern", "layer_replication", "fan_in_fan_out", "lora_bias")


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of an adapter, beside its tensors."""

    served: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9]{1,16}\Z")]
    config: dict[str, Any]
    place: Annotated[str, msgspec.Meta(max_length=256)]
    """Whose copy it is: workers of one machine must not remove each other's."""


def served_name(name: str, version: int) -> str:
    """The model name of requests for one version of an adapter."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name}` cannot be the name of an adapter.",
            "Use letters, digits, dots, dashes and underscores.",
        )
    if version < 0:
        raise UsageError(f"Version {version} is below 0.", "Versions are whole numbers from 0.")
    return f"{name}@{version}"


def version_of(served: str) -> int:
    """The version in a name that `served_name` made."""
    return int(served.rpartition("@")[2])


def is_adapter(model: str) -> bool:
    """Whether a model name that a server lists is that of an adapter of ours."""
    name, at, version = model.rpartition("@")
    return bool(at and _NAME.fullmatch(name) and version.isdecimal())


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what would be served as something else; the engine checks the rest."""
    said = [field for field in _IGNORED if config.get(field)]
    if said:
        raise UsageError(
            f"The adapter's config has {said[0]}, which vLLM would pass over in silence.",
            "Train with one rank and one alpha for all layers.",
        )
    for field in ("r", "lora_alpha", "target_modules"):
        if field not in config:
            raise UsageError(f"The adapter's config has no {field}.", "Give PEFT's whole config.")
    _check_values(config)
    try:
        size = len(msgspec.json.encode(dict(config)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"The adapter's config is not plain JSON: {str(error)[:300]}.",
            "Give the dict of adapter_config.json.",
        ) from error
    if size > _MOST_CONFIG_BYTES:
        raise UsageError(
            f"The adapter's config takes {size} bytes, more than {_MOST_CONFIG_BYTES}.",
            "Give the dict of adapter_config.json.",
        )


def _check_values(config: Mapping[str, Any]) -> None:
    """The fields that are used as numbers or names are such."""
    rank, alpha, modules = (config[field] for field in ("r", "lora_alpha", "target_modules"))
    several = isinstance(modules, list | tuple | set | frozenset)
    wrong = {
        "r": type(rank) is not int or not 0 < rank <= _MOST_RANK,
        "lora_alpha": type(alpha) not in (int, float) or not math.isfinite(alpha),
        "target_modules": not isinstance(modules, str)
        and not (several and all(isinstance(one, str) for one in modules)),
    }
    for field in (field for field, is_wrong in wrong.items() if is_wrong):
        raise UsageError(
            f"The adapter's config has a {field} that cannot be: {ascii(config[field])[:80]}.",
            "Give the dict of adapter_config.json.",
        )


def attached(offer: Offer, adapter: Adapter) -> Offer:
    """The offer of an adapter's tensors with the rest of it, to be signed as one."""
    where = {**offer.where, _KEY: msgspec.to_builtins(adapter)}
    return msgspec.structs.replace(offer, where=where, mac="")


def detached(offer: Offer) -> tuple[Offer, Adapter]:
    """Both again, as the transport and the engine need them."""
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
    """The directory of one worker's adapters."""
    return HOME / f"{_PREFIX}{_digest(place)}"


def directory_of(offer: Offer, adapter: Adapter) -> Path:
    """Where a worker puts it; equal only for equal weights with an equal config."""
    return home_of(adapter.place) / _digest(adapter.served, offer.identity, adapter.config)


def remove_abandoned() -> None:
    """Remove the adapters of workers that have ended without doing so."""
    for home in HOME.glob(f"{_PREFIX}*"):
        owners = list(home.glob(f"*{_OWNER}"))
        if owners and all(leftovers.gone(path.name, 0.0) for path in owners):
            shutil.rmtree(home, ignore_errors=True)


def take_home(place: str) -> Path:
    """Make the directory of this worker's adapters, for it alone, and sign it as its owner."""
    remove_abandoned()
    home = home_of(place)
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if home.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WeightsError(f"{home} is there already and is not this worker's.")
    (home / f"{leftovers.mark()}{_OWNER}").touch()
    return home


def _digest(*facts: Any) -> str:
    encoded = msgspec.json.encode(facts, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]
