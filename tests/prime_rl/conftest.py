"""Workers behind prime-rl's server: two of vLLM, with whole weights and with adapters, or light
ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollway
from tests.prime_rl.environment import PYTHON, ROOT
from tests.prime_rl.training import Adapter
from tests.stack.prime_rl import PrimeServer, light_stack
from tests.stack.stacks import VLLM_ARGS


@pytest.fixture
def vllm_server(
    request: pytest.FixtureRequest, vllm_stack: rollway.Stack, session_home: Path, tmp_path: Path
) -> Iterator[PrimeServer]:
    """The parameter is the type of broadcasts. One that is not named is that of the run before."""
    options = "--weight-broadcast", getattr(request, "param", "filesystem")
    home = {"ROLLWAY_HOME": str(session_home)}
    running = PrimeServer("shared", tmp_path, options, env=home).start()
    yield running
    running.end()


@pytest.fixture(scope="session")
def lora_stack(base_model: Path, session_home: Path) -> Iterator[None]:
    args = {**VLLM_ARGS, "enable-lora": True, "max-lora-rank": Adapter.RANK, "max-cpu-loras": 4}
    model = {"path": str(base_model), "name": "tiny", "replicas": 2, "args": args}
    model |= {"env": {"DYN_LORA_ENABLED": "true"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        opening = rollway.up({"name": "lora", "models": [model]})
        opening.__enter__()
    yield
    opening.__exit__(None, None, None)


@pytest.fixture
def lora_server(lora_stack: None, session_home: Path, tmp_path: Path) -> Iterator[PrimeServer]:
    running = PrimeServer("lora", tmp_path, env={"ROLLWAY_HOME": str(session_home)}).start()
    yield running
    running.end()


@pytest.fixture(scope="module")
def python() -> Path:
    path = Path(os.environ.get(PYTHON) or ROOT / ".venv-prime-rl" / "bin" / "python")
    if not path.is_file():
        pytest.skip("there is no .venv-prime-rl: run `make setup-prime-rl`")
    return path


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrimeServer]:
    home, output_dir = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("outputs")
    with light_stack(base_model, home, output_dir):
        running = PrimeServer("prime", output_dir, env={"ROLLWAY_HOME": str(home)}).start()
        yield running
        running.end()
