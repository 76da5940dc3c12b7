"""Which cases of parametrized tests are run, where running all of them repeats what others show."""

from collections.abc import Sequence

import pytest

DATABASES = ("postgresql", "sqlite")
SESSIONS = ("sync", "async")


def one_case_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """One case of each test: the n-th test takes its n-th, so that each kind is met."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(_test(item), []).append(item)
    return [of_test[number % len(of_test)] for number, of_test in enumerate(cases.values())]


def two_of_four(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of a test's four pairs of database and kind of session only two: each database and each kind once, in turn.

    Both kinds of session run the same code in the same thread; `--every-case` runs all four.
    """
    pairs: dict[str, set[tuple[str, str]]] = {}
    for item in items:
        if (pair := _pair(item)) is not None:
            pairs.setdefault(_test(item), set()).add(pair)
    number_of = {test: number for number, test in enumerate(pairs)}

    def is_in_turn(item: pytest.Item) -> bool:
        test, pair = _test(item), _pair(item)
        if pair is None or len(pairs[test]) < len(DATABASES) * len(SESSIONS):
            return True
        return (DATABASES.index(pair[0]) + SESSIONS.index(pair[1]) + number_of[test]) % 2 == 0

    return list(filter(is_in_turn, items))


def _pair(item: pytest.Item) -> tuple[str, str] | None:
    """The case's database and kind of session, if it has both."""
    words = item.nodeid.partition("[")[2].rstrip("]").split("-")
    databases = [word for word in words if word in DATABASES]
    sessions = [word for word in words if word in SESSIONS]
    return (databases[0], sessions[0]) if databases and sessions else None


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
