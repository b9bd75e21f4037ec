"""The command line: what it imports, how stacks and files are named, what is JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.cli import main, make_parser, stack
from rollway.cli.output import get_spec_file
from rollway.errors import UsageError
from rollway.processes import ProcessId
from rollway.stack.state import StackDir, StackState, choose_run_dir

HEAVY = ("aiohttp", "msgspec", "pydantic", "rich", "torch", "yaml", "asyncio")


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom rollway.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert output.stdout.splitlines()[-1] == "[]", output.stderr


LEAVES = [
    *(["up"], ["status"], ["logs"], ["down"], ["doctor"], ["demo"], ["gateway"]),
    *(["fleet", name] for name in ("ls", "pause", "resume", "sleep", "versions", "wake", "watch")),
    ["fleet", "refit", "/path", "--version", "1"],
    ["weights", "plan", "--model", "m", "--source", "hf", "--target", "hf"],
]


def parse(*arguments: str) -> argparse.Namespace:
    return make_parser(arguments).parse_args(arguments)


@pytest.mark.parametrize("arguments", LEAVES)
def test_every_command_has_json_and_a_function(arguments: list[str]) -> None:
    options = parse(*arguments, "--json")
    assert options.json and not parse(*arguments).json
    assert callable(options.run_command)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ls", "pause", "resume", "versions", "watch"])
def test_a_stack_is_named_by_position(name: str) -> None:
    assert parse("fleet", name, "trainer").name == "trainer"
    assert parse("fleet", name).name is None


def test_the_path_of_a_refit_may_follow_a_name() -> None:
    options = parse("fleet", "refit", "/checkpoints/3", "--version", "3")
    assert (options.name, options.path) == (None, Path("/checkpoints/3"))
    options = parse("fleet", "refit", "trainer", "/checkpoints/3", "--version", "3")
    assert (options.name, options.path) == ("trainer", Path("/checkpoints/3"))


def test_a_stack_file_is_given_by_position_or_by_option() -> None:
    assert get_spec_file(parse("up", "a.yaml")) == Path("a.yaml")
    assert get_spec_file(parse("up", "-f", "a.yaml")) == Path("a.yaml")
    assert get_spec_file(parse("up")) is None
    with pytest.raises(UsageError, match="Two stack files"):
        get_spec_file(parse("up", "a.yaml", "-f", "b.yaml"))


def test_bench_fleet_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["bench", "fleet"]) == 2
    assert "bench fleet -f FILE" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["bench", "chaos"])
def test_a_package_without_a_checkout_says_where_the_programs_are(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("rollway.__file__", str(tmp_path / "site-packages/rollway/__init__.py"))
    assert main([program, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"] == "UsageError"
    assert "Clone https://github.com/rollway/rollway" in printed.err


@pytest.mark.parametrize(("end", "code"), [(None, 1), (KeyboardInterrupt(), 0), (OSError(), 1)])
def test_a_stack_in_the_foreground_is_stopped_however_its_command_ends(
    monkeypatch: pytest.MonkeyPatch, end: BaseException | None, code: int
) -> None:
    def watch(_: object) -> Iterator[StackState]:
        if end is not None:
            raise end
        yield from ()

    stops: list[object] = []
    started = SimpleNamespace(state=None, directory=None, stop=stops.append)
    monkeypatch.setattr(stack.local, "start", lambda *_: started)
    monkeypatch.setattr(stack.local, "watch_state", watch)
    monkeypatch.setattr(stack, "print_ready", lambda *_: None)
    assert main(["up", "--foreground", "--model", "org/m"]) == code
    assert len(stops) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("only", None)),
        (["frontend"], ("only", "frontend")),
        (["other"], ("other", None)),
        (["other", "frontend"], ("other", "frontend")),
    ],
)
def test_logs_name_a_stack_a_process_or_both(
    arguments: list[str],
    expected: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
    own_home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stacks, (owner, process) = own_home / "stacks", expected
    for name in ("only", "other"):
        (stacks / name / "logs").mkdir(parents=True)
        (stacks / name / "logs" / "frontend.log").touch()
    monkeypatch.setattr("rollway.cli.stack.list_stack_names", lambda: ["only", "other"])
    monkeypatch.setattr("rollway.stack.local.resolve_name", lambda name: "only")
    assert main(["logs", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    if process is None:
        assert answer == {"directory": str(stacks / owner / "logs"), "logs": ["frontend"]}
    else:
        assert answer["log"] == str(stacks / owner / "logs" / f"{process}.log")


def test_the_doctor_says_that_it_cannot_see_another_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("no network namespaces here")
        process, run_id = ProcessId.of(child.pid), "0123456789abcdef"
        assert process is not None
        run_dir = str(choose_run_dir(run_id))
        StackDir("t").write(StackState("t", run_id, process.pid, process.start, run_dir, "/logs"))
        assert main(["doctor", "--ports", "t"]) == 0
        child.kill()
    printed = capsys.readouterr()
    assert "another network namespace" in printed.err
    assert "no stack is running" not in printed.out


def test_too_many_words_for_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "a", "b", "c"]) == 2
    assert "too many words" in capsys.readouterr().err


def test_logs_of_a_stack_that_ended(
    tmp_path: Path, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = own_home / "stacks" / "default" / "logs"
    logs.mkdir(parents=True)
    (logs / "frontend.log").write_text("one\ntwo\n")
    assert main(["logs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logs"] == ["frontend"]
    assert main(["logs", "frontend", "-n", "1"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert main(["logs", "default", "frontend", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == ["one", "two"]


def test_errors_are_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "ls", "nobody", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["error"] == "StackNotRunning"
    assert output.err.startswith("rollway: No stack named `nobody` is running.")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/x"), BrokenPipeError()]
)
def test_errors_of_the_system_are_explained(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollway import cli

    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr(stack, "status", fail)
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)
    monkeypatch.setattr(cli.sys.stdout, "fileno", lambda: 1, raising=False)
    if isinstance(error, BrokenPipeError):
        assert main(["status"]) == 0  # the reader has closed the pipe
    else:
        assert main(["status"]) == 1
        assert "The system refused: Permission denied: /x." in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["dash", "--port"],
        ["gateway", "--port"],
        ["observe", "export", "prometheus", "--out", "x", "--port"],
        ["prime-rl", "serve", "--port"],
        ["prime-rl", "serve", "--admin-port"],
    ],
)
@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_port_that_is_none_is_refused(
    arguments: list[str], port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments, port])
    assert end.value.code == 2
    assert f"{port} is not a port: give 0 to 65535." in capsys.readouterr().err


def test_wrong_timeouts_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "ls", "http://127.0.0.1:9", "--timeout", "pause=soon"]) == 2
    assert "--timeout pause=soon" in capsys.readouterr().err


def test_a_dry_run_prints_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "stack.yaml"
    file.write_text(f"name: dry\nmodels: [{{path: {tmp_path}, name: tiny, engine: mocker}}]\n")
    assert main(["up", "-f", str(file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "# frontend\n" in output and "# tiny-0\n" in output
    assert main(["up", str(file), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["name"] == "dry"


@pytest.mark.parametrize(
    ("names", "name", "is_on_ray"),
    [
        (["here"], "here", False),
        (["here"], "there", True),
        (["here"], None, False),
        ([], None, True),
    ],
)
def test_a_stack_of_this_machine_comes_before_one_on_ray(
    monkeypatch: pytest.MonkeyPatch, names: list[str], name: str | None, is_on_ray: bool
) -> None:
    """Also while it is starting and has no state yet."""
    monkeypatch.setattr(stack.launcher, "may_reach_cluster", lambda: True)
    monkeypatch.setattr(stack.local, "list_names", lambda: names)
    arguments = ["down", *([name] if name else [])]
    assert stack.is_on_ray(parse(*arguments), name) == is_on_ray
