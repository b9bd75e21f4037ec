"""One real stack, two vLLM workers on CPU, shared by all tests of a session that only use it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollway
from rollway.stack.preset import cache_dir
from tests.stack import brake
from tests.stack.faults import Move
from tests.stack.policies import Policy, perturbed
from tests.stack.tool_model import cached_tool_model

VLLM_ARGS = {
    "max-model-len": 2048,
    "max-num-seqs": 64,
    "kv-cache-memory-bytes": 64 * 2**20,
}


@pytest.fixture(scope="session")
def brake_file(session_home: Path) -> Path:
    """While it exists, the engines of the shared stack are slow."""
    return session_home / "brake"


@pytest.fixture(scope="session")
def vllm_stack(session_home: Path, base_model: Path, brake_file: Path) -> Iterator[rollway.Stack]:
    model = {"path": str(base_model), "name": "tiny", "replicas": 2}
    model |= {"args": {**VLLM_ARGS, **brake.ARGS}, "env": brake.environment(brake_file)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        opening = rollway.up({"name": "shared", "models": [model]})
        stack = opening.__enter__()
    # Here, because the tests that follow move it on.
    assert list(stack.fleet.read_versions().values()) == [0, 0]
    yield stack
    opening.__exit__(None, None, None)


@pytest.fixture(scope="session")
def tool_model() -> Path:
    return cached_tool_model(cache_dir() / "tests")


@pytest.fixture(scope="session")
def tool_stack(session_home: Path, tool_model: Path) -> Iterator[rollway.Stack]:
    """A model that calls tools, with parsers, and /inference/v1/generate switched on."""
    args = {**VLLM_ARGS, "dyn-tool-call-parser": "hermes"}
    frontend = {"env": {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1"}}
    model = {"path": str(tool_model), "name": "caller", "args": args}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(session_home))
        opening = rollway.up({"name": "tools", "models": [model], "frontend": frontend})
        stack = opening.__enter__()
    yield stack
    opening.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def shared_home(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    """Tests of the shared stacks see the home it runs in."""
    if {"vllm_stack", "tool_stack"} & set(request.fixturenames):
        monkeypatch.setenv("ROLLWAY_HOME", str(request.getfixturevalue("session_home")))


@pytest.fixture(scope="session")
def policies(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    """The base checkpoint and others with the same shapes, each with a torch model to compare."""
    directory = tmp_path_factory.mktemp("policies")
    others = [perturbed(base_model, directory / f"p{seed}", seed) for seed in (1, 2)]
    return [Policy(path) for path in (base_model, *others)]


@pytest.fixture(scope="session")
def versions() -> Iterator[int]:
    """Versions of the shared stack, each used once."""
    return itertools.count(1)


@pytest.fixture(scope="session")
def move(versions: Iterator[int], policies: list[Policy]) -> Move:
    return Move(versions, policies)
