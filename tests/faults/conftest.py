"""After each test here `outbox verify` must find nothing: whatever was killed, cut off or upgraded."""

from collections.abc import Iterator

import pytest
from support.database import Database
from support.verify import broken_rules

DATABASES = ("database", "postgresql", "sqlite", "mariadb", "portable")


@pytest.fixture(autouse=True)
def verified(request: pytest.FixtureRequest) -> Iterator[None]:
    """Requested before the test's databases are gone, because it has asked for them."""
    found = [request.getfixturevalue(name) for name in DATABASES if name in request.fixturenames]
    yield
    for database in found:
        if isinstance(database, Database):
            assert broken_rules(database) == {}
