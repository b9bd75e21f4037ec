"""Plots as inline SVG, drawn here: a report needs no script and loads nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rollway.observe.figures import format_number, format_seconds

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 560, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 8, 20
_GAP_RATIO = 6.0
"""Where points are this many times further apart than usual, nothing was measured."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one metric; x is seconds since the run began."""

    label: str
    metric: str
    points: Points
    style: str = "line-1"


def draw_lines(
    title: str,
    lines: Sequence[Line],
    form: Callable[[float | None], str] = format_number,
    *,
    most: float | None = None,
) -> str:
    """Return a figure with lines over time; empty without a point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    top = max([most or 0.0, *(value for line in lines for _, value in line.points)]) or 1.0
    span = max(x for line in lines for x, _ in line.points) or 1.0
    parts = [*_draw_axes(span, top, form)]
    for line in lines:
        for piece in _cut(line.points):
            path = " ".join(f"{_x(x, span):.1f},{_y(value, top):.1f}" for x, value in piece)
            if len(piece) == 1:
                x, y = path.split(",")
                parts.append(f'<circle class="{line.style}" cx="{x}" cy="{y}" r="1.5"/>')
            else:
                parts.append(f'<polyline class="{line.style}" points="{path}"/>')
    captions = [
        _caption(line, f"{form(_get_mean(line.points))}, at most {form(_get_top(line.points))}")
        for line in lines
    ]
    return _make_figure(title, captions, parts)


def draw_stack(title: str, metric: str, parts: dict[str, Points]) -> str:
    """Return a figure with parts of the time above each other, one column per point."""
    parts = {name: points for name, points in parts.items() if points}
    if not parts:
        return ""
    columns: dict[float, dict[str, float]] = {}
    for name, points in parts.items():
        for x, value in points:
            columns.setdefault(x, {})[name] = value
    top = max(sum(column.values()) for column in columns.values()) or 1.0
    xs = sorted(columns)
    span = max(xs) or 1.0
    step = min((b - a for a, b in itertools.pairwise(xs)), default=span)
    width = max(_x(step, span) - _x(0, span) - 0.5, 0.7)
    shapes = [*_draw_axes(span, top, format_seconds)]
    for x in xs:
        below = 0.0
        for name in parts:
            value = columns[x].get(name, 0.0)
            if value:
                high, low = _y(below + value, top), _y(below, top)
                shapes.append(
                    f'<rect class="part-{escape(name)}" x="{_x(x, span) - width / 2:.1f}" '
                    f'y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}"/>'
                )
                below += value
    captions = [
        _caption(Line(name, metric, points, f"part-{name}"), format_seconds(_get_mean(points)))
        for name, points in parts.items()
    ]
    return _make_figure(title, captions, shapes)


def draw_versions(
    title: str, metric: str, values: dict[int, float], bounds: Sequence[float]
) -> str:
    """Return the mismatch by version as bars on a logarithmic scale; many versions share a bar,
    which has the worst of them."""
    if not values:
        return ""
    versions = sorted(values)
    low, high = 1e-7, 1.0
    share = max(1, math.ceil(len(versions) / 160))
    groups = [versions[place : place + share] for place in range(0, len(versions), share)]

    def place(value: float) -> float:
        part = math.log10(min(max(value, low), high) / low) / math.log10(high / low)
        return _TOP + (1 - part) * (_HEIGHT - _TOP - _BOTTOM)

    shapes = []
    for value, style in (
        (1e-6, "grid"),
        (1e-4, "grid"),
        *zip(bounds, ("warn", "bad"), strict=True),
    ):
        y = place(value)
        shapes.append(
            f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        shapes.append(_text(_LEFT - 4, y + 3, f"{value:.0e}", "end"))
    width = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    for number, group in enumerate(groups):
        worst = max(group, key=lambda version: values[version])
        value = values[worst]
        level = "good" if value < bounds[0] else "warn" if value < bounds[1] else "bad"
        y = place(value)
        shapes.append(
            f'<rect class="bar-{level}" data-metric="{metric}" '
            f'x="{_LEFT + number * width:.1f}" y="{y:.1f}" '
            f'width="{max(width - 0.5, 0.5):.1f}" height="{_HEIGHT - _BOTTOM - y:.1f}">'
            f"<title>version {worst}: {format_number(value)}</title></rect>"
        )
    shapes.append(_text(_LEFT, _HEIGHT - 6, f"version {versions[0]}", "start"))
    shapes.append(_text(_WIDTH - _RIGHT, _HEIGHT - 6, f"{versions[-1]}", "end"))
    worst_value = max(values.values())
    caption = f'<span data-metric="{metric}">worst {format_number(worst_value)}</span>'
    return _make_figure(title, [caption], shapes)


def draw_shares(title: str, metric: str, rows: Sequence[tuple[str, Points]], span: float) -> str:
    """Return a row per worker, with the darkness of each stretch of time as its share."""
    rows = [(name, points) for name, points in rows if points]
    if not rows:
        return ""
    height = max(3.0, min(14.0, 280 / len(rows)))
    tall = len(rows) * height + _BOTTOM
    shapes = [f'<g data-metric="{metric}">']
    for number, (name, points) in enumerate(rows):
        xs = [x for x, _ in points]
        step = min((b - a for a, b in itertools.pairwise(xs)), default=span)
        width = max(_x(step, span) - _x(0, span), 1.0)
        y = number * height
        if height >= 9 or number in (0, len(rows) - 1):
            shapes.append(_text(_LEFT - 4, y + min(height, 9), _shorten(name), "end"))
        for x, value in points:
            shapes.append(
                f'<rect class="share" x="{_x(x, span) - width / 2:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="{height - 0.5:.1f}" '
                f'fill-opacity="{min(max(value, 0.0), 1.0):.2f}"><title>{escape(name)}: {value:.0%}'
                "</title></rect>"
            )
    shapes.append("</g>")
    for x, text in _list_times(span):
        shapes.append(_text(_x(x, span), tall - 6, text, "middle"))
    means = [_get_mean(points) for _, points in rows]
    text = f"{min(means):.0%} to {max(means):.0%} of a worker's prompt tokens"
    caption = f'<span data-metric="{metric}">{text}</span>'
    return _make_figure(title, [caption], shapes, tall)


# --- parts ---------------------------------------------------------------------------------------


def _make_figure(
    title: str, captions: Sequence[str], shapes: Sequence[str], height: float = _HEIGHT
) -> str:
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {' '.join(captions)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}</svg></figure>"
    )


def _caption(line: Line, text: str) -> str:
    label = f"{escape(line.label)} " if line.label else ""
    return (
        f'<span data-metric="{escape(line.metric)}"><i class="dot {escape(line.style)}"></i>'
        f"{label}{escape(text)}</span>"
    )


def _draw_axes(span: float, top: float, form: Callable[[float | None], str]) -> Iterator[str]:
    for value in (0.0, top / 2, top):
        y = _y(value, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 4, y + 3, form(value), "end")
    for x, text in _list_times(span):
        yield _text(_x(x, span), _HEIGHT - 6, text, "middle")


def _list_times(span: float) -> Iterator[tuple[float, str]]:
    """Yield round times since the beginning."""
    sizes = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200)
    step = next((size for size in sizes if span / size <= 6), math.ceil(span / 6 / 86400) * 86400)
    for number in range(int(span / step) + 1):
        seconds = number * step
        if span >= 3 * 3600:
            text = f"{seconds / 3600:.3g} h"
        elif span >= 180:
            text = f"{seconds / 60:.3g} min"
        else:
            text = f"{seconds:g} s"
        yield float(seconds), text


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(x: float, span: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * max(x, 0.0) / span


def _y(value: float, top: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(max(value, 0.0) / top, 1.0))


def _cut(points: Points) -> Iterator[Points]:
    """Yield the pieces between which nothing was measured."""
    gaps = sorted(b[0] - a[0] for a, b in itertools.pairwise(points))
    limit = _GAP_RATIO * gaps[len(gaps) // 2] if gaps else 0.0
    first = 0
    for place in range(1, len(points)):
        if points[place][0] - points[place - 1][0] > limit:
            yield points[first:place]
            first = place
    yield points[first:]


def _shorten(name: str, most: int = 9) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def _get_mean(points: Points) -> float:
    return sum(value for _, value in points) / len(points)


def _get_top(points: Points) -> float:
    return max(value for _, value in points)
