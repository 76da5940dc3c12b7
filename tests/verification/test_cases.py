"""Which cases of a test are run: each platform, and each value, and all pairs of those that the databases treat differently."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.cases import ASGI_APPS, DATABASES, SESSIONS, each_value_once, fewer_on_sqlite, without_case
from support.docs_pages import ROOT
from support.event_loops import LOOP, loops_of


@dataclass
class Item:
    """As much of a pytest.Item as the choice needs."""

    nodeid: str
    markers: Collection[str] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def cases(test: str, *axes: Collection[str], markers: Collection[str] = ()) -> list[Any]:
    test = test if "::" in test else f"tests/test_shop.py::{test}"
    return [Item(f"{test}[{'-'.join(words)}]", markers) for words in product(*axes)]


def words_of(chosen: list[Any]) -> Iterator[list[str]]:
    return (item.nodeid.partition("[")[2].rstrip("]").split("-") for item in chosen)


EVERYWHERE = DATABASES[:2]
"""Those that each test of `database` runs on."""


@pytest.mark.parametrize("values", [3, 2, 8])
def test_each_value_runs_once_and_each_database_about_equally_often(values: int) -> None:
    items = cases("test_it", EVERYWHERE, [f"value{n}" for n in range(values)])

    chosen = list(words_of(each_value_once(items)))

    assert [value for _, value in sorted(chosen, key=lambda words: words[1])] == [f"value{n}" for n in range(values)]
    on_sqlite = sum(database == "sqlite" for database, _ in chosen)
    assert on_sqlite in (values // 2, values - values // 2)


def test_each_database_meets_each_value_of_every_parameter() -> None:
    items = cases("test_it", EVERYWHERE, ["one", "two", "three", "four"], ["yes", "no"])

    chosen = list(words_of(each_value_once(items)))

    assert len(chosen) == 8
    assert {(database, flag) for database, _, flag in chosen} == set(product(EVERYWHERE, ["yes", "no"]))


def test_of_three_databases_each_is_met_and_each_value_once() -> None:
    items = cases("test_it", DATABASES, [f"value{n}" for n in range(6)])

    chosen = list(words_of(each_value_once(items)))

    assert sorted(value for _, value in chosen) == [f"value{n}" for n in range(6)]
    assert {database for database, _ in chosen} == set(DATABASES)


def test_where_the_databases_treat_the_values_differently_all_pairs_run() -> None:
    items = cases("test_it", DATABASES, ["one", "two"], markers=["every_value"])

    assert each_value_once(items) == items


def test_different_tests_get_different_databases_and_kinds_of_session() -> None:
    items = [item for number in range(20) for item in cases(f"test_{number}", DATABASES, SESSIONS)]

    chosen = each_value_once(items)

    assert len(chosen) == len(items) / 2
    assert {tuple(words) for words in words_of(chosen)} == set(product(DATABASES, SESSIONS))
    for number in range(20):
        of_test = list(words_of([item for item in chosen if f"::test_{number}[" in item.nodeid]))
        assert ({words[0] for words in of_test}, {words[1] for words in of_test}) == (set(DATABASES), set(SESSIONS))


def test_every_value_meets_the_integrations_that_share_no_code() -> None:
    values = ["one", "two", "three", "four", "five"]
    items = cases("test_it", [*ASGI_APPS, "flask", "django"], values)

    chosen = list(words_of(each_value_once(items)))

    assert {tuple(words) for words in chosen} >= set(product(["flask", "django"], values))
    on_asgi = [words for words in chosen if words[0] in ASGI_APPS]
    assert sorted(value for _, value in on_asgi) == sorted(values)
    assert {app for app, _ in on_asgi} == set(ASGI_APPS)


def test_cases_that_are_no_product_and_tests_without_a_database_run_whole() -> None:
    items = [*cases("test_it", DATABASES, ["one", "two"])[1:], *cases("test_other", ["one", "two"], ["yes", "no"])]

    assert each_value_once(items) == items
    assert each_value_once(cases("test_both", DATABASES)) == cases("test_both", DATABASES)


def test_above_the_store_one_test_in_three_runs_on_sqlite_too() -> None:
    items = [item for number in range(60) for item in cases(f"test_{number}", EVERYWHERE)]

    chosen = list(words_of(fewer_on_sqlite(items)))

    assert chosen.count(["postgresql"]) == 60
    assert 12 <= chosen.count(["sqlite"]) <= 28


def test_what_runs_on_sqlite_only_is_not_left_out() -> None:
    alternating = [item for item in cases("test_it", EVERYWHERE, ["one", "two"]) if "postgresql-two" not in item.nodeid]

    chosen = list(words_of(fewer_on_sqlite(alternating)))

    assert ["sqlite", "two"] in chosen
    assert ["postgresql", "one"] in chosen


def test_a_marker_that_no_case_of_its_module_meets_is_named() -> None:
    met = cases("tests/test_store.py::test_met", DATABASES[:3], markers=["on_mariadb"])
    beside = cases("tests/test_store.py::test_on_postgresql_only", ["given"], markers=["on_mariadb"])
    missed = cases("tests/test_plans.py::test_missed", DATABASES[:2], markers=["on_mariadb", "in_portable_mode"])

    assert without_case([*met, *beside]) == []
    assert without_case([*met, *missed]) == [
        "on_mariadb of tests/test_plans.py",
        "in_portable_mode of tests/test_plans.py",
    ]


def test_a_renamed_test_runs_the_same_cases() -> None:
    def chosen(name: str) -> list[list[str]]:
        items = [item for test in ("test_first", name, "test_last") for item in cases(test, DATABASES, "abc")]
        return list(words_of(each_value_once(items)))

    assert chosen("test_before") == chosen("test_after")


# --- the event loop


def loops_by_test(items: list[Any], *, loops: str = "mixed") -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for item, loop in loops_of(items, loops):
        found.setdefault(item.nodeid.partition("[")[0], []).append(loop)
    return list(found.values())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_half_of_the_tests_run_on_each_loop_and_a_tests_cases_on_both(count: int) -> None:
    tests = [f"tests/test_{module}.py::test_{n}" for module in "abc" for n in range(10)]
    values = [f"value{n}" for n in range(count)]
    items = [item for test in tests for item in each_value_once(cases(test, EVERYWHERE, values))]

    found = loops_by_test(items)

    on_uvloop = sum(loops.count("uvloop") for loops in found)
    assert on_uvloop == len(items) / 2
    assert all(set(loops) == {"asyncio", "uvloop"} for loops in found if len(loops) > 1)
    assert {loops[0] for loops in found} == {"asyncio", "uvloop"}


def test_a_rename_changes_no_loop() -> None:
    before = [*cases("test_first", EVERYWHERE), *cases("test_second", EVERYWHERE)]
    after = [*cases("test_another_name", EVERYWHERE), *cases("test_second", EVERYWHERE)]

    assert loops_by_test(before) == loops_by_test(after)


def test_a_run_on_the_other_loop_and_a_plain_one_cover_both() -> None:
    items = [*cases("test_first", EVERYWHERE), *cases("test_second", EVERYWHERE)]

    for plain, other in zip(loops_by_test(items), loops_by_test(items, loops="other"), strict=True):
        assert all({*both} == {"asyncio", "uvloop"} for both in zip(plain, other, strict=True))


def test_an_option_puts_all_tests_on_one_loop() -> None:
    assert loops_by_test(cases("test_it", EVERYWHERE), loops="uvloop") == [["uvloop", "uvloop"]]


@pytest.mark.parametrize("case", range(2))
def test_a_test_runs_on_the_loop_that_was_chosen_for_it(case: int, request: pytest.FixtureRequest) -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    assert type(loop).__module__.partition(".")[0] == request.node.stash[LOOP]


def test_a_run_of_what_failed_last_asks_for_no_marker(tmp_path: Path) -> None:
    """`dev.py test` repeats the few that failed: their markers' other cases are not collected."""
    module = "tests/outbox/requests/test_leases_races.py"
    failed = tmp_path / "v" / "cache" / "lastfailed"
    failed.parent.mkdir(parents=True)
    failed.write_text(
        json.dumps({f"{module}::test_however_many_own_a_request_in_turn_it_is_answered_once[sqlite]": True})
    )

    options = ("-n0", "-q", "--last-failed", "--collect-only", "-o", f"cache_dir={tmp_path}")
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout
    assert "1 test collected" in done.stdout
