"""Read the description of a run: a recipe's `infra:`, or a file beside it.

    defaults of the fields  <  the user's  <  the infra file, or the recipe's `infra:`  <  --set

Mappings are merged key by key; any other value replaces the one below it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollway.errors import SpecError, UsageError
from rollway.kubernetes.names import Object, check_image, check_labels, check_name
from rollway.kubernetes.spec import Infra as Infra
from rollway.plain import apply_override, check_plain, copy_plain, describe_error, read_yaml

DEFAULTS_VARIABLE = "ROLLWAY_K8S_DEFAULTS"
"""Names a file of defaults; without it ~/.config/rollway/k8s.yaml is read, if it is there."""
LARGEST_FILE = 1 << 20  # bytes


def load_infra(
    recipe: Path | None = None, infra: Path | None = None, overrides: Sequence[str] = ()
) -> Infra:
    """Read a run from a recipe, an infra file, or both; `overrides` are `--set` values.

    Raises:
        SpecError: a field is unknown or wrong; the message has its path.
    """
    if recipe is None and infra is None:
        raise UsageError("There is no description of a run.", "Give a recipe or `--infra FILE`.")
    content = read_document(recipe) if recipe else {}
    inside = content.get("infra")
    if infra is not None and inside is not None:
        raise UsageError(
            f"{recipe} has `infra:`, and {infra} is given too.", "Keep one of the two."
        )
    if infra is None and not isinstance(inside, dict):
        raise UsageError(f"{recipe} has no `infra:` section.", "Give `--infra FILE`, or add one.")
    layers = [_read_user_defaults()]
    source = infra or recipe or Path()
    layers.append(_resolve_paths(read_document(infra) if infra else dict(inside or {}), source))
    data: Object = {}
    for layer in layers:
        data = merge(data, layer)
    for override in overrides:
        apply_override(data, override)
    _resolve_overrides(data)
    if not data.get("name"):
        data["name"] = re.sub(r"[^a-z0-9]+", "-", (recipe or source).stem.lower()).strip("-")
    parsed = parse_infra(data)
    _check_recipe(content, parsed, recipe)
    return parsed


def parse_infra(data: Mapping[str, Any]) -> Infra:
    """Validate plain data; a SpecError names each wrong field by its path."""
    check_plain(data, "The infra file")
    try:
        infra = Infra.model_validate(data)
    except ValidationError as error:
        raise SpecError(describe_error(error, Infra, "the infra file")) from error
    check_name("RayJob", infra.name, "name")  # the shortest limit of all that is named after it
    if infra.namespace:
        check_name("Service", infra.namespace, "namespace")
    if infra.image:
        check_image(infra.image, "image")
    check_labels(infra.labels, "labels")
    for section in ("dynamo", "kuberay", "deployments"):
        for key, part in getattr(infra, section).items():
            check_labels(part.labels, f"{section}.{key}.labels")
    taken = {volume.mountPath: name for name, volume in infra.all_volumes.items()}
    if len(taken) < len(infra.all_volumes):
        raise SpecError("Two volumes have one `mountPath`.", "Mount each elsewhere.")
    return infra


def merge(base: Object, over: Mapping[str, Any]) -> Object:
    """Return a mapping with another one over it: mappings key by key, anything else whole."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        result[key] = merge(known, value) if both else copy_plain(value)  # type: ignore[arg-type]
    return result


def read_document(path: Path) -> Object:
    """Read a YAML or TOML file that is a mapping."""
    text = read_text(path)
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{path} is not valid TOML: {error}.", "Correct it.") from error
    data = read_yaml(text, str(path))
    if not isinstance(data, dict):
        raise SpecError(f"{path} is not a mapping of fields.", "See docs/kubernetes.md.")
    return data


def read_text(path: Path) -> str:
    """Read a file of bounded size."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        text = content.decode()
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.", "Check the path.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}.", "Check the file.") from error
    if len(content) > LARGEST_FILE:
        raise SpecError(f"{path} has more than {LARGEST_FILE >> 20} MiB.", "Is it the right file?")
    return text


def find_user_defaults() -> Path:
    """Return the file of the user's defaults, which need not be there."""
    named = os.environ.get(DEFAULTS_VARIABLE)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(named) if named else Path(base) / "rollway" / "k8s.yaml"


def _read_user_defaults() -> Object:
    path = find_user_defaults()
    if not path.is_file() and DEFAULTS_VARIABLE not in os.environ:
        return {}
    return _resolve_paths(read_document(path), path)


def _resolve_paths(data: Object, source: Path) -> Object:
    """Make the paths that a file names absolute; raise SpecError if one leads out of its folder."""
    folder = source.resolve().parent
    for where, part, field in _list_paths(data):
        resolved = (folder / part[field]).resolve()
        if not resolved.is_relative_to(folder):
            raise SpecError(
                f"`{where}`: {part[field]} is outside of {folder}, the folder of {source.name}.",
                "Put the file beside it, or below it.",
            )
        part[field] = str(resolved)
    return data


def _resolve_overrides(data: Object) -> None:
    """Make what `--set` names absolute. Whoever types a path may name any."""
    for _, part, field in _list_paths(data):
        part[field] = str(Path(part[field]).resolve())


def _list_paths(data: Object) -> list[tuple[str, Object, str]]:
    """Return the fields that name files of this machine: each by name, its mapping and its key."""
    graphs, launch = data.get("dynamo"), data.get("launch")
    parts = [
        (f"dynamo.{key}", part, field)
        for key, part in (graphs.items() if isinstance(graphs, dict) else ())
        for field in ("manifest", "stack")
    ]
    code = launch.get("code") if isinstance(launch, dict) else None
    if isinstance(code, dict) and code.get("source") == "upload":
        parts.append(("launch.code", code, "path"))
    return [
        (f"{name}.{field}", part, field)
        for name, part, field in parts
        if isinstance(part, dict) and isinstance(part.get(field), str)
    ]


def _check_recipe(recipe: Any, infra: Infra, path: Path | None) -> None:
    """Raise SpecError if a recipe looks for its graph in another namespace than the infra's."""
    pending = [recipe]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            named = item.get("namespace") if item.get("dgd_name") else None
            if isinstance(named, str) and infra.namespace and named != infra.namespace:
                raise SpecError(
                    f"{path} looks for {item['dgd_name']} in the namespace {named}, and the infra "
                    f"file has `namespace: {infra.namespace}`.",
                    "Give both the same, or leave it out of the recipe.",
                )
            pending += [value for key, value in item.items() if key != "infra"]
        elif isinstance(item, list):
            pending += item
