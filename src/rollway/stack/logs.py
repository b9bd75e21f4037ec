"""Read process logs: the end of a log, new lines as they come, and hints for known errors."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rollway.stack.retention import list_rotated

# Patterns in the log of a worker or frontend, and advice for the user. The first match wins.
_HINTS: list[tuple[str, str]] = [
    (r"ModuleNotFoundError: No module named '?dynamo", "Dynamo is not installed in the Python "
     "that runs the workers: `pip install 'rollway[cpu]'` or `[vllm]`, see docs/install.md."),
    (r"ModuleNotFoundError: No module named '?vllm", "vLLM is not installed in the Python that "
     "runs the workers: `pip install 'rollway[cpu]'` or `[vllm]`, see docs/install.md."),
    (r"get_engine_zmq_addresses", "This vLLM does not work with this Dynamo: `rollway doctor` "
     "names the versions that do."),
    (r"torchvision::nms", "torchvision was built for CUDA and torch for CPU: docs/install.md "
     "shows how to keep it out."),
    (r"unrecognized arguments?: (.*)", "The engine does not know this option; options under "
     "`args` are passed on under the engine's own names."),
    (r"(?i)out of memory|Cannot allocate memory|OutOfMemoryError", "Not enough memory: fewer "
     "replicas, a smaller `max-model-len`, or less KV cache (`kv-cache-memory-bytes`)."),
    (r"No space left on device.*shm|/dev/shm", "Shared memory is full: `df -h /dev/shm`; in a "
     "container raise --shm-size."),
    (r"No common block size", "This engine cannot use that `block-size`; leave it out or use a "
     "multiple of 32 on CPU."),
    (r"(?i)LocalEntryNotFoundError|offline mode|couldn't connect to '?https://huggingface|"
     r"is not a local folder", "The model is neither a local directory nor in the local cache: "
     "give a checkpoint directory as `path`."),
    (r"(?i)address already in use", "Another program bound a port while the stack started; "
     "run it again."),
    (r"(?i)max_model_len.*greater|larger than the maximum number of tokens",
     "Set a smaller `max-model-len` or a larger `kv-cache-memory-bytes`."),
]  # fmt: skip
_LINE_END = re.compile(r"\r\n|\r|\n")
_BLOCK = 2**16
_TRUNCATED_POLLS = 50  # how often to look for the copy of a truncated log
_ERROR = re.compile(r"(?i)error\b|exception|traceback|fatal|killed|panic")


def tail(path: Path, lines: int = 20, *, before: int | None = None) -> list[str]:
    """Return the last lines of a log, including those that a rotation has moved.

    `before` is a position in the log; lines after it are left out."""
    last_lines = _read_last_lines(path, lines, before)
    for file in list_rotated(path):
        if len(last_lines) >= lines:
            break
        last_lines = _read_last_lines(file, lines - len(last_lines)) + last_lines
    return last_lines


def read_error_tail(path: Path, lines: int = 15) -> list[str]:
    """Return the lines up to the last error, or the last lines if there is none."""
    end = tail(path, 400)
    errors = [index for index, line in enumerate(end) if _ERROR.search(line)]
    if errors:
        end = end[: errors[-1] + 3]
    return end[-lines:]


def find_hint(path: Path) -> str:
    """Return advice about the failure at the end of this log."""
    text = "\n".join(tail(path, 400))
    for pattern, advice in _HINTS:
        if re.search(pattern, text):
            return advice
    return f"The whole log is {path}."


def follow(
    path: Path, *, lines: int = 20, poll_seconds: float = 0.2, ended: Callable[[], bool]
) -> Iterator[str]:
    """Yield the last lines, then new ones as they come, until `ended()` is true and all is read."""
    reader = _Reader(path)
    try:
        reader.skip_whole_lines()
        yield from tail(path, lines, before=reader.position)
        pending, has_ended = b"", False
        while True:
            block = reader.read()
            if block:
                pending += block
                # A carriage return at the very end may be half of a line end.
                cut = 1 + max(pending.rfind(b"\n"), pending.rfind(b"\r", 0, -1))
                complete, pending = pending[:cut], pending[cut:]
                yield from _split(complete)
            elif has_ended:
                yield from _split(pending)
                return
            elif ended():
                has_ended = True  # read once more: lines may have come since the last read
            else:
                time.sleep(poll_seconds)
    finally:
        reader.close()


class _Reader:
    """Reads what is appended to a log, across rotations and across runs of the stack."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._truncated = 0
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDONLY)
        # The newest rotated file; when it changes, a rotation has moved lines.
        self._newest = _get_inode(list_rotated(self._path)[:1])
        self.position = 0

    def skip_whole_lines(self) -> None:
        """Move to the end of the last complete line."""
        size = os.fstat(self._file).st_size
        start = max(0, size - _BLOCK)
        last = os.pread(self._file, size - start, start).rfind(b"\n")
        self.position = start + last + 1 if last >= 0 else start

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> bytes:
        """Return what was appended since the last call."""
        if _get_inode([self._path]) not in (None, os.fstat(self._file).st_ino):
            return self._open_next_run()
        if _get_inode(list_rotated(self._path)[:1]) != self._newest:
            return self._read_rotated()
        unread = os.fstat(self._file).st_size - self.position
        if unread < 0:
            # The log was truncated. The rotation's copy appears a moment later; if it does not,
            # another program has emptied the log.
            self._truncated += 1
            if self._truncated > _TRUNCATED_POLLS:
                self.position, self._truncated = 0, 0
            return b""
        self._truncated = 0
        block = os.pread(self._file, unread, self.position)
        self.position += len(block)
        return block

    def _read_rotated(self) -> bytes:
        """Read the lines that rotations have moved and that were not read yet."""
        files = list_rotated(self._path)
        inodes = [_get_inode([file]) for file in files]
        count = inodes.index(self._newest) if self._newest in inodes else len(files)
        blocks: list[bytes] = []
        for file in reversed(files[:count]):
            blocks.append(file.read_bytes()[0 if blocks else self.position :])
        if not files:
            return b""  # a rotation is renaming the files at this moment
        self.position, self._newest = 0, inodes[0]
        return b"".join(blocks) or self.read()

    def _open_next_run(self) -> bytes:
        """Read the rest of the old run's log, and open the log of the new run."""
        unread = os.fstat(self._file).st_size - self.position
        rest = os.pread(self._file, max(0, unread), self.position)
        self.close()
        self._open()
        return rest or self.read()


def _read_last_lines(path: Path, lines: int, before: int | None = None) -> list[str]:
    try:
        with path.open("rb") as file:
            start, end = file.seek(0, os.SEEK_END), b""
            start = start if before is None else min(start, before)
            while start > 0 and end.count(b"\n") <= lines:
                size = min(start, max(_BLOCK, len(end)))  # each pass reads as much as all before
                start -= size
                file.seek(start)
                end = file.read(size) + end
    except OSError:
        return []
    return _split(end)[-lines:] if lines > 0 else []


def _split(data: bytes) -> list[str]:
    """Split whole lines; carriage returns end a line too, as progress bars use them."""
    if not data:
        return []
    lines = _LINE_END.split(data.decode(errors="replace"))
    return lines[:-1] if not lines[-1] else lines


def _get_inode(paths: list[Path]) -> int | None:
    try:
        return paths[0].stat().st_ino if paths else None
    except OSError:
        return None
