"""Work on large memory, divided among threads that take the next piece whenever they are free.

torch divides an operation evenly among its threads, and all of them wait for the last one. If
another process uses one of the cores, a copy by two of torch's threads takes longer than by one.
Here the free cores do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Team:
    """A number of threads, of which the caller's is one."""

    def __init__(self, size: int) -> None:
        self._helpers = size - 1
        self._pool = ThreadPoolExecutor(size - 1) if size > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """Call `work` for each piece; return the results in order.

        `work` must release the GIL, as numpy does."""
        if self._pool is None or len(pieces) < 2:
            return [work(piece) for piece in pieces]
        results: dict[int, Result] = {}
        todo = iter(enumerate(pieces))
        helpers = min(self._helpers, len(pieces) - 1)
        running = [self._pool.submit(_work_off, work, todo, results) for _ in range(helpers)]
        try:
            _work_off(work, todo, results)
        finally:
            wait(running)  # also after an error: nobody uses the memory once this has returned
        for helper in running:
            helper.result()
        return [results[number] for number in range(len(pieces))]


def _work_off(
    work: Callable[[Piece], Result],
    todo: Iterator[tuple[int, Piece]],
    results: dict[int, Result],
) -> None:
    # The iterator is written in C, so taking the next piece is one step under the GIL.
    for number, piece in todo:
        results[number] = work(piece)
