"""Bar charts as SVG, written by hand: a few rectangles and texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(12, 22, title, size=15),
        _text(12, 40, subtitle, color="#616161", size=12),
    ]
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


def _text(x: float, y: float, text: str, *, anchor: str = "start", color: str = TEXT, size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>'
    )
