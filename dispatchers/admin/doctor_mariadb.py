"""The rules of `outbox doctor` for the settings of a MariaDB server, and of a node of a Galera cluster. Pure."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dispatchers.admin.doctor_rules import Finding

GALERA_NODES_MIN = 3


def server(settings: Mapping[str, int]) -> Iterator[Finding]:
    """settings: of a MariaDB server, by name; `sync_binlog` only if it writes a binary log."""
    for name, value in settings.items():
        rule = _SERVER[name]
        if value != 1 if rule.least is None else value < rule.least:
            remedy = f"SET GLOBAL {name} = {rule.least or 1}, and in the server's configuration"
            yield Finding(
                check="server", severity="warning", text=f"{name} is {value}", meaning=rule.meaning, remedy=remedy
            )


class _Setting(NamedTuple):
    """least: None if it must be 1."""

    meaning: str
    least: int | None = None


_LOST = "a commit that was answered may be lost"
_SERVER = {
    "innodb_flush_log_at_trx_commit": _Setting(
        f"{_LOST} if the server's machine stops: the client has its answer, and the effect is gone or is sent again"
    ),
    "sync_binlog": _Setting(
        f"{_LOST} on a replica if the server's machine stops: it may lack effects after its promotion"
    ),
    "max_allowed_packet": _Setting("long answers and large batches cannot be stored", 2**22),
    "wait_timeout": _Setting("connections of a pool are closed while they are idle, and requests fail", 60),
}


def galera(settings: Mapping[str, str]) -> Iterator[Finding]:
    """settings: variables and status values of a node, by their names in lower case; those that it does not have are left out."""

    def finding(name: str, meaning: str, remedy: str) -> Finding:
        text = f"{name} is {settings[name]}"
        return Finding(check="galera", severity="warning", text=text, meaning=meaning, remedy=remedy)

    for name, (expected, meaning) in _GALERA.items():
        if settings.get(name, expected) != expected:
            yield finding(name, meaning, f"set {name} to {expected} in the configuration of each node")
    if int(settings.get("wsrep_cluster_size", GALERA_NODES_MIN)) < GALERA_NODES_MIN:
        meaning = "without a majority nothing is enqueued or sent: if a node is lost, the others may refuse statements"
        yield finding("wsrep_cluster_size", meaning, "start the other nodes, or run three")


_GALERA = {
    "innodb_autoinc_lock_mode": ("2", "transactions of other nodes are refused at their commit more often"),
    "wsrep_osu_method": ("TOI", "`outbox db upgrade` changes the tables of one node only"),
    "wsrep_trx_fragment_size": ("0", "the outbox is not tested with streaming replication"),
}
"""The value of each variable that the outbox is tested with, and what follows from another one."""
