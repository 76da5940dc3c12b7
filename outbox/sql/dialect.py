"""The databases that the outbox runs on."""

from sqlalchemy.dialects import registry

from outbox.errors import ConfigurationError
from outbox.sql.servers import DIALECTS, refused

SUPPORTED = ("postgresql", "sqlite", "mariadb", "portable")
SUPPORTED_NAMES = "postgresql, sqlite and mariadb"

for _name, _class in (
    ("portable", "PortablePsycopg"),
    ("portable.psycopg", "PortablePsycopg"),
    ("portable.psycopg_async", "PortableAsyncPsycopg"),
    ("portable.asyncpg", "PortableAsyncpg"),
):
    registry.register(_name, "outbox.sql.portable", _class)


def not_supported(database: str) -> ConfigurationError:
    if database in DIALECTS:
        return refused(DIALECTS[database])
    hint = (
        ": MySQL, TiDB and Vitess have no INSERT ... RETURNING; write mariadb+pymysql://... in the URL of a MariaDB"
        if database == "mysql"
        else ""
    )
    return ConfigurationError(f"the outbox runs on {SUPPORTED_NAMES}, not on {database!r}{hint}")
