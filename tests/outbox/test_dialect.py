"""What differs between databases is asked of a `Dialect`, and each database has one."""

import ast
from pathlib import Path

import pytest
import sqlalchemy as sa

import dispatchers
import outbox
from outbox.errors import ConfigurationError
from outbox.sql.clock import clock
from outbox.sql.dialect import SUPPORTED, dialect_named, dialect_of

READERS = {"outbox/sql/dialect.py", "outbox/migrations/first_tables.py"}
"""The second is frozen: it keeps what the first revision made, whatever a dialect says later."""


def reads_name(node: ast.AST) -> bool:
    """Whether it is `….dialect.name` or `….get_backend_name()`."""
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    of_dialect = isinstance(owner, ast.Attribute) and owner.attr == "dialect"
    return node.attr == "get_backend_name" or (node.attr == "name" and of_dialect)


def test_only_the_dialects_read_the_name_of_a_database() -> None:
    packages = [Path(str(package.__file__)).parent for package in (outbox, dispatchers)]
    paths = [path for package in packages for path in package.rglob("*.py")]

    found = {
        path.relative_to(packages[0].parent).as_posix()
        for path in paths
        if any(map(reads_name, ast.walk(ast.parse(path.read_text()))))
    }

    assert found == READERS


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_database_has_a_dialect_with_all_that_has_no_default(name: str) -> None:
    dialect = dialect_named(name)

    assert dialect.name == name
    for text in (dialect.clock, dialect.later, dialect.json_member, dialect.filled_id(4, "0")):
        assert text.format("first", "second")


def test_another_database_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="not on 'oracle'"):
        dialect_named("oracle")


def test_a_statement_without_a_database_is_shown_in_postgresqls_text() -> None:
    assert "clock_timestamp()" in str(sa.select(clock()))


def test_an_engine_and_its_connections_have_one_dialect() -> None:
    engine = sa.create_engine("sqlite://")

    with engine.connect() as connection:
        assert dialect_of(connection) is dialect_of(engine) is dialect_named("sqlite")
