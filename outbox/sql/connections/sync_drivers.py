"""The synchronous driver for the URL of an asyncio driver: a command of the shell and a migration have no event loop."""

from sqlalchemy import URL

SYNC_DRIVERS = {
    "sqlite+aiosqlite": "sqlite",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "mariadb+asyncmy": "mariadb+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mysql+aiomysql": "mysql+pymysql",
    "portable+psycopg_async": "portable+psycopg",
    "portable+asyncpg": "portable+psycopg",
}
ASYNCPG_NAMES = {"ssl": "sslmode", "timeout": "connect_timeout"}
"""What asyncpg calls otherwise than psycopg, in a URL's query."""

ASYNCPG_ONLY = (
    *("command_timeout", "statement_cache_size", "max_cached_statement_lifetime", "max_cacheable_statement_size"),
    *("prepared_statement_cache_size", "prepared_statement_name_func", "direct_tls"),
)


def synchronous(url: URL) -> URL:
    """The database's URL with a synchronous driver, for known asyncio drivers."""
    if url.drivername not in SYNC_DRIVERS:
        return url
    if url.drivername.endswith("+asyncpg"):
        query = {ASYNCPG_NAMES.get(name, name): value for name, value in url.query.items() if name not in ASYNCPG_ONLY}
        url = url.set(query=query)
    return url.set(drivername=SYNC_DRIVERS[url.drivername])
