"""Damaged records and hostile stack files give one sentence, and affect nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rollway
from rollway import cli as rollway_cli
from rollway import processes
from rollway.errors import SpecError, StackNotRunning, StateUnreadable, UsageError
from rollway.spec import load_spec
from rollway.stack import local
from rollway.stack.locks import NamedLock
from rollway.stack.running import WeightsFile
from rollway.stack.state import StackDir, StackState, list_stacks
from tests.children import start_child
from tests.conftest import Footprint
from tests.security.states import RUN, make_state
from tests.waiting import wait_until


def put_state(stack: str, **fields: object) -> Path:
    directory = StackDir(stack)
    directory.create()
    directory.state_file.write_text(json.dumps({**make_state(stack), **fields}))
    return directory.state_file


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = rollway_cli.main(arguments)
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    return code, output.out, output.err


def test_instance_ids_in_the_status_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Readers of JSON that use doubles would round the numbers."""
    process = {
        "name": "w-0",
        "role": "worker",
        "log": "/nowhere/logs/w-0.log",
        "instance": 2**62 + 1,
    }
    put_state("text", processes=[process])
    _, out, _ = run_cli(capsys, "status", "text", "--json")
    (stack,) = json.loads(out)["stacks"]
    assert [each["instance"] for each in stack["processes"]] == [str(2**62 + 1)]


# --- a damaged state ---------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def fill_with_zeros(file: Path) -> None:
    """A power cut leaves this of a file that was not synced."""
    file.write_bytes(bytes(500))


def give_wrong_types(file: Path) -> None:
    file.write_text(json.dumps(make_state("bad", processes="none", supervisor_pid="1")))


def nest_deep(file: Path) -> None:
    file.write_text(json.dumps(make_state("bad"))[:-1] + ', "invitation": {"a": ' + "[" * 100_000)


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("x")


def link_in_a_circle(file: Path) -> None:
    """Not even root can read it."""
    file.unlink()
    file.symlink_to(file)


def make_huge(file: Path) -> None:
    os.truncate(file, 1 << 34)


def make_pipe(file: Path) -> None:
    """A reader that opens it waits for a writer."""
    file.unlink()
    os.mkfifo(file)


def write_latin(file: Path) -> None:
    file.write_bytes(json.dumps(make_state("bad")).encode().replace(b"nowhere", b"\xe9\xff"))


def write_nothing(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [
        truncate, fill_with_zeros, give_wrong_types, nest_deep, make_directory, link_in_a_circle,
        make_huge, make_pipe, write_latin, write_nothing,
    ],
)  # fmt: skip
def test_a_damaged_state_does_not_break_commands_for_other_stacks(
    damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    put_state("good")
    file = put_state("bad")
    damage(file)

    code, out, _ = run_cli(capsys, "status", "--json")
    stacks = {entry["name"]: entry for entry in json.loads(out)["stacks"]}
    assert code == 0 and stacks["good"]["phase"] == "dead"
    assert stacks["bad"]["phase"] == "unreadable"
    assert stacks["bad"]["error"].startswith("state unreadable: ")
    code, out, _ = run_cli(capsys, "status")
    assert code == 0 and "bad: state unreadable: " in out and "rollway down good" in out
    for command in (["fleet", "ls"], ["gateway"]):
        code, _, err = run_cli(capsys, *command)
        assert code == 1 and "No stack is running" in err
    code, _, err = run_cli(capsys, "up", "--model", "org/model", "--name", "bad")
    assert code == 1 and "rollway down bad" in err

    code, out, _ = run_cli(capsys, "down", "--all")
    assert code == 0 and out.split() == ["stopped", "bad", "stopped", "good"]
    assert not os.path.lexists(file)
    assert run_cli(capsys, "status")[1] == "no stack is running\n"


def test_down_kills_what_runs_under_an_unreadable_state() -> None:
    run_id = f"{os.getpid():016x}"
    member = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, **processes.make_run_environment(run_id)}
    )
    file = put_state("bad")
    StackDir("bad").run_file.write_text(run_id)
    truncate(file)
    try:
        local.stop("bad")
        assert member.wait(timeout=20) == -9
        assert not file.exists()
    finally:
        member.kill()
        member.wait()


HOLDER = """
    import sys
    from rollway.stack.locks import NamedLock
    lock = NamedLock(sys.argv[1])
    print(lock.acquire(), flush=True)
"""


@pytest.mark.parametrize("module", ["rollway.stack.supervisor", "a trainer"])
def test_down_stops_the_supervisor_under_an_unreadable_state_and_no_other_process(
    module: str,
) -> None:
    """A process that clears what a dead supervisor left holds its lock, too."""
    file = put_state("bad")
    child, line = start_child(HOLDER, StackDir("bad").lock_name, module)
    truncate(file)
    try:
        assert line == "True"
        local.stop("bad")
        assert (child.poll() is None) == (module == "a trainer") and not file.exists()
    finally:
        child.kill()
        child.wait()


OUTSIDE = "rollway-test-outside"


