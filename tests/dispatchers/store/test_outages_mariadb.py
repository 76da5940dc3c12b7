"""What a dispatcher makes of a MariaDB that it cannot reach, or that does not admit its user: it waits, or says why not."""

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import claim, put, quota
from support.mariadb_server import with_driver

import outbox
from dispatchers.store.connections.outage_log import cause_of, ends_by_itself, is_outage
from dispatchers.store.database import DatabaseStore

DRIVERS = ("pymysql", "mysqldb")
NO_CONNECTION = ("no connection to the server", "the connection is refused", "the host's name", "the server's socket")


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "where",
    [
        {"host": "127.0.0.1", "port": 1},
        {"host": "absent-host.invalid"},
        {"query": {"unix_socket": "/absent-socket"}},
    ],
    ids=["refused", "dns", "socket"],
)
def test_a_server_that_is_not_there_yet_is_waited_for(driver: str, where: dict[str, object]) -> None:
    url = with_driver(sa.URL.create("mariadb", "root", **where), driver)  # type: ignore[arg-type]

    error = refusal(url)

    assert cause_of(error).startswith(NO_CONNECTION)
    assert is_outage(error)
    assert ends_by_itself(error)


@pytest.mark.owner
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "option",
    [
        pytest.param(
            "IDENTIFIED VIA unix_socket", marks=pytest.mark.differs("mysql", "a plugin gives it, if it is installed")
        ),
        "ACCOUNT LOCK",
    ],
)
def test_a_user_that_the_server_does_not_admit_is_named_as_the_cause(
    mariadb: Database, driver: str, option: str
) -> None:
    name = f"{mariadb.url.database}_refused"
    with mariadb.observer.connect() as connection:
        connection.exec_driver_sql(f"CREATE USER {name}@'%%' {option}")
        connection.exec_driver_sql(f"CREATE USER {name}@localhost {option}")
        try:
            error = refusal(with_driver(mariadb.url.set(username=name), driver))
        finally:
            connection.exec_driver_sql(f"DROP USER {name}@'%%', {name}@localhost")

    assert cause_of(error).startswith("the server does not admit this user")
    assert is_outage(error)
    assert not ends_by_itself(error)


@pytest.mark.differs("mysql", "it always waits for a row, for a second at least")
def test_an_error_at_a_commit_is_not_said_to_be_of_a_cluster_alone(mariadb: Database, ob: outbox.Outbox) -> None:
    """A server without a cluster reports one if a claim meets a locked row while the session waits for no lock."""
    put(mariadb, ob)
    impatient = "SET innodb_lock_wait_timeout = 0"
    store = DatabaseStore(
        mariadb.new_engine(connect_args={"init_command": impatient}, isolation_level="READ COMMITTED"), ob.configuration
    )

    with mariadb.engine.begin() as other:
        other.execute(sa.select(TABLES.queue).with_for_update())
        with pytest.raises(sa.exc.OperationalError) as raised:
            claim(store, quota())

    assert cause_of(raised.value).startswith("the server had an error during a COMMIT")


def refusal(url: sa.URL) -> Exception:
    if url.get_driver_name() == "mysqldb":
        pytest.importorskip("MySQLdb", reason="mysqlclient is not installed")
    with pytest.raises(sa.exc.DBAPIError) as raised:
        sa.create_engine(url, poolclass=sa.NullPool).connect()
    return raised.value
