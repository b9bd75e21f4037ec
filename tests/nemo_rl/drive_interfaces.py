"""Describes NeMo-RL's interfaces, and resolves its recipes by its own loader: a script for its
environment."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from tests.nemo_rl import stand_ins

stand_ins.install()

from nemo_rl.models.generation.interfaces import (  # noqa: E402
    CollectiveSenderSpec,
    GenerationInterface,
    GenerationOutputSpec,
)
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers  # noqa: E402
from nemo_rl.weight_sync.interfaces import WeightSynchronizer  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from rollway.errors import RollwayError  # noqa: E402
from rollway.integrations.nemo_rl.check import find_problems, read_recipe  # noqa: E402


def describe(interface: type) -> dict[str, Any]:
    """Return each public method with its parameters, and whether they have defaults."""
    described = {}
    for name, member in vars(interface).items():
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        parameters = list(inspect.signature(member).parameters.values())[1:]
        described[name] = [
            [each.name, each.kind.name, each.default is not each.empty] for each in parameters
        ]
    return described


def compare_loaders(directory: Path) -> dict[str, list[str]]:
    """Resolve recipes by both loaders; return those that are equal, and those that differ. There
    are hundreds, which differ in few values: of those below, every fifth is read."""
    equal, different, recipes = [], [], {}
    for file in sorted(directory.glob("*.yaml")) + sorted(directory.glob("*/*/*.yaml"))[::5]:
        with contextlib.suppress(RollwayError):  # no recipe at all
            recipes[file] = read_recipe(file)  # before NeMo-RL has registered its functions
    register_omegaconf_resolvers()
    for file, recipe in recipes.items():
        try:
            expected: Any = OmegaConf.to_container(load_config(file), resolve=True)
        except Exception:  # noqa: BLE001  # variables that are not set, or no recipe at all
            continue
        same = normalize(recipe.values) == normalize(expected) and not recipe.unresolved
        (equal if same else different).append(file.name)
    return {"equal": equal, "different": different}


def check_examples(files: list[str]) -> dict[str, Any]:
    """Resolve our recipes by NeMo-RL's loader; return their models and what is wrong with them."""
    answer = {}
    for file in files:
        values: Any = OmegaConf.to_container(load_config(file), resolve=True)
        problems = [f"{each.key}: {each.cause}" for each in find_problems(values)]
        if normalize(read_recipe(Path(file)).values) != normalize(values):
            problems.append("Rollway resolves it otherwise.")
        dynamo = values["policy"]["generation"]["dynamo_cfg"]
        model = values["policy"]["model_name"]
        answer[Path(file).stem] = [dynamo.get("dgd_name"), model, problems]
    return answer


def normalize(value: Any) -> Any:
    """Write numbers alike: PyYAML reads 1e-8 as a text, and OmegaConf as a number."""
    if isinstance(value, dict):
        return {str(key): normalize(each) for key, each in value.items()}
    if isinstance(value, list):
        return [normalize(each) for each in value]
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return value


def main() -> None:
    question = json.load(sys.stdin)
    loaders = compare_loaders(Path(question["configs"]))
    answer = {
        "generation": describe(GenerationInterface),
        "synchronizer": describe(WeightSynchronizer),
        "output": sorted(GenerationOutputSpec.__annotations__),
        "sender": vars(CollectiveSenderSpec()),
        "examples": check_examples(question["examples"]),
        "loaders": loaders,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
