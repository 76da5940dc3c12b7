"""The error numbers of MariaDB and MySQL as the SQLSTATEs of PostgreSQL, by which everything else decides. Pure.

The servers have SQLSTATEs of their own, but most errors share one, HY000, and the drivers drop it. A number above 1,900 is only
one server's, or means the same on both.
Source: mariadb.com/kb, "MariaDB Error Codes"; dev.mysql.com, "MySQL Error Message Reference".
"""

from types import MappingProxyType

DRIVERS = ("pymysql", "asyncmy", "MySQLdb")

OUTSIDE_CLUSTER = "08S01"
LEFT_CLUSTER = "08007"
LOCK_WAIT_TIMEOUT = 1205
SAVEPOINT_MISSING = 1305
PROCESS_MISSING = 1227
DUPLICATE = 1062
LOCKED_NOW = 3572
REFUSED_BY_GROUP = 3101

_STATES = MappingProxyType(
    {
        LOCK_WAIT_TIMEOUT: "55P03",  # a row's lock was not free in time: only the statement is undone
        LOCKED_NOW: "55P03",  # MySQL: a row is locked, and the statement has NOWAIT
        1213: "40P01",  # a deadlock, or on Galera a conflict at the commit: the server has undone the whole transaction
        REFUSED_BY_GROUP: "40001",  # MySQL's group replication has committed another transaction's change of a row
        1020: "40001",  # another transaction has changed the row since this one's snapshot (innodb_snapshot_isolation)
        SAVEPOINT_MISSING: "3B001",  # no such savepoint: the server ended its transaction
        DUPLICATE: "23505",
        **dict.fromkeys((3819, 4025), "23514"),  # a CHECK
        **dict.fromkeys((1048, 1364), "23502"),  # NULL, or nothing, in a column that is NOT NULL
        **dict.fromkeys((1216, 1217, 1451, 1452), "23503"),  # a foreign key
        1406: "22001",  # these: a value that the column does not take, which the text quotes
        **dict.fromkeys((1264, 1690), "22003"),
        **dict.fromkeys((1265, 1292, 1366), "22P02"),
        **dict.fromkeys((1300, 3988), "22021"),
        1644: "P0001",  # SIGNAL, in a trigger
        1146: "42P01",  # no such table
        1054: "42703",  # no such column
        1064: "42601",  # a syntax error, whose text quotes the statement: see HIDDEN
        1044: "42501",  # these four: the right is missing
        1142: "42501",
        1143: "42501",
        1227: "42501",
        1045: "28000",  # a wrong password
        1698: "28000",  # an unknown user, or one who needs no password
        **dict.fromkeys((1129, 1130), "28000"),  # a host that is blocked, or not allowed
        **dict.fromkeys((1862, 3118, 4151), "28000"),  # an expired password, a locked account
        1049: "3D000",  # no such database
        **dict.fromkeys((3, 1021, 1026, 1114), "53100"),  # the disk, or the tablespace, is full
        **dict.fromkeys((1037, 1038, 1041, 1135, 1206), "53200"),  # no memory, no thread, no more room for locks
        1040: "53300",  # too many connections
        1203: "53300",
        1226: "53400",
        1047: OUTSIDE_CLUSTER,  # Galera: this node is outside the majority, or has not received the cluster's state yet
        1180: LEFT_CLUSTER,  # Galera: the node left the cluster during the COMMIT, whose result is unknown
        1053: "57P01",  # the server shuts down
        1927: "57P01",  # the connection was killed
        1317: "57014",  # the statement was killed
        **dict.fromkeys((1969, 3024), "57014"),  # max_statement_time, or MySQL's max_execution_time, ran out
        **dict.fromkeys((1290, 1792, 1836), "25006"),  # the server is read-only
        **dict.fromkeys((2002, 2003, 2005), "08001"),  # no connection was made; 2005: the host's name has no address
        **dict.fromkeys((2006, 2013, 2014, 2055, 4031), "08006"),  # the connection is lost
    }
)

NAMING_NO_VALUES = frozenset(
    number for number, state in _STATES.items() if number not in (DUPLICATE, 1064) and state[:2] not in ("22", "P0")
)
"""The errors whose text names tables, columns and constraints only: a duplicate quotes the key."""

_UNDOING = frozenset({1213, 1020, 1206, REFUSED_BY_GROUP})
"""A deadlock; a row that has changed since the snapshot; no room for locks; a conflict in a group. After these the whole
transaction is undone.
Source: row_mysql_handle_errors() in storage/innobase/row/row0mysql.cc.
"""


def is_of_server(error: BaseException | None) -> bool:
    """Whether it is an error of a driver for MariaDB and MySQL that carries an error number."""
    return type(error).__module__.partition(".")[0] in DRIVERS and number_of(error) is not None


def number_of(error: BaseException | None) -> int | None:
    """The error number, the first argument of a driver's error."""
    first = error.args[0] if error is not None and error.args else None
    return first if isinstance(first, int) else None


def undoes_transaction(error: BaseException | None) -> bool:
    """Whether the server has undone the whole transaction with such an error, and not only the statement."""
    return is_of_server(error) and number_of(error) in _UNDOING


def leaves_cluster(error: BaseException | None) -> bool:
    """Whether the server is a node of a Galera cluster that is outside of it, or left it now, and refuses every statement."""
    return is_of_server(error) and state_of(error) in (OUTSIDE_CLUSTER, LEFT_CLUSTER)


def state_of(error: BaseException | None) -> str | None:
    """The SQLSTATE that PostgreSQL has for such an error; "HY000" for a number that is not listed. None for other errors.

    After an error that undoes the whole transaction, SQLAlchemy's rollback to a savepoint fails too, and this second error is
    raised. Then the result is the SQLSTATE of the first one.
    """
    if number_of(error) == SAVEPOINT_MISSING and error is not None:
        before = getattr(error.__context__, "orig", None)
        error = before if undoes_transaction(before) else error
    return _STATES.get(number_of(error) or 0, "HY000") if is_of_server(error) else None
