"""Charts as SVG, written by hand: a few rectangles, lines and texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, LABELS, FIGURES = 760, 280, 130
ROW, BAR, TOP, BOTTOM = 28, 16, 52, 14
OURS, THEIRS, GRID, TEXT = "#3949ab", "#9e9e9e", "#bdbdbd", "#212121"


@dataclass(frozen=True)
class Bar:
    """low, high: the smallest and the largest round. text: the figure, as it is printed."""

    label: str
    value: float
    low: float
    high: float
    text: str
    ours: bool


def bar_chart(title: str, subtitle: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars from 0, each with a line from its smallest to its largest round."""
    height = TOP + ROW * len(bars) + BOTTOM
    scale = (WIDTH - LABELS - FIGURES) / (max((each.high for each in bars), default=0) or 1)
    lines = _frame(title, subtitle, height)
    for number, bar in enumerate(bars):
        top = TOP + ROW * number
        middle = top + BAR / 2
        end = LABELS + bar.value * scale
        low, high = LABELS + bar.low * scale, LABELS + bar.high * scale
        fill = OURS if bar.ours else THEIRS
        lines += [
            _text(LABELS - 10, middle + 4, bar.label, anchor="end"),
            f'<rect x="{LABELS}" y="{top}" width="{max(end - LABELS, 1):.1f}" height="{BAR}" rx="2" fill="{fill}"/>',
            f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="{TEXT}" stroke-width="1.5"/>',
            _text(max(end, high) + 8, middle + 4, bar.text),
        ]
    lines.append(f'<path d="M{LABELS} {TOP - 6}V{height - BOTTOM}" stroke="{GRID}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _frame(title: str, subtitle: str, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(12, 22, title, size=15),
        _text(12, 40, subtitle, color="#616161", size=12),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", color: str = TEXT, size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>'
    )


# --- lines


COLORS = ("#3949ab", "#00897b", "#ef6c00", "#c2185b", "#6d4c41")
LEFT, RIGHT, HEIGHT, CHART_TOP, CHART_BOTTOM = 80, 190, 380, 58, 48


@dataclass(frozen=True)
class Line:
    """points: x and y, both above 0. is_dashed: for what was computed, beside what was measured."""

    label: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


def line_chart(title: str, subtitle: str, across: str, lines: Sequence[Line]) -> str:
    """Lines over logarithmic axes, each with its points. across: what the horizontal axis shows."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    right, bottom = WIDTH - RIGHT, HEIGHT - CHART_BOTTOM
    places_x = _places(xs, LEFT, right)
    places_y = _places([*ys, 10 ** floor(log10(min(ys))), 10 ** ceil(log10(max(ys)))], bottom, CHART_TOP)
    parts = [*_frame(title, subtitle, HEIGHT), _text((LEFT + right) / 2, HEIGHT - 8, across, anchor="middle", size=12)]
    for power in range(floor(log10(min(ys))), ceil(log10(max(ys))) + 1):
        y = places_y(10**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}" stroke-width="0.5"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{10**power:,}", anchor="end", size=12))
    parts += [_text(places_x(x), bottom + 18, f"{x:,.0f}", anchor="middle", size=12) for x in sorted(set(xs))]
    for number, line in enumerate(lines):
        places = [(places_x(x), places_y(y)) for x, y in line.points]
        parts += _drawn(line, places, COLORS[number % len(COLORS)], CHART_TOP + 12 + 20 * number, right + 14)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(line: Line, places: Sequence[tuple[float, float]], color: str, y: float, x: float) -> Iterator[str]:
    """The line, and its place in the legend."""
    dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places)
    yield f'<path d="M{x:.1f} {y:.1f}h22" stroke="{color}" stroke-width="2"{dashes}/>'
    yield _text(x + 28, y + 4, line.label, size=12)


def _places(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = log10(min(values)), log10(max(values))
    return lambda value: start + (end - start) * (log10(value) - low) / ((high - low) or 1)
