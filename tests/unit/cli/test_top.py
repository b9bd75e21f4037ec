"""`rollway top` as a command, where nobody sits at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from rollway.cli import main
from rollway.observe.dash.live_table import draw
from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.view import Watch
from tests.observe.make_run import MadeRun, Writer, write_old_run, write_run
from tests.waiting import wait_until


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", workers=2, seconds=30)
    write_old_run(tmp_path / "run" / "old")
    return tmp_path / "run"


def test_json_has_the_sections_of_the_page(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--run", str(run_dir), "--json"]) == 0
    model = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in model["sections"]["fleet"]} == {"tiny-0", "tiny-1"}
    assert [answer["name"] for answer in model["sections"]["top"]] == [
        "exact", "fresh", "cached", "busy",
    ]  # fmt: skip
    assert model["refit"]["rows"] and model["events"]


@pytest.mark.parametrize("arguments", [["--once"], []])
def test_it_prints_once_into_a_pipe(
    run_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--run", str(run_dir), *arguments]) == 0
    text = capsys.readouterr().out
    for word in ("exact", "Fleet: 2 of 2 workers serve", "Refits", "Rollouts", "Events"):
        assert word in text


def test_a_damaged_record_is_printed_as_far_as_it_goes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate is infinite: its time was torn to the smallest number there is."""
    (record,) = run_dir.glob("driver-*.jsonl")
    line = '{"kind": "rollouts", "t": 1700000029.0, "seconds": 5e-324, "count": 9, "tokens": 9}\n'
    record.write_text(record.read_text() + line)
    assert main(["top", "--run", str(run_dir), "--once"]) == 0
    assert "Fleet: 2 of 2 workers serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--run", "RUN", "policy"], "A stack and a run directory are given"),
        (["--run", "RUN/nothing"], "is not a directory"),
        (["--run", "RUN/old"], "its schema is 1, and this version reads 2"),
        (["--run", "RUN", "--interval", "0"], "--interval is 0"),
    ],
)
def test_wrong_input_is_refused_with_the_fix(
    run_dir: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("RUN", str(run_dir)) for argument in arguments]
    assert main(["top", "--once", *given]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (160, 60)])
@pytest.mark.parametrize("workers", [1, 4, 64])
def test_every_section_fits_on_a_screen(
    tmp_path: Path, workers: int, columns: int, rows: int
) -> None:
    made, writer = MadeRun(workers), Writer(tmp_path)
    writer.write_all(made.run(1.7e9, 200.0))
    writer.write_all(made.kill(1.7e9 + 200))
    watch = Watch(open_directory(tmp_path))
    watch.load()
    screen = Console(file=io.StringIO(), width=columns, height=rows)
    lines = screen.render_lines(draw(watch, screen))
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert len(lines) <= rows
    for word in ("exact", "busy", "Fleet", "Refits", "Rollouts", "Trainer's steps", "Events"):
        assert f"\n{word}" in text
    shown = text.count("\ntiny-")
    assert shown == workers or f"{workers - shown} more that are not shown" in text
    fleet = text[text.index("\nFleet") : text.index("\nRefits")]
    assert f"\ntiny-{workers - 1} " in fleet  # it has just restarted, and is the worst


class Terminal:
    """A terminal of 120 columns that a command is started in."""

    def __init__(self, *arguments: str) -> None:
        self._handle, inner = pty.openpty()
        termios.tcsetwinsize(inner, (40, 120))
        command = [sys.executable, "-m", "rollway.cli", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            start_new_session=True,
        )
        os.close(inner)
        self.text = ""

    def read(self, seconds: float) -> int:
        """Take what is written, until nothing is for so long; return how many bytes."""
        count = 0
        while select.select([self._handle], [], [], seconds)[0]:
            try:
                data = os.read(self._handle, 1 << 16)
            except OSError:  # the command has ended
                break
            count += len(data)
            self.text += data.decode(errors="replace")
        return count

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._handle)


def test_in_a_terminal_it_shows_the_run_stays_quiet_and_ends_with_ctrl_c(run_dir: Path) -> None:
    terminal = Terminal("top", "--run", str(run_dir), "--interval", "0.1")
    try:
        wait_until(lambda: terminal.read(0.5) and "tiny-1" in terminal.text, 60.0)
        # Ten looks at a run that has ended send nothing.
        wait_until(lambda: terminal.read(1.0) == 0, 60.0, what="a quiet terminal")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0
        assert "\x1b[?1049h" not in terminal.text  # what was there before stays in the terminal
    finally:
        terminal.close()
