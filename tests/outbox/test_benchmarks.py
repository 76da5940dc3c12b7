"""The benchmarks' report says what was measured, and one of them runs: so that they work when they are needed."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import enqueue, soak
from benchmarks.goals import PAGES, Goal, judge
from benchmarks.harness import Report, Series, running_server
from benchmarks.report import charts, merged, performance_page
from dispatchers.dashboard.pages import VIEWS

DOCS = Path(__file__).parents[2] / "docs"
TUNED, PEER = "outbox, 1000 concurrent", "PGQueuer"
SAMPLE = Report(
    {"cores": "2"},
    [
        Series("drain", "", TUNED, "per_second", [10_000.0, 40_000.0, 30_000.0]),
        Series("drain", "", PEER, "per_second", [10_000.0, 10_000.0, 5_000.0]),
        Series("latency", "", "psycopg", "p50_ms", [2.0, 2.5, 9.0]),
    ],
    {"drain": "2026-11-22, at load 0.1", "latency": "2026-11-21"},
    ["PGQueuer: deletes a finished job."],
)


def test_a_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    (verdict,) = judge(SAMPLE, [Goal("drain", TUNED, "per_second", PEER, least=3)])

    assert (verdict.value, verdict.is_met) == (4.0, True)  # of the medians it would be 3


@pytest.mark.parametrize(
    ("goal", "word"),
    [
        (Goal("latency", "psycopg", "p50_ms", most=2.5), "met"),
        (Goal("latency", "psycopg", "p50_ms", most=2.4), "MISSED"),
        (Goal("drain", TUNED, "per_second", PEER, least=4.1), "MISSED"),
    ],
)
def test_a_goal_that_is_not_reached_is_missed(goal: Goal, word: str) -> None:
    assert [each.word for each in judge(SAMPLE, [goal])] == [word]


def test_a_goal_beside_a_peer_that_did_not_run_has_no_verdict() -> None:
    assert judge(SAMPLE, [Goal("drain", TUNED, "per_second", "graphile-worker", least=1)]) == []


def test_the_page_has_the_figures_the_verdicts_and_what_differs() -> None:
    page = performance_page(Report.from_json(SAMPLE.to_json()))

    assert "Measured on 2026-11-22, at load 0.1." in page
    assert "| outbox, 1000 concurrent | 30,000 ±50% |" in page
    assert "| outbox, 1000 concurrent, a second | PGQueuer | 4.00 | ≥ 2.5 | met |" in page
    assert "| psycopg, p50, ms |  | 2.50 | ≤ 2.5 | met |" in page
    assert "- PGQueuer: deletes a finished job." in page


def test_the_published_page_is_what_its_figures_make() -> None:
    report = Report.from_json((DOCS / "performance" / "figures.json").read_text())

    assert performance_page(report) == (DOCS / "performance.md").read_text()


def test_each_chart_is_svg_and_on_the_page() -> None:
    page = performance_page(SAMPLE)
    found = list(charts(SAMPLE, "drain"))

    assert [file for file, _, _ in found] == ["drain-per-second.svg"]
    for file, title, svg in found:
        bars = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}rect")
        assert len(bars) == 1 + 2  # the background, and one for each side
        assert f"![{title}](performance/{file})" in page


def test_a_part_that_was_measured_again_replaces_its_old_figures() -> None:
    new = Report({}, [Series("drain", "", TUNED, "per_second", [50_000.0])], {"drain": "2026-11-23"}, [])

    report = merged(SAMPLE, new)

    assert [(each.part, each.side) for each in report.series] == [("latency", "psycopg"), ("drain", TUNED)]
    assert report.conditions == {"drain": "2026-11-23", "latency": "2026-11-21"}


def test_every_page_of_the_dashboards_navigation_has_a_goal() -> None:
    assert {view.title.lower() for view in VIEWS if view.in_navigation} <= set(PAGES)


def test_the_smallest_part_measures_all_that_its_goals_need() -> None:
    with running_server() as server:
        report = Report({}, list(enqueue.measure(server, 0.01)), {}, [])

    assert len([each for each in judge(report) if each.goal.part == "enqueue"]) == 4
    assert all(value > 0 for each in report.series for value in each.values)


# --- the soak


def test_the_slope_of_memory_ignores_a_single_leap() -> None:
    flat = [(hour / 10, 100.0) for hour in range(20)]
    leap = [*flat[:10], (1.0, 140.0), *flat[11:]]
    grown = [(hour, megabytes + hour) for hour, megabytes in leap]

    assert soak.slope(leap) == 0
    assert soak.slope(grown) == pytest.approx(1.0)


def test_a_soak_names_memory_that_grows_after_the_warm_up() -> None:
    warm = [(hour / 10, 100.0 + min(hour, 5)) for hour in range(30)]
    growing = [(hour / 10, 100.0 + hour) for hour in range(30)]

    assert list(soak.memory_faults({"app": warm}, 1.0)) == []
    assert list(soak.memory_faults({"app": growing}, 1.0)) == [
        "the memory of the app grows by more than 0.1 MB an hour"
    ]


def test_a_soak_of_few_orders_judges_no_memory() -> None:
    flat = [(hour / 10, 100.0) for hour in range(30)]

    (fault,) = soak.memory_faults({"app": flat}, 2.5)
    assert fault == "too short to judge the memory of the app: the warm-up takes 2.50 hours of the run"


def test_a_soak_names_effects_that_were_lost_or_doubled() -> None:
    service, orders = soak.Service(100), [4, 5, 51]  # the service refuses 51
    for number in orders:
        service.contacts[number] = service.mails[number] = 7

    assert list(soak.effect_faults(service, orders)) == []
    service.mails[4], service.contacts[5] = 0, soak.FAILED
    service.doubled.append(4)
    assert list(soak.effect_faults(service, orders)) == [
        "effects that were lost, of the orders [5, 4]",
        "effects under two keys, of the orders [4]",
    ]
