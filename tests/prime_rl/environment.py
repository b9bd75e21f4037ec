"""Where prime-rl and its released clients are on this machine."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = "ROLLWAY_PRIME_RL_PYTHON"
"""Environment variable: the interpreter that has renderers, if it is not that of .venv-prime-rl."""
SOURCE = "ROLLWAY_PRIME_RL_SRC"
