"""The settings that a MySQL server and session must have. The server is asked once for each pooled connection."""

from typing import Any

from sqlalchemy import Connection, LargeBinary, bindparam, text

from outbox.errors import ConfigurationError
from outbox.sql.connections.servers import banner_of, refuse_other_server
from outbox.sql.mariadb.settings import Server

_SETTINGS = text(
    "SELECT version(), @@sql_mode, @@innodb_rollback_on_timeout, CHARSET(:bytes),"
    " (SELECT COUNT(*) = 2 FROM performance_schema.session_variables"  # @@binlog_format is deprecated: drivers would print that
    " WHERE (variable_name, variable_value) IN (('log_bin', 'ON'), ('binlog_format', 'STATEMENT'))),"
    " @@character_set_client, @@character_set_connection, @@character_set_results"
).bindparams(bindparam("bytes", b"", type_=LargeBinary))

_CLUSTER = text("SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode')")


def require_one_writer(connection: Connection) -> None:
    """Raise `ConfigurationError` for a server of another kind, and for one whose transactions another server may conflict with:
    the locks of one are not those of the other.
    """
    pooled: Any = connection.connection
    refuse_other_server(banner_of(pooled.driver_connection))
    found = {name.lower(): value for name, value in connection.execute(_CLUSTER)}
    if found.get("wsrep_on") == "ON":
        raise ConfigurationError(
            "the server is a node of Percona XtraDB Cluster, whose nodes do not have each other's locks, and the outbox was made"
            " for MariaDB's Galera only: use that, or one MySQL server that writes"
        )
    if found.get("group_replication_single_primary_mode") == "OFF":
        raise ConfigurationError(
            "group replication is in multi-primary mode, in which the servers do not have each other's locks: set"
            " group_replication_single_primary_mode to ON"
        )


MYSQL = Server("MySQL", (8, 4), _SETTINGS, text("SELECT @@transaction_isolation"), require_one_writer)
