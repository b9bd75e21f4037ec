"""Specs: accepted input, and errors that name the field and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import RollwayError, SpecError, UsageError
from rollway.model_spec import slug
from rollway.spec import StackSpec, is_loopback, load_spec


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return str(directory)


def test_a_model_path_is_all_that_is_needed(model: str) -> None:
    spec = load_spec({"models": [{"path": model}]})
    assert spec.models[0].name == "model"
    assert (spec.discovery, spec.event_plane, spec.request_plane) == ("file", "zmq", "tcp")
    assert spec.frontend.host == spec.admin_host == "127.0.0.1"
    assert spec.router.mode == "kv"


def test_paths_are_absolute_where_processes_have_another_directory(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Ray: a relative path would be taken for a Hugging Face id there."""
    home = Path(model).parent
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to("/usr/bin/env")
    env = {"py_executable": "bin/python"}
    models = [{"path": "model", "runtime_env": env}, {"path": "~/model", "name": "b"}]
    models += [{"path": "org/model", "name": "c", "runtime_env": {"py_executable": "python3"}}]
    spec = load_spec({"models": models, "python": "bin/python"}, launcher="ray")
    python = str(home / "bin" / "python")  # and not what it links to
    assert [entry.path for entry in spec.models] == [model, model, "org/model"]
    assert spec.python == spec.models[0].runtime_env["py_executable"] == python
    assert spec.models[2].runtime_env == {"py_executable": "python3"}
    assert load_spec(spec) == spec
    assert load_spec({"models": models, "python": "bin/python"}).python == "bin/python"


def test_overrides_change_what_the_yaml_file_says(model: str, tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(f"name: a\nmodels:\n  - path: {model}\n    args: {{dtype: float32}}\n")
    spec = load_spec(
        file, ["models.0.replicas=3", "router.mode=random", "models.0.args.max-model-len=128"]
    )
    assert spec.models[0].replicas == 3
    assert spec.router.mode == "random"
    assert spec.models[0].args == {"dtype": "float32", "max-model-len": 128}


@pytest.mark.parametrize(
    ("data", "phrases"),
    [
        ({"replica": 2}, ["models.0.replica", "Did you mean `replicas`"]),
        ({"replicas": 0}, ["models.0.replicas", "greater than or equal to 1", "got 0"]),
        ({"engine": "trt"}, ["models.0.engine", "'vllm', 'mocker' or 'custom'"]),
        (
            {"name": "x", "zzzz": 1},
            ["models.0.zzzz", "Known here: args, data_parallel, decode, engine"],
        ),
    ],
)
def test_a_wrong_model_field_is_named(
    model: str, data: dict[str, object], phrases: list[str]
) -> None:
    with pytest.raises(SpecError) as error:
        load_spec({"models": [{"path": model, **data}]})
    for phrase in phrases:
        assert phrase in str(error.value)


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"routr": {}}, "Did you mean `router`"),
        ({"router": {"mod": "kv"}}, "`router.mod`: there is no such field. Did you mean `mode`"),
        ({"frontend": {"port": 70000}}, "`frontend.port`"),
        ({"name": "Not A Name"}, "lower-case"),
        ({"etcd_endpoints": "http://x"}, "`discovery` is not `etcd`"),
        ({"nats_server": "nats://x"}, "no plane is `nats`"),
    ],
)
def test_a_wrong_stack_field_is_named(model: str, fields: dict[str, object], phrase: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec({"models": [{"path": model}], **fields})
    assert phrase in str(error.value)


def test_two_models_of_one_name_are_refused(model: str) -> None:
    with pytest.raises(SpecError, match="two models are served under one name"):
        load_spec({"models": [{"path": model}, {"path": model}]})
    with pytest.raises(SpecError, match="differ only in signs"):
        load_spec({"models": [{"path": model, "name": "a.b"}, {"path": model, "name": "a-b"}]})


def test_a_model_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"models\.0\.path.*no directory"):
        load_spec({"models": [{"path": str(tmp_path / "nowhere")}]})
    with pytest.raises(SpecError, match=r"has no config\.json"):
        load_spec({"models": [{"path": str(tmp_path)}]})
    with pytest.raises(SpecError, match="names no model"):
        load_spec({})
    assert load_spec({"models": [{"path": "Qwen/Qwen3-0.6B"}]}).models[0].name == "Qwen3-0.6B"


def test_overrides_leave_the_callers_mapping_unchanged(model: str) -> None:
    source = {"models": [{"path": model}]}
    spec = load_spec(source, ["models.0.replicas=2", "env.OMP_NUM_THREADS=4", "log_dir=~/logs"])
    assert source == {"models": [{"path": model}]}
    assert spec.env == {"OMP_NUM_THREADS": "4"}
    assert spec.log_dir == Path.home() / "logs"
    with pytest.raises(UsageError):
        load_spec(None, ["models.0.replicas=2"])


def test_an_unreadable_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_spec(tmp_path)
    for text, phrase in [("a: [1", "not valid YAML"), ("- 1", "holds a list"), ("", "is empty")]:
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        with pytest.raises(SpecError, match=phrase):
            load_spec(file)


@given(st.text(max_size=40))
def test_any_override_is_applied_or_refused_with_a_message(text: str) -> None:
    data = {"models": [{"path": "org/model"}]}
    try:
        load_spec(data, [text])
    except RollwayError as error:
        assert error.exit_code == 2
        assert str(error)


@given(st.text(min_size=1, max_size=60))
def test_a_slug_is_a_component_name(name: str) -> None:
    assert set(slug(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert slug(name)


def test_a_spec_survives_json(model: str) -> None:
    spec = load_spec(
        {"models": [{"path": model, "args": {"a": None, "b": [1, "x"], "c": {"d": True}}}]}
    )
    assert StackSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"a": "b\0"}, "models.0.args.a"),
        ({"a": "\ud800"}, "models.0.args.a"),
        ({"a": float("nan")}, "models.0.args.a"),
        ({"a": [1, {"b": float("-inf")}]}, "models.0.args.a.1.b"),
        ({"a": {"\0": 1}}, "models.0.args.a"),
    ],
)
def test_what_json_or_a_process_would_not_take_is_named(
    model: str, args: dict[str, object], place: str
) -> None:
    with pytest.raises(SpecError, match=f"`{place}` holds a NUL, half of a character, or a number"):
        load_spec({"models": [{"path": model, "args": args}]})


def test_a_text_may_have_an_escape_of_json(model: str) -> None:
    spec = load_spec({"models": [{"path": model, "args": {"a": r"\u0000"}}]})
    assert spec.models[0].args == {"a": r"\u0000"}


def test_only_loopback_counts_as_loopback() -> None:
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]"):
        assert is_loopback(host)
    for host in ("127.0.0.1.elsewhere.example", "127.x", "0.0.0.0", "::", "10.0.0.1", ""):
        assert not is_loopback(host)


def test_an_error_never_shows_the_secret() -> None:
    secret = "0123456789abcdef" * 4
    model = {"path": "/m", "name": "m"}
    for join in (secret, {"secret": secret + "\n"}, {"secret": [secret]}):
        with pytest.raises(SpecError) as failure:
            load_spec({"models": [model], "join": join})
        assert secret[:16] not in str(failure.value)
