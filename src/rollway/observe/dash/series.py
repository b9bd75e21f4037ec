"""Series of numbers over time, in bounded memory."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

MOST_POINTS = 1_200


@dataclass(slots=True)
class Series:
    """Points in the order of their times. A full series forgets every second of its older half, so
    that the whole run stays visible and its end is exact."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, t: float, value: float) -> None:
        """Add a point; processes write their records apart, so one may come late. More digits than
        a plot shows would only be sent. A rate of a damaged record may be infinite: it is left out.
        """
        if not math.isfinite(value):
            return
        t, value = round(t, 3), float(f"{value:.6g}")
        if not self.times or t > self.times[-1]:
            self.times.append(t)
            self.values.append(value)
        else:
            place = bisect.bisect_left(self.times, t)
            if self.times[place] == t:
                self.values[place] = value
                return
            self.times.insert(place, t)
            self.values.insert(place, value)
        if len(self.times) > MOST_POINTS:
            half = MOST_POINTS // 2
            self.times[:half] = self.times[:half:2]
            self.values[:half] = self.values[:half:2]

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def as_json(self, since: float = float("-inf")) -> dict[str, list[float]]:
        """Return the points after a time."""
        first = bisect.bisect_right(self.times, since)
        return {"t": self.times[first:], "v": self.values[first:]}
