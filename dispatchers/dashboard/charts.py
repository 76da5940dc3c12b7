"""The geometry of a chart: lines over minutes, drawn by `chart.html` as SVG, so that it needs no script.

Across, positions are percentages, because the width is the reader's. Down, they are pixels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from dispatchers.admin.read.throughput import DELIVERED, MinuteSent
from dispatchers.dashboard.units import duration_text, number_text

HEIGHT = 150
LABELLED = 15
"""Of so many minutes one is labelled."""


class Line(NamedTuple):
    """kind: its colour and dash, a class of the style sheet. values: one for each minute; None for a minute without any."""

    label: str
    kind: str
    values: Sequence[float | None]


class Tick(NamedTuple):
    """A labelled value of the scale."""

    y: float
    text: str


class Dot(NamedTuple):
    """A value of one line, in its minute."""

    kind: str
    y: float


class Minute(NamedTuple):
    """One minute. x: its middle. left, width: its part of the plot. text: the values, each with the name of its line."""

    at: datetime
    x: float
    left: float
    width: float
    text: str
    dots: list[Dot]

    @property
    def anchor(self) -> str:
        """Where the text begins, so that it stays inside the plot."""
        return "start" if self.x < 34 else "middle" if self.x < 66 else "end"

    @property
    def is_labelled(self) -> bool:
        return self.at.minute % LABELLED == 0


class Segment(NamedTuple):
    """A part of a line, from one minute to the next."""

    kind: str
    x1: float
    y1: float
    x2: float
    y2: float


class Chart(NamedTuple):
    """All that is drawn. height: in pixels."""

    height: int
    lines: Sequence[Line]
    ticks: list[Tick]
    segments: list[Segment]
    minutes: list[Minute]

    @property
    def last(self) -> int:
        """The last minute with a value: where the keyboard enters."""
        return next((number for number in reversed(range(len(self.minutes))) if self.minutes[number].dots), 0)


def sends_chart(minutes: Sequence[MinuteSent]) -> Chart:
    """How many sends of each minute delivered, and how many did not."""
    good = [sum(each.results.get(result, 0) for result in DELIVERED) for each in minutes]
    others = [sum(each.results.values()) - delivered for each, delivered in zip(minutes, good, strict=True)]
    lines = [Line("delivered", "good", good), Line("other results", "bad", others)]
    return chart([each.minute for each in minutes], lines, lambda value: number_text(value), least_top=2)


def durations_chart(minutes: Sequence[MinuteSent]) -> Chart:
    """How long the sends of each minute took."""
    lines = [
        Line("p50", "busy", [each.took.p50 for each in minutes]),
        Line("p95", "accent", [each.took.p95 for each in minutes]),
    ]
    return chart([each.minute for each in minutes], lines, duration_text)


def chart(
    times: Sequence[datetime], lines: Sequence[Line], written: Callable[[float], str], *, least_top: float = 0
) -> Chart:
    """written: a value with its unit. least_top: the scale's top if no value needs more."""
    values = [value for line in lines for value in line.values if value is not None]
    top = _round_up(max([least_top, *values]))

    def y(value: float) -> float:
        return round(HEIGHT * (1 - value / top), 1)

    width = 100 / max(len(times), 1)
    minutes = [
        Minute(
            at=at,
            x=round((number + 0.5) * width, 2),
            left=round(number * width, 2),
            width=round(width, 2),
            text=", ".join(_texts(lines, number, written)),
            dots=[Dot(line.kind, y(value)) for line in lines if (value := line.values[number]) is not None],
        )
        for number, at in enumerate(times)
    ]
    segments = [
        Segment(line.kind, minutes[number].x, y(value), minutes[number + 1].x, y(following))
        for line in lines
        for number, (value, following) in enumerate(zip(line.values, line.values[1:], strict=False))
        if value is not None and following is not None
    ]
    ticks = [Tick(y(top * part), written(top * part)) for part in (0, 0.5, 1)]
    return Chart(height=HEIGHT, lines=lines, ticks=ticks, segments=segments, minutes=minutes)


def _texts(lines: Sequence[Line], number: int, written: Callable[[float], str]) -> Iterator[str]:
    for line in lines:
        value = line.values[number]
        if value is not None:
            yield f"{line.label} {written(value)}"


def _round_up(value: float) -> float:
    """To a number whose half is as round."""
    if value <= 0:
        return 1
    power = float(10 ** math.floor(math.log10(value)))
    return next(factor * power for factor in (1, 2, 3, 4, 6, 8, 10) if value <= factor * power * 1.000001)
