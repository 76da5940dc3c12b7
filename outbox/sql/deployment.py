"""The deployment's name and a check value for each key id, which the dispatchers record in the database.

A process with another name, or with another secret for a key id, does not start. Nothing here shows a secret.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Column, Connection, Subquery, delete, select

from outbox.encryption import Encryption, StoredField, is_sealed_json, key_id_of, open_json
from outbox.errors import CannotDecrypt, ConfigurationError, InvalidValue
from outbox.keys import Keyring, ParentKey, derive_tag, key_fields, secret_check
from outbox.sql.clock import clock
from outbox.sql.connections.places import place_of
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables
from outbox.sql.statements import read_by_index

MAX_SAMPLE = 1000
"""How many unsettled entries a check reads: it finds a problem that affects one in a hundred."""

MAX_COMPARED = 10
"""How many entries' tags a secret is compared with, so that one malformed row decides nothing."""

DATA = "data:"
"""How the `kid` of a data key's check value begins; that of a secret has no colon."""

# --- the environment


def recorded_environment(connection: Connection, tables: Tables) -> str | None:
    """The env that the first dispatcher recorded, or an operator later; None before that."""
    environment: str | None = connection.execute(select(tables.meta.c.environment)).scalar_one_or_none()
    return environment


def require_environment(connection: Connection, tables: Tables, env: str) -> None:
    """Raise `ConfigurationError` if the database belongs to another env. Writes nothing.

    The database identity has the env. Before there is an identity, the unsettled entries show it. Later, an entry of another env
    does not stop a dispatcher, but is not sent.
    """
    recorded = recorded_environment(connection, tables)
    if recorded is not None:
        refuse_other_environment(connection, recorded, env)
    else:
        require_own_entries(connection, tables, env)


def refuse_other_environment(connection: Connection, recorded: str, env: str, *, witness: str = "") -> None:
    if recorded != env:
        place = place_of(connection.engine)
        raise ConfigurationError(
            f"{witness}the database {place} belongs to env {recorded!r}, but this process has env {env!r}: it must not use this"
            f" database (other processes are not affected). Set OUTBOX_ENV to {recorded!r}. Or, if this is a copy of"
            f" {recorded!r}'s database, or if {recorded!r} has a new name, run `outbox resume --after-restore"
            f' --adopt-from {recorded} --env {env} --reason "..."`'
        )


def require_own_entries(connection: Connection, tables: Tables, env: str) -> None:
    """Raise `ConfigurationError` if an entry belongs to another env. Reads `MAX_SAMPLE` unsettled entries."""
    read_by_index(connection)
    some = _some_entries(tables, tables.entry.c.env)
    found = select(some.c.env).where(some.c.env != env, some.c.suspended_reason.is_(None)).limit(1)
    foreign: str | None = connection.execute(found).scalar_one_or_none()
    if foreign is not None:
        raise ConfigurationError(
            f"unsettled entries of the database {place_of(connection.engine)} belong to env {foreign!r}, but this process has"
            f" env {env!r}: it would send entries that another deployment may send too. If {foreign!r} is this deployment's name,"
            f" set OUTBOX_ENV to it. If this is a copy of {foreign!r}'s database, run `outbox resume --after-restore`, which"
            " suspends these entries"
        )


def _some_entries(tables: Tables, column: Column[Any]) -> Subquery:
    """A column, the ids and `suspended_reason` of `MAX_SAMPLE` unsettled entries, or of all if there are fewer.

    It takes the first ids: ids are digests, so this is a random sample. A subquery reads each entry by its index, because a join
    might read all entries.
    """
    entry, queue = tables.entry, tables.queue
    first = select(queue.c.id, queue.c.suspended_reason).order_by(queue.c.id).limit(MAX_SAMPLE).subquery()
    of_entry = select(column).where(entry.c.id == first.c.id).scalar_subquery()
    return select(first.c.id, of_entry.label(column.name), first.c.suspended_reason).subquery()


# --- the secrets