@pytest.mark.parametrize(
    "fields",
    [
        {"shared_memory": [f"../../tmp/{OUTSIDE}-{os.getpid()}"]},
        {"shared_memory": [f"/tmp/{OUTSIDE}-{os.getpid()}"]},
        {"shared_memory": [".."]},
        {"run_dir": f"/tmp/{OUTSIDE}-{os.getpid()}"},
        {"run_dir": f"/tmp/x/../rollway-{os.getuid()}-{RUN[:8]}"},
        {"run_dir": f"rollway-{os.getuid()}-{RUN[:8]}"},
        {"run_id": "../../../x"},
        {"name": "other"},
        {"log_dir": "logs"},
        {"processes": [{"name": "../x", "role": "worker", "log": "/nowhere/logs/x.log"}]},
        {"processes": [{"name": "x", "role": "worker", "log": "/etc/passwd"}]},
    ],
)
def test_files_outside_that_a_state_names_are_not_removed(fields: dict[str, object]) -> None:
    outside = Path(f"/tmp/{OUTSIDE}-{os.getpid()}")
    outside.write_text("precious")
    try:
        put_state("bad", **fields)
        with pytest.raises(StateUnreadable):
            StackDir("bad").read()
        local.stop("bad")
        assert outside.read_text() == "precious"
        assert not StackDir("bad").state_file.exists()
    finally:
        outside.unlink()


def test_the_target_of_a_linked_run_directory_stays(tmp_path: Path) -> None:
    run_id = f"{os.getpid():08x}{'0' * 8}"
    link = Path(f"/tmp/rollway-{os.getuid()}-{run_id[:8]}")
    (tmp_path / "precious").write_text("content")
    link.symlink_to(tmp_path)
    try:
        put_state("s", run_id=run_id, run_dir=str(link))
        local.stop("s")
        assert (tmp_path / "precious").read_text() == "content"
    finally:
        link.unlink(missing_ok=True)


def test_shared_memory_that_is_a_link_or_a_path_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    link = processes.SHM / f"rollway-test-link-{os.getpid()}"
    link.symlink_to(precious)
    try:
        names = [link.name, str(precious), f"../..{precious}", "..", ".", ""]
        assert processes.remove_shared_memory(names) == []
        assert precious.read_text() == "content" and link.is_symlink()
    finally:
        link.unlink()


def test_a_stack_directory_that_is_a_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    put_state("s")
    target = tmp_path / "target"
    StackDir("s").path.rename(target)
    StackDir("s").path.symlink_to(target)
    assert list_stacks() == []
    local.stop("s")
    assert (target / "state.json").exists()
    assert not os.path.lexists(StackDir("s").path)


