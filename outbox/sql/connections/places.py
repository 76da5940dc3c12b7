"""The address of a database for error messages: name, host and port, without any part that may contain a password."""

from sqlalchemy import Engine

from outbox.sql.dialect import dialect_of


def place_of(engine: Engine | None) -> str:
    """The address as in "the database 'shop' at db.internal:5432"; for SQLite the file. Parts that the URL lacks are left out."""
    if engine is None:
        return "of an unknown engine"
    url = engine.url
    name = url.database or url.query.get("dbname") or (":memory:" if dialect_of(engine).is_file else "(default)")
    host, port = url.host or url.query.get("host"), url.port or url.query.get("port")
    hosts = host if isinstance(host, str | None) else ",".join(host)
    where = ":".join(str(part) for part in (hosts, port) if part is not None)
    return " at ".join(filter(None, (repr(name), where)))
