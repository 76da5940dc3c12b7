"""Where a database is, for error messages: its name, host and port, and nothing that a password could be part of."""

from sqlalchemy import Engine


def place_of(engine: Engine | None) -> str:
    """As in "the database 'shop' at db.internal:5432"; of SQLite the file. What the URL leaves to the driver is left out."""
    if engine is None:
        return "of an unknown engine"
    url = engine.url
    name = (
        url.database or url.query.get("dbname") or (":memory:" if url.get_backend_name() == "sqlite" else "(default)")
    )
    host, port = url.host or url.query.get("host"), url.port or url.query.get("port")
    hosts = host if isinstance(host, str | None) else ",".join(host)
    where = ":".join(str(part) for part in (hosts, port) if part is not None)
    return " at ".join(filter(None, (repr(name), where)))
