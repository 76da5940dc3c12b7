"""Which cases of parametrized tests are run, where running all of them repeats what others show."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest

DATABASES = ("postgresql", "sqlite", "mariadb", "portable")
SESSIONS = ("sync", "async")
ASGI_APPS = ("starlette", "middleware", "fastapi", "fastapi_sync")
MARKED = {"on_mariadb": "mariadb", "in_portable_mode": "portable"}
"""The databases on which a test runs only if its module, or the test itself, has this marker."""
PLATFORMS = (DATABASES, SESSIONS, ASGI_APPS)
"""What a whole test is repeated on. The ASGI apps share one integration; Flask's and Django's are others, and count as values."""


class Case(NamedTuple):
    """platform: its words of PLATFORMS. value: the other parameters."""

    item: pytest.Item
    platform: tuple[str, ...]
    value: str


def one_case_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """One case of each test: the n-th test takes its n-th, so that each kind is met."""
    return [cases[number % len(cases)].item for number, cases in enumerate(by_test(items).values())]


def each_value_once(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of a test's pairs of platform and value only those in which each platform and each value is met, in turn.

    Of a test's four pairs of database and kind of session two, as both kinds run the same code in the same thread. A test with
    the marker `every_value` has each value on each database: the databases treat the values differently.
    """
    return [case.item for turn, cases in _in_modules(items) for case in _chosen(cases, turn)]


def fewer_on_sqlite(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Without the cases on SQLite of two tests in three, where the same case runs on PostgreSQL.

    For tests of what is above the store, which does the same on each database: the third shows that it works on SQLite at all.
    """
    kept = []
    for turn, cases in _in_modules(items):
        found = {(case.platform, case.value) for case in cases}
        for case in cases:
            twin = tuple("postgresql" if word == "sqlite" else word for word in case.platform)
            is_repeated = twin != case.platform and (twin, case.value) in found
            if not is_repeated or turn % 3 == 0:
                kept.append(case.item)
    return kept


def without_case(items: Sequence[pytest.Item]) -> list[str]:
    """Each marker of `MARKED`, with its module, for which no case is left: no test does what it says."""
    marked: dict[tuple[str, str], bool] = {}
    for item in items:
        for marker, kind in MARKED.items():
            if item.get_closest_marker(marker):
                place = item.nodeid.partition("::")[0], marker
                marked[place] = marked.get(place, False) or any(kind in case.platform for case in _cases_of([item]))
    return [f"{marker} of {module}" for (module, marker), is_met in marked.items() if not is_met]


def by_test(items: Sequence[pytest.Item]) -> dict[str, list[Case]]:
    """The cases of each test, in their order."""
    cases: dict[str, list[Case]] = {}
    for case in _cases_of(items):
        cases.setdefault(case.item.nodeid.partition("[")[0], []).append(case)
    return cases


def _in_modules(items: Sequence[pytest.Item]) -> Iterator[tuple[int, list[Case]]]:
    """The cases of each test that has a platform, with its number in its module: a test's new name changes no case."""
    numbers: Counter[str] = Counter()
    for test, cases in by_test(items).items():
        module = test.partition("::")[0]
        yield numbers[module], cases
        numbers[module] += any(case.platform for case in cases)


def _cases_of(items: Iterable[pytest.Item]) -> Iterator[Case]:
    for item in items:
        words = item.nodeid.partition("[")[2].removesuffix("]").split("-")
        known = [[word for word in words if word in platform][:1] for platform in PLATFORMS]
        platform = tuple(word for found in known for word in found)
        for word in platform:
            words.remove(word)
        yield Case(item, platform, "-".join(words))


def _chosen(cases: Sequence[Case], turn: int) -> list[Case]:
    """turn: the test's number, so that different tests get different pairs."""
    everywhere = [case for case in cases if not case.platform]
    rest = [case for case in cases if case.platform]
    if not _is_product(rest):
        return list(cases)
    platforms = _in_turn(list(dict.fromkeys(case.platform for case in rest)), turn)
    values = list(dict.fromkeys(case.value for case in rest))
    if rest[0].item.get_closest_marker("every_value"):
        return everywhere + [case for case in rest if case.platform in platforms]
    pairs = set()
    for number in range(max(len(platforms), len(values))):
        platform = platforms[(turn + _sum_of_digits(number, len(platforms))) % len(platforms)]
        pairs.add((platform, values[number % len(values)]))
    return everywhere + [case for case in rest if (case.platform, case.value) in pairs]


def _is_product(cases: Sequence[Case]) -> bool:
    pairs = {(case.platform, case.value) for case in cases}
    platforms, values = {platform for platform, _ in pairs}, {value for _, value in pairs}
    return len(cases) == len(pairs) == len(platforms) * len(values) > 0


def _in_turn(platforms: list[tuple[str, ...]], turn: int) -> list[tuple[str, ...]]:
    """Of the pairs of database and kind of session a half: each database once, and each kind."""
    databases = {platform[0] for platform in platforms}
    if not databases <= set(DATABASES) or len(platforms) < len(databases) * len(SESSIONS) or len(platforms[0]) < 2:
        return platforms
    return [pair for pair in platforms if (DATABASES.index(pair[0]) + SESSIONS.index(pair[1]) + turn) % 2 == 0]


def _sum_of_digits(number: int, base: int) -> int:
    """Numbers at equal distances have different sums: each platform meets each value of a parameter that varies fastest."""
    total = 0
    while base > 1 and number:
        number, digit = divmod(number, base)
        total += digit
    return total
