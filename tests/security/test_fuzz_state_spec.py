"""Any bytes as a state, and any text or mapping as a spec, are read or refused with an error."""

from __future__ import annotations

import json
import resource
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollway import processes
from rollway.errors import RollwayError, StateUnreadable
from rollway.spec import StackSpec, load_spec
from rollway.stack.progress import make_process_table
from rollway.stack.state import ProcessState, StackDir, StackState
from tests.security.states import make_state
from tests.soak import examples

RELAXED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MEMORY = 2 << 30  # bytes above what the process has now


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """An allocation without a bound becomes a MemoryError, which no test here expects."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "..", "../x", "/etc", "x\n", "\0", "\ud800", "http://[", "~nobody/x",
                     "9" * 5000, "a/b", "kv", "vllm", "mocker", "1e999", "x" * 5000]),
)  # fmt: skip
trees: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def valid_state() -> dict[str, Any]:
    return {
        **make_state("s"),
        "phase": "ready",
        "started_at": 1e9,
        "frontend": "http://127.0.0.1:20000",
        "processes": [{"name": "tiny-0", "role": "worker", "log": "/nowhere/logs/tiny-0.log",
                       "ports": {"system": 20001}}],
        "shared_memory": ["psm_1234"],
        "timeouts": {"probe": 10.0},
    }  # fmt: skip


def read_and_use(content: bytes) -> None:
    directory = StackDir("s")
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.state_file.write_bytes(content)
    try:
        state = directory.read()
    except StateUnreadable as error:
        assert error.reason and len(error.reason) <= 200 and str(error).isprintable()
        return
    assert isinstance(state, StackState)
    assert state.name == "s" and not state.is_supervised
    make_process_table(state)
    for process in state.processes:
        assert Path(process.log).parent == Path(state.log_dir)
    for name in state.shared_memory:
        assert (processes.SHM / name).parent == processes.SHM


STATE_FIELDS = sorted(StackState.__struct_encode_fields__)
PROCESS_FIELDS = sorted(ProcessState.__dataclass_fields__)


@settings(RELAXED, max_examples=examples(500))
@given(
    st.dictionaries(st.sampled_from(STATE_FIELDS), trees, max_size=3),
    st.dictionaries(st.sampled_from(PROCESS_FIELDS), trees, max_size=2),
)
@example({"ray_namespace": "rollway"}, {})
def test_any_values_in_the_fields_of_a_state(fields: dict[str, Any], inner: dict[str, Any]) -> None:
    record = valid_state()
    record["processes"][0].update(inner)
    record.update(fields)
    read_and_use(json.dumps(record).encode())


@settings(RELAXED, max_examples=examples(500))
@given(st.data())
def test_any_damage_to_the_bytes_of_a_state(data: st.DataObject) -> None:
    content = json.dumps(valid_state()).encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    read_and_use(content[:start] + data.draw(st.binary(max_size=20)) + content[end:])


@settings(RELAXED, max_examples=examples(300))
@given(st.binary(max_size=200) | trees.map(lambda tree: json.dumps(tree).encode()))
def test_any_bytes_as_a_state(content: bytes) -> None:
    read_and_use(content)


def load(source: Any, overrides: tuple[str, ...] = ()) -> None:
    try:
        spec = load_spec(source, overrides)
    except RollwayError as error:
        assert error.exit_code == 2 and error.message and len(str(error)) < 4000
        assert not isinstance(error, StateUnreadable)
        return
    assert StackSpec.model_validate_json(spec.model_dump_json()) == spec


SPEC_FIELDS = sorted(StackSpec.model_fields)
MODEL_FIELDS = ["path", "name", "engine", "module", "replicas", "tensor_parallel", "seed", "args"]


@settings(RELAXED, max_examples=examples(1000))
@given(
    st.dictionaries(st.sampled_from(SPEC_FIELDS) | st.text(max_size=6), trees, max_size=3),
    st.dictionaries(st.sampled_from([*MODEL_FIELDS, "env"]) | st.text(max_size=6), trees),
)
def test_any_values_in_the_fields_of_a_spec(fields: dict[str, Any], model: dict[str, Any]) -> None:
    load({"models": [{"path": "org/model", **model}], **fields})


PIECES = st.sampled_from([
    "models:", "\n", "  ", "- ", "path: a/b", "name: x", "&a ", "*a", "&b ", "*b", "<<: ", "[", "]",
    "{", "}", ", ", ": ", "? ", "!!", "!!bool ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ",
    "!x ", "|", ">", "'", '"', "\\", "#", "%", "---\n", "...\n", "=", "~", ".inf", "1_0", "0x",
    "0b1", "1:60", "2001-01-01", "\t", "\0", "\x85", "é", "\U0001f600", "args: ", "env: ", "null",
])  # fmt: skip


@settings(RELAXED, max_examples=examples(1000))
@given(st.lists(PIECES | st.text(string.printable, max_size=4), max_size=40).map("".join))
def test_any_text_as_a_stack_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(text)
    load(file)
    file.write_text(f"models: [{{path: a/b}}]\n{text}")
    load(file)


@settings(RELAXED, max_examples=examples(200))
@given(st.binary(max_size=200))
def test_any_bytes_as_a_stack_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "stack.yaml"
    file.write_bytes(content)
    load(file)


@settings(RELAXED, max_examples=examples(500))
@given(
    st.lists(st.sampled_from([*SPEC_FIELDS, *MODEL_FIELDS, "0", "1", "", "²"]), max_size=4),
    st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=20),
)
def test_any_override(path: list[str], value: str) -> None:
    load({"models": [{"path": "org/model"}]}, (f"{'.'.join(path)}={value}",))
