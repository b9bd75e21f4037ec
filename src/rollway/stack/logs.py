"""Reading process logs: the end of one, following one, and what known errors mean."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

# What a line of a worker's or frontend's log means for the user. First match wins.
_HINTS: list[tuple[str, str]] = [
    (r"ModuleNotFoundError: No module named '?dynamo", "Dynamo is not installed in the Python "
     "that runs the workers: `pip install 'rollway[cpu]'` or `[vllm]`, see docs/install.md."),
    (r"ModuleNotFoundError: No module named '?vllm", "vLLM is not installed in the Python that "
     "runs the workers: `pip install 'rollway[cpu]'` or `[vllm]`, see docs/install.md."),
    (r"get_engine_zmq_addresses", "This vLLM does not go with this Dynamo: `rollway doctor` "
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
    (r"(?i)address already in use", "A port was taken by another program while the stack started; "
     "run it again."),
    (r"(?i)max_model_len.*greater|larger than the maximum number of tokens",
     "Set a smaller `max-model-len` or a larger `kv-cache-memory-bytes`."),
]  # fmt: skip
_TELLING = re.compile(r"(?i)error\b|exception|traceback|fatal|killed|panic")


def tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
    except OSError:
        return []


def telling_tail(path: Path, lines: int = 15) -> list[str]:
    """The lines up to the last one that names an error, or the plain end."""
    end = tail(path, 400)
    errors = [index for index, line in enumerate(end) if _TELLING.search(line)]
    if errors:
        end = end[: errors[-1] + 3]
    return end[-lines:]


def hint(path: Path) -> str:
    """What to do about the failure that this log ends with."""
    text = "\n".join(tail(path, 400))
    for pattern, advice in _HINTS:
        if re.search(pattern, text):
            return advice
    return f"The whole log is {path}."


def follow(
    path: Path, *, lines: int = 20, poll_seconds: float = 0.2, ended: Callable[[], bool]
) -> Iterator[str]:
    """Yield the last lines, then new ones as they come, until `ended()` and nothing is left."""
    yield from tail(path, lines)
    with path.open(errors="replace") as file:
        file.seek(0, 2)
        pending = ""
        while True:
            chunk = file.read()
            if chunk:
                pending += chunk
                *whole, pending = pending.split("\n")
                yield from whole
            elif ended():
                return
            else:
                time.sleep(poll_seconds)
