"""Wrong input on the command line: one paragraph with cause and fix, the right exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollway.cli import main
from tests.conftest import Cli, Footprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def expect(cli: Cli, arguments: list[str], code: int, *words: str) -> None:
    result = cli(*arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    paragraph = result.stderr.strip().splitlines()[-1]
    assert paragraph.startswith("rollway: ")
    for word in words:
        assert word in paragraph


def test_missing_model_path(cli: Cli) -> None:
    expect(cli, ["up", "--model", "/no/such/model"], 2, "models.0.path", "no directory", "Give")


def test_no_model(cli: Cli) -> None:
    expect(cli, ["up"], 2, "names no model", "--model")


def test_unknown_field(cli: Cli, model: Path) -> None:
    expect(cli, ["up", "--model", str(model), "--set", "routr.mode=kv"], 2, "routr", "Did you mean")


def test_two_models_of_one_name(cli: Cli, tmp_path: Path, model: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"models: [{{path: {model}}}, {{path: {model}}}]")
    expect(cli, ["up", str(file)], 2, "two models", "give each a `name`")


def test_unreadable_yaml(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("models: [")
    expect(cli, ["up", str(file)], 2, "not valid YAML", "Correct the line")
    expect(cli, ["up", str(tmp_path / "none.yaml")], 2, "There is no file")
    file.write_bytes(b"\xff\xfe\x00")
    expect(cli, ["up", str(file)], 2, "cannot be read")


def test_port_in_use(cli: Cli, model: Path, footprint: Footprint) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["up", "--model", str(model), "--set", f"frontend.port={port}", "--quiet"]
        expect(cli, arguments, 1, f"Port {port}", "is in use", "Choose another")
    assert footprint.new() == {}


def test_read_only_log_directory(cli: Cli, model: Path, footprint: Footprint) -> None:
    arguments = ["up", "--model", str(model), "--set", "log_dir=/proc/logs", "--quiet"]
    expect(cli, arguments, 1, "/proc/logs", "cannot be written", "Choose another")
    assert footprint.new() == {}


def test_a_missing_interpreter(cli: Cli, model: Path, footprint: Footprint) -> None:
    arguments = ["up", "--model", str(model), "--set", "python=/no/python", "--quiet"]
    expect(cli, arguments, 1, "/no/python", "No such file", "Check the path")
    assert footprint.new() == {}


def test_unwritable_home(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", "/proc/home")
    expect(cli, ["up", "--model", str(model)], 1, "cannot be written", "Set ROLLWAY_HOME")
    monkeypatch.undo()


def test_a_state_file_of_another_version(cli: Cli, own_home: Path) -> None:
    file = own_home / "stacks" / "old" / "state.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"name": "old"}')
    expect(
        cli, ["up", "--model", "Qwen/x", "--name", "old"], 1, str(file), "unreadable", "down old"
    )
    assert "old: state unreadable" in cli("status").stdout
    assert cli("down", "old").stdout == "stopped old\n"
    assert not file.exists()


def test_nothing_to_stop_or_show(cli: Cli) -> None:
    expect(cli, ["down"], 1, "No stack is running", "rollway up")
    expect(cli, ["status", "nobody"], 1, "nobody")
    expect(cli, ["down", "nobody"], 1, "nobody")


def test_unwritable_output_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: a new one would import torch first.
    for arguments, words in (
        (["--out", "/proc/run"], ("/proc/run", "--out")),
        (["--steps", "0"], ("at least one step",)),
    ):
        assert main(["demo", *arguments]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("rollway: ") and all(word in line for word in words)


def test_errors_are_json_on_request(cli: Cli) -> None:
    import json

    result = cli("down", "--json")
    assert json.loads(result.stdout)["error"] == "StackNotRunning"


def test_no_frontend_at_the_attach_address(cli: Cli) -> None:
    expect(cli, ["status", "http://127.0.0.1:9"], 1, "No Dynamo frontend answers", "address right")
    import rollway
    from rollway.errors import RequestFailed, StackNotRunning, Unreachable, UsageError

    with pytest.raises(Unreachable, match=r"No Dynamo frontend answers at http://127\.0\.0\.1:9"):
        rollway.attach("http://127.0.0.1:9").__enter__()
    for wrong in ("ftp://x", "http://[::1", "http://x:port"):
        with pytest.raises(UsageError, match="not an HTTP address"):
            rollway.attach(wrong)
    with pytest.raises(StackNotRunning):
        rollway.attach("no-such-stack")
    assert RequestFailed.exit_code == 1
