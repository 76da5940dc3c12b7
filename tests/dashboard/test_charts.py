"""The geometry of the charts."""

from datetime import UTC, datetime, timedelta

from dispatchers.dashboard.charts import HEIGHT, Line, chart

HOUR = [datetime(2026, 1, 31, 12, tzinfo=UTC) + timedelta(minutes=minute) for minute in range(4)]


def test_the_scale_begins_at_zero_and_its_top_and_half_are_round() -> None:
    for most, labels in {0.0: ["0", "0.5", "1"], 7.0: ["0", "4", "8"], 2100.0: ["0", "1500", "3000"]}.items():
        drawn = chart(HOUR, [Line("sends", "good", [0, most, 0, 0])], lambda value: f"{value:g}")
        assert [tick.text for tick in drawn.ticks] == labels
        assert [tick.y for tick in drawn.ticks] == [HEIGHT, HEIGHT / 2, 0]


def test_a_minute_without_a_value_breaks_the_line_and_has_no_dot() -> None:
    drawn = chart(HOUR, [Line("p50", "busy", [1, 2, None, 1])], lambda value: f"{value:g} s")

    assert [(each.x1, each.x2) for each in drawn.segments] == [(12.5, 37.5)]
    assert [len(minute.dots) for minute in drawn.minutes] == [1, 1, 0, 1]
    assert [minute.text for minute in drawn.minutes] == ["p50 1 s", "p50 2 s", "", "p50 1 s"]
    assert drawn.last == 3


def test_the_text_of_a_minute_stays_inside_the_plot() -> None:
    drawn = chart(HOUR, [Line("p50", "busy", [1, 1, 1, 1])], str)

    assert [minute.anchor for minute in drawn.minutes] == ["start", "middle", "middle", "end"]
