"""Fixtures: databases with nothing in them. A test module gets them by `pytest_plugins = ["support.blank_databases"]`."""

from collections.abc import Iterator

import pytest
from sqlalchemy import make_url

from support.migrations import Database, blank_database


@pytest.fixture
def blank_postgresql(server_url) -> Iterator[Database]:
    with blank_database(server_url) as database:
        yield database


@pytest.fixture
def blank_sqlite(tmp_path) -> Database:
    return Database(make_url(f"sqlite:///{tmp_path / 'outbox.db'}"))


@pytest.fixture(params=["postgresql", "sqlite"])
def blank(request) -> Database:
    """A database with nothing in it: the test runs on each kind."""
    return request.getfixturevalue(f"blank_{request.param}")


@pytest.fixture
def another_blank(blank, request, tmp_path) -> Iterator[Database]:
    """One more of the same kind, to be made in another way and compared."""
    if blank.is_postgresql:
        with blank_database(request.getfixturevalue("server_url")) as database:
            yield database
    else:
        yield Database(make_url(f"sqlite:///{tmp_path / 'another.db'}"))