def require_usable(connection: Connection, tables: Tables, env: str, keyring: Keyring) -> None:
    """Raise `ConfigurationError` if a dispatcher with this env and key ring cannot work with the database. Writes nothing."""
    require_environment(connection, tables, env)
    require_secrets(connection, tables, keyring)
    kid = unknown_kid(connection, tables, keyring.kids)
    if kid is not None:
        raise ConfigurationError(
            f"unsettled entries were enqueued under kid {kid!r}, which is not in the key ring {keyring.kids}:"
            " keep an old secret until its last entry has settled"
        )


def unknown_kid(connection: Connection, tables: Tables, known: Sequence[str]) -> str | None:
    """A key id of an unsettled entry that is not in `known`, if there is one. Reads `MAX_SAMPLE` entries at most."""
    read_by_index(connection)
    some = _some_entries(tables, tables.entry.c.kid)
    found = select(some.c.kid).where(some.c.kid.not_in(known)).limit(1)
    kid: str | None = connection.execute(found).scalar_one_or_none()
    return kid


def require_secrets(connection: Connection, tables: Tables, keyring: Keyring) -> list[str]:
    """Raise `ConfigurationError` if a kid's secret is not the recorded one; returns the kids without a record. Writes nothing."""
    recorded = _recorded(connection, tables, keyring.kids)
    for name, check in recorded.items():
        if check != secret_check(keyring, name):
            raise _other_secret(name, "differs from the one that the other processes of this database use")
    return [name for name in keyring.kids if name not in recorded]


def require_current_secret(connection: Connection, tables: Tables, keyring: Keyring) -> None:
    """Call `require_secrets`, and raise also if only other kids than the current one are recorded.

    Then no dispatcher has the current secret, and none would start after an entry was enqueued under it.
    """
    missing, current = require_secrets(connection, tables, keyring), keyring.current
    any_kid = select(tables.kid.c.kid).where(~tables.kid.c.kid.startswith(DATA)).limit(1)
    if current in missing and connection.execute(any_kid).one_or_none() is not None:
        raise ConfigurationError(
            f"no dispatcher of this database has recorded a secret of kid {current!r}: none would start after an entry"
            " is enqueued under it. Set OUTBOX_SECRET to the app's; after a rotation start a dispatcher with the new secret first"
        )


def record_secrets(connection: Connection, tables: Tables, keyring: Keyring) -> None:
    """Record the check value of each kid that has none, so that other processes can compare theirs.

    Raises `ConfigurationError`, with nothing written, if a kid's secret is not the recorded one, or not the one from which the
    tag of an unsettled entry was derived.
    """
    missing = require_secrets(connection, tables, keyring)
    if missing:
        _require_derived(connection, tables, keyring, missing)
        _record(connection, tables, {kid: secret_check(keyring, kid) for kid in missing})
        require_secrets(connection, tables, keyring)  # another process may have recorded its value at the same time


# --- the data keys


def require_data_keys(connection: Connection, tables: Tables, encryption: Encryption | None) -> list[str]:
    """Raise `ConfigurationError` if a data key has other bytes than the recorded one. Returns those without a record.

    Writes nothing. A key service has no check value: it unwraps only what it has wrapped.
    """
    if encryption is None or not encryption.checks:
        return []
    recorded = _recorded(connection, tables, [DATA + id for id in encryption.checks])
    for kid, check in recorded.items():
        id = kid.removeprefix(DATA)
        if check != encryption.checks[id]:
            raise _other_data_key(id, "has other bytes than in the other processes of this database")
    return [id for id in encryption.checks if DATA + id not in recorded]


def record_data_keys(connection: Connection, tables: Tables, encryption: Encryption | None) -> None:
    """Record the check value of each data key that has none.

    Raises `ConfigurationError`, with nothing written, if a key has other bytes than the recorded one, or opens none of the
    sampled entries that name it.
    """
    missing = require_data_keys(connection, tables, encryption)
    if encryption is None or not missing:
        return
    _require_opened(connection, tables, encryption, missing)
    _record(connection, tables, {DATA + id: encryption.checks[id] for id in missing})
    require_data_keys(connection, tables, encryption)  # as in `record_secrets`


