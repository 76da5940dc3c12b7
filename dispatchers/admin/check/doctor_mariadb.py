"""The rules of `outbox doctor` for the settings of a MariaDB server, and of a node of a Galera cluster. Pure."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from dispatchers.admin.check.doctor_rules import Finding

GALERA_NODES_MIN = 3
MAX_HISTORY = 100_000


def server(settings: Mapping[str, int]) -> Iterator[Finding]:
    """settings: of a MariaDB server, by name; `sync_binlog` only if it writes a binary log."""
    for name, value in settings.items():
        rule = _SERVER[name]
        if value != 1 if rule.least is None else value < rule.least:
            remedy = f"SET GLOBAL {name} = {rule.least or 1}, and in the server's configuration"
            yield Finding(
                check="server", severity="warning", text=f"{name} is {value}", meaning=rule.meaning, remedy=remedy
            )


def purge(history: int) -> Iterator[Finding]:
    """history: how many transactions are not purged yet."""
    if history > MAX_HISTORY:
        yield Finding(
            check="vacuum",
            severity="warning",
            text=f"{history} transactions are not purged yet (Innodb_history_list_length)",
            meaning="the tables grow, and claims become slow, because they read what is deleted",
            remedy="see the check `horizon`; else raise innodb_purge_threads, or slow down the writers of this server",
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
    """settings: variables, status values and options of the provider of a node, by their names in lower case; those that it does
    not have are left out.
    """
    for name, rule in _GALERA.items():
        if settings.get(name, rule.expected) != rule.expected:
            text = f"{name} is {settings[name]}"
            remedy = rule.remedy or f"set {name} to {rule.expected} in the configuration of each node"
            yield Finding(check="galera", severity=rule.severity, text=text, meaning=rule.meaning, remedy=remedy)
    if int(settings.get("wsrep_cluster_size", GALERA_NODES_MIN)) < GALERA_NODES_MIN:
        text = f"wsrep_cluster_size is {settings['wsrep_cluster_size']}"
        meaning = "without a majority nothing is enqueued or sent: if a node is lost, the others may refuse statements"
        remedy = "start the other nodes, or run three"
        yield Finding(check="galera", severity="warning", text=text, meaning=meaning, remedy=remedy)


def options(text: str) -> dict[str, str]:
    """The options of Galera's provider by name. A switch that is off is "false", however it was written."""
    parts = [option.partition("=") for option in text.split(";")]
    values = {name.strip(): value.strip().lower() for name, _, value in parts}
    return {name: "false" if value in ("0", "no", "off") else value for name, value in values.items()}


class _Rule(NamedTuple):
    """expected: the value that the outbox is tested with. remedy: if it is no setting."""

    expected: str
    meaning: str
    remedy: str | None = None
    severity: Literal["error", "warning"] = "warning"


_TWICE = "both parts of a divided cluster send, and an effect may happen twice where the service keeps no keys"
_GALERA = {
    "wsrep_on": _Rule("ON", "what is written here is not copied to the other nodes", severity="error"),
    "wsrep_cluster_status": _Rule(
        "Primary",
        "the node is outside the cluster's majority: it refuses statements, and what it shows may be old",
        "let the node reach the others, and use another one meanwhile",
        severity="error",
    ),
    "wsrep_local_state_comment": _Rule(
        "Synced",
        "the node may be far behind the others, and while another node copies it, its commits may stop",
        "use another node until it is Synced; SET GLOBAL wsrep_desync = OFF if an operator has set it",
    ),
    "pc.ignore_sb": _Rule("false", _TWICE, severity="error"),
    "pc.ignore_quorum": _Rule("false", _TWICE, severity="error"),
    "wsrep_dirty_reads": _Rule("OFF", "outside the cluster's majority, old rows are shown instead of an error"),
    "read_only": _Rule("OFF", "dispatchers and apps cannot write here, unless their user has READ_ONLY ADMIN"),
    "binlog_format": _Rule("ROW", "Galera copies rows only: statements are refused, or change nothing elsewhere"),
    "innodb_autoinc_lock_mode": _Rule("2", "transactions of other nodes are refused at their commit more often"),
    "wsrep_osu_method": _Rule("TOI", "`outbox db upgrade` changes the tables of one node only"),
    "wsrep_trx_fragment_size": _Rule("0", "with streaming replication the nodes may wait for each other without end"),
}
