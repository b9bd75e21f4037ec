"""`rollway dash` as a command."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from rollway.cli import main
from rollway.gateway.store import SessionStore
from tests.observe.make_run import write_old_run, write_run

STORES = {
    "other": "PRAGMA user_version = 2",
    "damaged": "DROP TABLE turns",
    "marked": "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE (',"
    " name = char(27) || '[31mred' WHERE name = 'turns'",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", workers=2, seconds=30)
    write_old_run(tmp_path / "run" / "old")
    return tmp_path / "run"


def test_a_recorded_run_is_served_until_a_signal(run_dir: Path) -> None:
    command = [sys.executable, "-m", "rollway.cli", "dash", "--run", str(run_dir)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["shows"] == str(run_dir)
        with urllib.request.urlopen(f"{ready['url']}api/model") as answer:
            assert len(json.load(answer)["sections"]["fleet"]) == 2
        port = ready["url"].rstrip("/").rpartition(":")[2]
        second = subprocess.run(
            [*command, "--port", port, "--json"], capture_output=True, text=True, check=False
        )
        assert second.returncode == 1
        assert json.loads(second.stdout)["error"] == "PortInUse"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--run", "RUN", "--host", "0.0.0.0"], "without a token"),
        (["--run", "RUN", "policy"], "A stack and a run directory are given"),
        (["--run", "RUN/nothing"], "is not a directory"),
        (["--run", "RUN/old"], "its schema is 1, and this version reads 2"),
        (["--run", "."], "has no record of a run"),
        (["--run", "RUN", "--journal", "RUN/nothing"], "No such file"),
        (["--run", "RUN", "--journal", "text"], "text is not the store of a gateway"),
        (["--run", "RUN", "--journal", "other"], "the store of a gateway of another version"),
        (["--run", "RUN", "--journal", "damaged"], "damaged is damaged: its tables are not those"),
        (["--run", "RUN", "--journal", "marked"], "malformed database schema (\ufffd[31mred)"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_fix(
    run_dir: Path,
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("ROLLWAY_DASH_TOKEN", raising=False)
    monkeypatch.chdir(run_dir.parent)
    Path("text").write_text("a text " * 100)
    for name, statements in STORES.items():
        SessionStore(Path(name)).close()
        with closing(sqlite3.connect(name)) as db:
            db.executescript(statements)
    given = [argument.replace("RUN", str(run_dir)) for argument in arguments]
    assert main(["dash", "--port", "0", *given]) == 2
    assert text in capsys.readouterr().err


def test_a_stack_that_is_not_up_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dash", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err


def test_a_short_token_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "ROLLWAY_DASH_TOKEN", "short")
    assert main(["dash", "--run", str(run_dir)]) == 2
    assert "fewer than 16" in capsys.readouterr().err
