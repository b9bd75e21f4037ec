"""Figures over the time of a run, in bounded memory, whatever its length."""

from __future__ import annotations

MOST_BINS = 240
_FIRST_WIDTH = 1.0


class Bins:
    """Sums of what fell into each stretch of time. When a run outgrows its bins, two become one.

    Example:
        bins = Bins(began)
        bins.add(t, value)
        bins.list_means()   # [(the middle of a bin, the mean of its values), …]
    """

    def __init__(self, start: float, most: int = MOST_BINS) -> None:
        self.start = start
        self.width = _FIRST_WIDTH
        self._most = most
        self._sums: list[float] = []
        self._weights: list[float] = []

    def add(self, t: float, value: float, weight: float = 1.0) -> None:
        """Add a value that counts as much as its weight."""
        place = int((t - self.start) / self.width)
        if place < 0:  # clocks differ a little
            place = 0
        if place >= len(self._sums):
            while place >= self._most:
                self._widen()
                place = int((t - self.start) / self.width)
            missing = place + 1 - len(self._sums)
            self._sums += [0.0] * missing
            self._weights += [0.0] * missing
        self._sums[place] += value * weight
        self._weights[place] += weight

    def spread(self, begin: float, end: float, amount: float) -> None:
        """Add an amount that came evenly between two times."""
        begin = max(begin, self.start)
        if end - begin < 1e-6:
            self.add(end, amount)
            return
        self.add(end, 0.0)  # now there is a bin for every moment of it
        rate, t = amount / (end - begin), begin
        while t < end:
            place = int((t - self.start) / self.width)
            # At least a little further: rounding must not keep it in place.
            until = min(end, max(self.start + (place + 1) * self.width, t + 1e-3))
            self.add(t, rate * (until - t))
            t = until

    def _widen(self) -> None:
        self.width *= 2
        for values in (self._sums, self._weights):
            if len(values) % 2:
                values.append(0.0)
            values[:] = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]

    def list_means(self) -> list[tuple[float, float]]:
        """Return the middle of every bin that has a value, and the mean of its values."""
        return [
            (self._get_middle(place), total / weight)
            for place, (total, weight) in enumerate(zip(self._sums, self._weights, strict=True))
            if weight
        ]

    def list_sums(self) -> list[tuple[float, float]]:
        """Return the middle and the sum of every bin, also of those without a value."""
        return [(self._get_middle(place), total) for place, total in enumerate(self._sums)]

    def list_rates(self) -> list[tuple[float, float]]:
        """Return the middle of every bin, and its sum per second."""
        return [(t, total / self.width) for t, total in self.list_sums()]

    def _get_middle(self, place: int) -> float:
        return self.start + (place + 0.5) * self.width
