"""Small SVG charts as text: no scripts, no fonts or files from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 38, 44
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4")
"""Lines differ by dash as well as by colour: for print, and for readers who do not tell colours apart."""


@dataclass(frozen=True)
class Line:
    """One named line through (x, y) points; drawn as steps for a distribution function."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    steps: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis: label, range in data units, ticks with their texts; logarithmic on demand (range above 0)."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, value: float) -> float:
        """Position of `value` on the axis, 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.log else value
        return min(1.0, max(0.0, (at - low) / (high - low)))


def linear_axis(label: str, values: Sequence[float], *, digits: int, count: int = 5) -> Axis:
    """An axis whose ticks are round numbers around `values` (a single value gets some room)."""
    low, high = min(values), max(values)
    room = (high - low) or max(abs(high) * 0.1, 10.0**-digits)
    raw = 1.1 * room / (count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    step = max(step, 10.0**-digits)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    ticks = [(i * step, f"{i * step:.{digits}f}") for i in range(first, last + 1)]
    return Axis(label, first * step, last * step, ticks)


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis that ends on ticks: 1, 2 and 5 times powers of ten, more of them over short ranges.

    Args:
        values: above 0.
    """
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    multiples = (1, 2, 5) if high > 12 * low else (1, 1.5, 2, 3, 4, 5, 7)
    grid = [m * 10.0**p for p in powers for m in multiples]
    first = max(i for i, tick in enumerate(grid) if tick <= low)
    last = min(i for i, tick in enumerate(grid) if tick >= high and i > first)
    return Axis(label, grid[first], grid[last], [(t, f"{t:g}") for t in grid[first : last + 1]], log=True)


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str = "") -> str:
    """One text element; `anchor` is start, middle or end."""
    style = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{html.escape(content)}</text>'


def svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """A scalable picture with a text for those who cannot see it."""
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{html.escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _frame(x: Axis, y: Axis) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, name in y.ticks:
        at = bottom - y.place(value) * (bottom - TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(LEFT - 6, at + 4, name, anchor="end"))
    edge = -math.inf
    for value, name in x.ticks:
        at = LEFT + x.place(value) * (right - LEFT)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        half = 3.6 * len(name)
        if at - half > edge + 4:  # a label that would touch the one before it is left out
            parts.append(text(at, bottom + 17, name, anchor="middle"))
            edge = at + half
    parts.append(text((LEFT + right) / 2, HEIGHT - 8, x.label, anchor="middle", css="axis"))
    middle = (TOP + bottom) / 2
    turned = text(0, 0, y.label, anchor="middle", css="axis")
    parts.append(f'<g transform="translate(13 {middle:.1f}) rotate(-90)">{turned}</g>')
    return parts


def _legend(lines: Sequence[Line]) -> list[str]:
    parts = []
    at = float(LEFT)
    for i, line in enumerate(lines):
        dash = DASHES[i % len(DASHES)]
        parts.append(
            f'<line x1="{at:.1f}" x2="{at + 22:.1f}" y1="16" y2="16" stroke="{line.colour}" '
            f'stroke-width="2.5" stroke-dasharray="{dash}"/>'
        )
        parts.append(text(at + 27, 20, line.name))
        at += 42 + 7.2 * len(line.name)
    return parts


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, label: str) -> str:
    """Lines over a grid, with a legend above."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = _frame(x, y) + _legend(lines)
    for i, line in enumerate(lines):
        spots = [
            (LEFT + x.place(a) * (right - LEFT), bottom - y.place(b) * (bottom - TOP)) for a, b in line.points
        ]
        if not spots:
            continue
        path = f"M{spots[0][0]:.1f} {spots[0][1]:.1f}"
        for a, b in spots[1:]:
            path += f"H{a:.1f}V{b:.1f}" if line.steps else f"L{a:.1f} {b:.1f}"
        dash = DASHES[i % len(DASHES)]
        parts.append(
            f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        if not line.steps:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{line.colour}"/>' for a, b in spots]
    return svg(WIDTH, HEIGHT, parts, label)


def shade(value: float) -> str:
    """Colour of a heatmap cell for `value` in 0..1: white over blue to almost black."""
    stops = ((255, 255, 255), (158, 202, 225), (33, 113, 181), (8, 29, 88))
    at = min(1.0, max(0.0, value)) * (len(stops) - 1)
    i = min(int(at), len(stops) - 2)
    mixed = [round(a + (b - a) * (at - i)) for a, b in zip(stops[i], stops[i + 1], strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
