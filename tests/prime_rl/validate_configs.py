"""Read example configs with prime-rl's own classes: validate_configs.py FILE…

Environments are left out: they are packages of their own."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig

CLASSES = {"orchestrator.toml": OrchestratorConfig, "trainer.toml": TrainerConfig}

for file in map(Path, sys.argv[1:]):
    fields = tomllib.loads(file.read_text())
    if file.name == "orchestrator.toml":
        fields["train"].pop("source")
    CLASSES[file.name].model_validate(fields)
    print(file.name)
