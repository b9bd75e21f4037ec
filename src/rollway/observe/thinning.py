"""Bound the size of recorded samples: the older they are, the thinner.

    s000001  s000002  s000003  s000004 …  s000019      files of one process, of about equal size
    └─ every 4th sample ─┘  └ every 2nd ┘  └─ all ─┘   once the sum of all has passed the bound

A file that is full is never written to again. To thin it, every second of its samples is left out,
and with them the steps of refits, whose reports stay in the file of events. Two neighbours that
have become small are joined, so that the number of files is bounded, too.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from rollway import private_files

SEGMENT = re.compile(r"\.s\d{6}\.jsonl$")
"""The end of the name of a file of samples."""
COUNT = 16
"""The bound divided by the size of one file."""


@dataclass(slots=True)
class _Segment:
    path: Path
    level: int = 0
    """How often it was thinned."""

    @property
    def size(self) -> int:
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0


class Segments:
    """The files of samples of one process."""

    def __init__(self, largest_bytes: int) -> None:
        self.segment_bytes = max(1, largest_bytes // COUNT)
        self._largest_bytes = largest_bytes
        self._segments: list[_Segment] = []
        self._number = 0

    def add(self, main: Path) -> Path:
        """Return the path of the next file, named after the process's main file."""
        self._number += 1
        path = main.with_suffix(f".s{self._number:06}.jsonl")
        self._segments.append(_Segment(path))
        return path

    def bound(self) -> None:
        """Thin full files until all of them are within the bound."""
        while sum(segment.size for segment in self._segments) > self._largest_bytes:
            # The least thinned of the older half, the oldest of them first.
            older = self._segments[: max(1, len(self._segments) // 2)]
            segment = min(older, key=lambda segment: segment.level)
            before = segment.size
            if not thin(segment.path):
                return  # the disk is full: what is there stays
            segment.level += 1
            if segment.size >= before:  # a header and one sample are left
                segment.path.unlink(missing_ok=True)
                self._segments.remove(segment)
            else:
                self._join_with_earlier(self._segments.index(segment))

    def _join_with_earlier(self, index: int) -> None:
        later, earlier = self._segments[index], self._segments[index - 1]
        if index == 0 or earlier.level != later.level:
            return
        if earlier.size + later.size > self.segment_bytes:
            return
        with contextlib.suppress(OSError):
            _, _, entries = later.path.read_bytes().partition(b"\n")  # without its header
            private_files.replace_file(earlier.path, earlier.path.read_bytes() + entries)
            later.path.unlink()
            self._segments.remove(later)


def thin(path: Path) -> bool:
    """Leave out every second sample of a file that is complete, and all steps of refits; return
    False if the disk does not let it."""
    kept, is_odd = [], False
    try:
        with path.open("rb") as file:
            for line in file:
                if line.startswith(b'{"kind":"header"'):
                    kept.append(line)
                elif not line.startswith(b'{"kind":"step"'):
                    is_odd = not is_odd
                    if is_odd:
                        kept.append(line)
        private_files.replace_file(path, b"".join(kept))
    except OSError:
        return False
    return True