@pytest.mark.parametrize("name", ["../x", "/etc", "a/b", "..", "x\n", "x\0", "", "A", "é"])
def test_a_path_cannot_name_a_stack(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a stack"):
        StackDir(name)
    assert run_cli(capsys, "down", name)[0] == 2


def test_a_state_is_synced_before_it_replaces_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the rename must find the content, and the rename itself."""
    state_file = put_state("s")
    state = StackDir("s").read()
    assert state is not None
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(handle: int) -> None:
        steps.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink()}")
        fsync(handle)

    def record_replace(path: Path, target: Path) -> Path:
        steps.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    StackDir("s").write(state)
    assert steps[0].startswith(f"fsync {state_file}.") and steps[0].endswith(".new")
    assert steps[1:] == ["replace", f"fsync {state_file.parent}"]


async def test_damaged_versions_are_skipped() -> None:
    put_state("s")
    directory = StackDir("s")
    weights = WeightsFile("s", RUN, "tiny")
    file = directory.path / "weights-tiny.json"
    records = ({"run": 1}, {"claims": {"x": "y"}}, {"path": "/x"}, {"version": "1"})
    damaged = [json.dumps({"run": RUN, **record}) for record in records]
    for text in ("", "[" * 100_000, *damaged):
        file.write_text(text)
        assert weights.get() is None and weights.claims() == {}
        weights.claim(1, "identity")
        assert weights.claims() == {1: "identity"}


# --- hostile stack files -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("models: &m [*m]", "contains itself"),
        ("models: [{path: x, args: &a {b: {c: *a}}}]", "contains itself"),
        ("models: " + "[" * 5000, "too deep"),
        ("models: " + "{a: " * 5000, "too deep"),
        ("name: a\nname: b", "twice"),
        ("models: [{path: a/b, path: c/d}]", "twice"),
        ('models: [{path: "a/b\\0"}]', "NUL"),
        ('models: [{path: a/b, args: {x: "\\0"}}]', "NUL"),
        ('models: [{path: a/b}]\nenv: {"a=b": c}', "environment variable"),
        ("models: [{path: a/b}]\nstop_seconds: .inf", "finite"),
        ("models: [{path: a/b, seed: " + "9" * 5000 + "}]", "does not fit its type"),
        ("name: !!bool x", "does not fit its type"),
        ("name: !!timestamp x", "does not fit its type"),
        ("name: 2001-99-99", "does not fit its type"),
        ("name: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("models: [{path: a/b, args: {x: !!binary /+8=}}]", "not plain"),
        ("models: [{path: ~nobody-of-this-name/x}]", "cannot be looked up"),
        ("models: [{path: a/b}]\nlog_dir: ~nobody-of-this-name/x", "home directory"),
        ("models: [{path: " + "a" * 5000 + "}]", "cannot be looked up"),
        ("\x00", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_hostile_stack_file_gives_one_sentence(
    text: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(text)
    code, _, err = run_cli(capsys, "up", str(file))
    assert code == 2
    assert err.startswith("rollway: ") and err.count("\n") == 1 and len(err) < 1000
    assert cause in err


def test_a_binary_stack_file_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.yaml"
    for content in (b"\xff\xfe\x00", b"models: [{path: \xe9}]", os.urandom(4096)):
        file.write_bytes(content)
        code, _, err = run_cli(capsys, "up", str(file))
        assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("models.0.args.x=&a [*a]", "contains itself"),
        ("models.0.args.x=" + "[" * 5000, "too deep"),
        ("models.0.args." + "x." * 5000 + "y=1", "not plain"),
        ("name=2001-99-99", "does not fit its type"),
        ("models.0.name=" + "m" * 3000, "at most 200"),
        ("models.²=1", "no position"),
        ("models." + "9" * 5000 + "=1", "no position"),
        ("models.0.path.x=1", "holds a value"),
        ("models=[1]", "no model"),
        ("env={a: 1, a: 2}", "twice"),
    ],
)
def test_a_hostile_override_gives_one_sentence(
    override: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_cli(capsys, "up", "--model", "org/model", "--set", override)
    assert code == 2
    assert err.startswith("rollway: ") and err.count("\n") == 1 and len(err) < 1000
    assert cause in err


def test_a_mapping_that_contains_itself_is_refused() -> None:
    endless: dict[str, object] = {"models": [{"path": "a/b"}]}
    endless["env"] = {"again": endless}
    with pytest.raises(SpecError):
        load_spec(endless)


def test_line_ends_in_options_of_the_engine_stay() -> None:
    args = {"chat-template": "{% if a %}\n{% endif %}"}
    spec = load_spec({"models": [{"path": "a/b", "args": args}]})
    assert spec.models[0].args == args


# --- down during up ----------------------------------------------------------------------------

UP = """
import sys
from rollway import cli
sys.exit(cli.main(["up", sys.argv[1], "--quiet"]))
"""


@pytest.mark.stack
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.25, 0.5, 0.8, 1.2, 2.0])
def test_down_in_the_first_moments_of_up_stops_it(
    delay: float, base_model: Path, tmp_path: Path, footprint: Footprint
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(f"name: t\nmodels: [{{path: {base_model}, name: tiny, engine: mocker}}]")
    up = subprocess.Popen([sys.executable, "-c", UP, str(file)], stderr=subprocess.PIPE, text=True)
    starting = NamedLock(StackDir("t").start_lock_name)

    def has_started() -> bool:
        assert up.poll() is None
        return starting.find_holder() is not None

    wait_until(has_started, every=0.002)
    time.sleep(delay)  # the point of the start at which it is stopped
    assert "t" in local.list_names()
    local.stop("t")
    _, err = up.communicate(timeout=60)
    ready_first = up.returncode == 0  # the start was quicker than the delay
    assert ready_first or (up.returncode == 1 and "was stopped while it was starting" in err)
    assert not (ready_first and delay < 0.5)
    assert StackDir("t").read() is None
    assert footprint.settle() == {}
    with pytest.raises(StackNotRunning):
        local.stop("t")


@pytest.mark.stack
def test_down_stops_a_running_stack_whose_state_was_overwritten(
    base_model: Path, footprint: Footprint
) -> None:
    model = {"path": str(base_model), "name": "tiny", "engine": "mocker"}
    running = local.start(load_spec({"name": "t", "models": [model]}))
    StackDir("t").state_file.write_bytes(b"\0" * 100)
    local.stop("t")
    assert footprint.settle() == {}
    assert StackDir("t").read() is None
    running.stop()


@pytest.mark.stack
def test_everything_that_a_stack_writes_is_private(base_model: Path, own_home: Path) -> None:
    own_home.mkdir()
    own_home.chmod(0o755)
    before = os.umask(0)
    try:
        model = {"path": str(base_model), "name": "tiny", "engine": "mocker"}
        with rollway.up({"name": "t", "models": [model]}):
            state = StackDir("t").read()
            assert isinstance(state, StackState)
            run_dir = Path(state.run_dir)
            assert run_dir.stat().st_mode & 0o777 == 0o700
            for path in (own_home, *own_home.rglob("*")):
                expected = 0o700 if path.is_dir() else 0o600
                assert path.stat().st_mode & 0o777 == expected, path
            assert list(own_home.rglob("*.log")) and list(own_home.rglob("supervisor-*.jsonl"))
    finally:
        os.umask(before)
