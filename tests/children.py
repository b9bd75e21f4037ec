"""Child processes that a test starts, waits for and kills."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOLD = "\nimport sys; sys.stdin.read()\n"


def start_child(code: str, *arguments: str, **options: Any) -> tuple[subprocess.Popen[str], str]:
    """Start Python code; return when it has printed its first line, with that line.

    The child then lives until it is killed, or until this process ends and closes its stdin.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code) + HOLD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    assert child.stdout is not None
    return child, child.stdout.readline().rstrip("\n")


@contextmanager
def run_server(*arguments: str, is_stopped: bool = True) -> Iterator[dict[str, Any]]:
    """Run a command that serves; yield the line that it prints. At the end stop it, or wait until
    it ends by itself."""
    command = [sys.executable, "-m", "rollway.cli", *arguments, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("{"), f"rollway {arguments[0]} did not start"
            yield json.loads(line)
            if is_stopped:
                process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


class JsonChild:
    """A child that answers each line of JSON on its stdin with one on its stdout."""

    def __init__(self, code: str, *arguments: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    def ask(self, question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate(timeout=60)


def make_dead_writer_mark() -> str:
    """Return the mark that a process which is dead by now left on its files."""
    code = "from rollway.weights.leftovers import writer_mark; print(writer_mark())"
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


def find_processes_in(directory: Path) -> list[int]:
    """List the processes whose working directory is, or was, below `directory`."""
    processes = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str((entry / "cwd").readlink()).startswith(str(directory)):
                processes.append(int(entry.name))
        except OSError:
            continue
    return processes


def are_all_threads_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has reached all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(") ")[2].startswith("T") for task in tasks)