def _require_opened(connection: Connection, tables: Tables, encryption: Encryption, ids: Collection[str]) -> None:
    """Raise unless, of each data key that sampled entries name, it opens one: single entries may be damaged."""
    read_by_index(connection)
    entry, some = tables.entry, _some_entries(tables, tables.entry.c.schema_version)
    few = connection.execute(select(some.c.id).where(some.c.schema_version == ENCRYPTED_VERSION).limit(MAX_COMPARED))
    among = dialect_of(connection).among(entry.c.id, list(few.scalars()))
    opened, unopened = set[str](), dict[str, UUID]()
    for row in connection.execute(select(entry.c.id, entry.c.env, entry.c.operation, entry.c.payload).where(among)):
        stored = bytes(row.payload)
        id = key_id_of(stored.decode(errors="replace")) if is_sealed_json(stored) else ""
        if id in ids:
            try:
                open_json(encryption, stored, StoredField(row.env, row.id, row.operation, "payload"))
            except CannotDecrypt:
                unopened[id] = row.id
            else:
                opened.add(id)
    for id in sorted(unopened.keys() - opened):
        raise _other_data_key(id, f"has other bytes than the one that encrypted entry {unopened[id]}")


def _other_data_key(id: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"data key {id!r} {what}: they could not read each other's values, so this process stops. Set OUTBOX_DATA_KEYS to the"
        " keys of the other processes, or give a new key a new id. If this key is the right one,"
        f" `outbox keys forget {DATA}{id}` lets the next dispatcher record it"
    )


def _recorded(connection: Connection, tables: Tables, kids: Sequence[str]) -> dict[str, str]:
    """The check values that are recorded, by kid."""
    kid = tables.kid
    found = connection.execute(select(kid.c.kid, kid.c.secret_check).where(kid.c.kid.in_(kids)))
    return {row.kid: row.secret_check for row in found}


def _record(connection: Connection, tables: Tables, checks: Mapping[str, str]) -> None:
    """Record the check values, by kid, except where another process has just recorded one."""
    now = clock()
    rows = [{"kid": kid, "secret_check": checks[kid], "recorded_at": now} for kid in sorted(checks)]
    connection.execute(dialect_of(connection).insert_unless_present(tables.kid).values(rows))


def forget_secret(connection: Connection, tables: Tables, kid: str) -> bool:
    """Delete the check value of `kid`, or of the data key in `data:ID`; the next dispatcher records its own.

    Returns whether there was one.
    """
    return connection.execute(delete(tables.kid).where(tables.kid.c.kid == kid)).rowcount > 0


def _require_derived(connection: Connection, tables: Tables, keyring: Keyring, kids: Collection[str]) -> None:
    """Raise unless, of each kid with sampled entries, one has the tag of this secret: single rows may be malformed."""
    read_by_index(connection)
    among = dialect_of(connection).among
    entry, some = tables.entry, _some_entries(tables, tables.entry.c.kid)
    sampled: dict[str, list[UUID]] = {}
    for id, kid in connection.execute(select(some.c.id, some.c.kid).where(some.c.kid.in_(kids))):
        sampled.setdefault(kid, []).append(id)
    few = [id for ids in sampled.values() for id in ids[:MAX_COMPARED]]
    different: dict[str, UUID] = {}
    derived: set[str] = set()
    columns = ("id", "kid", "tag", "env", "parent", "scope", "source", "operation", "discriminator")
    for row in connection.execute(select(*(entry.c[name] for name in columns)).where(among(entry.c.id, few))):
        try:
            fields = key_fields(
                row.env, ParentKey(row.parent, scope=row.scope, source=row.source), row.operation, row.discriminator
            )
        except InvalidValue:  # the row was written by other software, so it proves nothing about the secret
            continue
        if derive_tag(keyring, row.kid, fields) == bytes(row.tag):
            derived.add(row.kid)
        else:
            different[row.kid] = row.id
    for kid in sorted(different.keys() - derived):
        raise _other_secret(kid, f"differs from the one under which the app enqueued entry {different[kid]}")


def _other_secret(kid: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the secret of kid {kid!r} {what}: keys would differ between attempts, so this process stops. Set"
        " OUTBOX_SECRET to the secret of the other processes, or give a new secret a new kid. If this secret is the right one,"
        f" `outbox keys forget {kid}` lets the next dispatcher record it"
    )
