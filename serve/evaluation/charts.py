"""Charts of the report as inline SVG. Colors come from the page's style, so that they follow light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 360.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 12.0, 12.0, 34.0, 26.0
"""The plot lies inside these margins, in the SVG's own units."""


def line_chart(labels: Sequence[str], series: Mapping[str, Sequence[float]], *, percent: bool = False) -> str:
    """SVG of up to two lines over evenly spaced labels, every point with its value; the axis starts at 0."""
    top = max((value for values in series.values() for value in values), default=1.0) or 1.0
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(labels), 1)
    xs = [_LEFT + step * (index + 0.5) for index in range(len(labels))]
    parts = [_axis(), *_x_labels(labels, xs), *_legend(series)]
    for style, (name, values) in zip(("one", "two"), series.items(), strict=False):
        points = [(x, _y(value, top)) for x, value in zip(xs, values, strict=False)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="{style}" style="fill:none" points="{path}"/>')
        for index, ((x, y), value) in enumerate(zip(points, values, strict=False)):
            shown = f"{100 * value:.0f}%" if percent else f"{value:.2f}"
            # The higher of two lines has its values above it, the lower one below: they never overlap.
            above = all(value >= others[index] for others in series.values() if index < len(others))
            label_y = y - 8 if above else y + 17
            parts.append(
                f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(name)} {shown}</title></circle>'
            )
            parts.append(f'<text class="value" x="{x:.1f}" y="{label_y:.1f}" text-anchor="middle">{shown}</text>')
    return _svg(parts, f"{', '.join(series)} over {', '.join(labels)}")


def bar_chart(labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """SVG of up to two bars for each label, every bar with its value."""
    top = max((value for values in series.values() for value in values), default=1.0) or 1.0
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(labels), 1)
    xs = [_LEFT + step * (index + 0.5) for index in range(len(labels))]
    width = min(step * 0.36, 44.0)
    parts = [_axis(), *_x_labels(labels, xs), *_legend(series)]
    for side, style, (name, values) in zip((-1, 0), ("one", "two"), series.items(), strict=False):
        for x, value in zip(xs, values, strict=False):
            y, left = _y(value, top), x + side * width
            height = _HEIGHT - _BOTTOM - y
            parts.append(
                f'<rect class="{style}" x="{left + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{height:.1f}">'
                f"<title>{escape(name)} {value:.2f}</title></rect>"
                f'<text class="value" x="{left + width / 2:.1f}" y="{y - 5:.1f}" text-anchor="middle">{value:.1f}</text>'
            )
    return _svg(parts, f"{', '.join(series)} for {', '.join(labels)}")


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM - 12) * value / top


def _axis() -> str:
    y = _HEIGHT - _BOTTOM
    return f'<line class="axis" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>'


def _x_labels(labels: Sequence[str], xs: Sequence[float]) -> list[str]:
    y = _HEIGHT - _BOTTOM + 17
    return [
        f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(label)}</text>'
        for label, x in zip(labels, xs, strict=True)
    ]


def _legend(series: Mapping[str, Sequence[float]]) -> list[str]:
    parts, x = [], _LEFT
    for style, name in zip(("one", "two"), series, strict=False):
        parts.append(f'<rect class="{style}" x="{x:.1f}" y="4" width="10" height="10"/>')
        parts.append(f'<text x="{x + 15:.1f}" y="13">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    return parts


def _svg(parts: Sequence[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(description, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
