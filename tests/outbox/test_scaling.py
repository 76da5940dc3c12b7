"""The page on scaling says what was measured and computed, and its simulation keeps the bounds that any such system has."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness import Report
from benchmarks.scaling_curves import CURVES, HERE, PROCESSES, Curve, computed_at, computed_here, points
from benchmarks.scaling_model import Layout, Times, entries_per_second
from benchmarks.scaling_page import charts, differences, scaling_page

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = Report.from_json((DOCS / "performance" / "figures.json").read_text())
AGREEMENT = 0.2

TIMES = Times(
    client_exchange=2000,
    client_entry=15,
    server_exchange=2000,
    server_entry=15,
    locked_row=0.7,
    leased_row=0.1,
    flush=500,
)


def rate(dispatchers: int, databases: int = 1, cores: float = 8, times: Times = TIMES, seed: int = 0) -> float:
    return entries_per_second(times, Layout(dispatchers=dispatchers, databases=databases, cores=cores), seed)


def test_the_published_page_and_charts_are_what_the_figures_make() -> None:
    assert scaling_page(PUBLISHED) == (DOCS / "scaling.md").read_text()
    for file, svg in charts(PUBLISHED):
        assert svg == (DOCS / "performance" / file).read_text()
        ElementTree.fromstring(svg)


def test_the_simulation_agrees_with_what_was_measured() -> None:
    found = differences(PUBLISHED)

    assert list(found) == [1, 2, 4, 8]
    assert {number: share for number, share in found.items() if abs(share) > AGREEMENT} == {}


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.case)
def test_the_published_curves_are_what_the_simulation_computes(curve: Curve) -> None:
    published = dict(points(PUBLISHED, curve.case))

    assert {number: computed_at(PUBLISHED, curve, number) for number in (1, 8, 64)} == pytest.approx(
        {number: published[number] for number in (1, 8, 64)}, rel=0.01
    )


def test_the_published_agreement_is_what_the_simulation_computes() -> None:
    published = dict(points(PUBLISHED, HERE, PROCESSES))

    assert {number: computed_here(PUBLISHED, number) for number in PROCESSES} == pytest.approx(published, rel=0.01)


def test_a_seed_repeats_its_simulation() -> None:
    assert rate(4, seed=1) == rate(4, seed=1) != rate(4, seed=2)


def test_a_dispatcher_is_bounded_by_one_core_of_its_own() -> None:
    slow = replace(TIMES, client_entry=200)

    assert 0.9 < rate(1, cores=64, times=slow) / (1e6 / 200) < 1


def test_a_server_is_bounded_by_its_cores() -> None:
    free = replace(TIMES, server_exchange=0, locked_row=0, leased_row=0, flush=0)

    for cores in (1, 2, 3.5):
        assert rate(16, cores=cores, times=free) / (cores * 1e6 / free.server_entry) == pytest.approx(1, rel=0.05)


def test_databases_share_nothing() -> None:
    assert rate(16, databases=4) / rate(4) == pytest.approx(4, rel=0.05)


def test_one_flush_serves_all_commits_that_wait_for_it() -> None:
    waiting = replace(TIMES, flush=100_000)

    assert rate(8, times=waiting) > 4 * rate(1, times=waiting)


def test_rows_that_others_have_claimed_cost_more_with_each_dispatcher() -> None:
    free = replace(TIMES, locked_row=0, leased_row=0)

    shares = [rate(number) / rate(number, times=free) for number in (1, 16, 64)]

    assert shares[0] > 0.95 > shares[1] > 2 * shares[2]


def test_a_dispatcher_that_gets_few_entries_claims_few_at_once() -> None:
    free = replace(TIMES, locked_row=0, leased_row=0)

    assert rate(64, cores=2, times=free) < 0.7 * rate(4, cores=2, times=free)
