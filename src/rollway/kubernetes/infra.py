"""Read the description of a run: a recipe's `infra:`, or a file beside it.

    defaults of the fields  <  the user's  <  the infra file, or the recipe's `infra:`  <  --set

Mappings are merged key by key; any other value replaces the one below it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollway.errors import SpecError, UsageError
from rollway.kubernetes.objects import Object, check_image, check_name
from rollway.kubernetes.spec import Infra as Infra
from rollway.yaml_input import apply_override, describe_error, read_documents, read_yaml

DEFAULTS_VARIABLE = "ROLLWAY_K8S_DEFAULTS"
"""Names a file of defaults; without it ~/.config/rollway/k8s.yaml is read, if it is there."""


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
    source = infra or recipe or Path()
    own = read_document(infra) if infra else dict(inside or {})
    data = merge(_read_user_defaults(), _resolve_paths(own, source.parent))
    for override in overrides:
        apply_override(data, override)
    _resolve_paths(data, Path(), confined=False)  # what `--set` names
    if not data.get("name"):
        data["name"] = re.sub(r"[^a-z0-9]+", "-", (recipe or source).stem.lower()).strip("-")
    parsed = parse_infra(data)
    _check_recipe(content, parsed, recipe)
    return parsed


def parse_infra(data: Mapping[str, Any]) -> Infra:
    """Validate plain data; a SpecError names each wrong field by its path."""
    try:
        infra = Infra.model_validate(data)
    except ValidationError as error:
        raise SpecError(describe_error(error, Infra, "the infra file")) from error
    check_name("RayJob", infra.name, "name")  # the shortest limit of all that is named after it
    if infra.namespace:
        check_name("Service", infra.namespace, "namespace")
    if infra.image:
        check_image(infra.image, "image")
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
        result[key] = merge(known, value) if both else deepcopy(value)  # type: ignore[arg-type]
    return result


def read_document(path: Path) -> Object:
    """Read a YAML or TOML file that is a mapping."""
    if path.suffix == ".toml":
        try:
            return tomllib.loads(_read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{path} is not valid TOML: {error}.", "Correct it.") from error
    data = read_yaml(_read_text(path), str(path))
    if not isinstance(data, dict):
        raise SpecError(f"{path} is not a mapping of fields.", "See docs/kubernetes.md.")
    return data


def read_yaml_documents(path: Path) -> list[Any]:
    """Read all documents of a YAML file."""
    return read_documents(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Check the path.") from error


def _read_user_defaults() -> Object:
    named = os.environ.get(DEFAULTS_VARIABLE)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(named) if named else Path(base) / "rollway" / "k8s.yaml"
    if not named and not path.is_file():
        return {}
    return _resolve_paths(read_document(path), path.parent)


def _resolve_paths(data: Object, folder: Path, *, confined: bool = True) -> Object:
    """Make the paths of files of this machine absolute, relative to a folder; raise SpecError for
    one that leads out of it. Only who types a path may name any."""
    graphs, launch = data.get("dynamo"), data.get("launch")
    code = launch.get("code") if isinstance(launch, dict) else None
    parts = [
        (f"dynamo.{key}.{field}", part, field)
        for key, part in (graphs.items() if isinstance(graphs, dict) else ())
        for field in ("manifest", "stack")
    ]
    if isinstance(code, dict) and code.get("source") == "upload":
        parts.append(("launch.code.path", code, "path"))
    for where, part, field in parts:
        if isinstance(part, dict) and isinstance(part.get(field), str):
            path = (folder / part[field]).resolve()
            if confined and not path.is_relative_to(folder.resolve()):
                raise SpecError(
                    f"`{where}`: {part[field]} is outside of {folder}, the folder of the file.",
                    "Put it beside the file, or below it.",
                )
            part[field] = str(path)
    return data


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
