"""Asks again for an entry that failed or was cancelled: a new entry with a new child key, and all else of the first one.

The new entry's discriminator is `again:` and the first one's id. So each finds the other by the keys alone, and a second request
for the same entry finds the new one. If the new entry fails too, asking again for it makes a third one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row, func, select

from dispatchers.admin.decide.audit import write_audit
from dispatchers.admin.decide.decisions import check_decision
from dispatchers.admin.decide.effects import record_events, refused
from dispatchers.admin.decide.safe import Offer
from dispatchers.admin.read.entries import no_entry
from dispatchers.store.records.queries import unreadable
from outbox.configuration import Configuration
from outbox.encryption import StoredField, open_json, seal_json
from outbox.errors import ConfigurationError, EncryptionError
from outbox.keys import KeyFields, ParentKey, derive_tag, entry_id, key_fields
from outbox.sessions.entry_rows import NewEntry, insert_entries
from outbox.sql.deployment import require_current_secret
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables

AGAIN = "again:"
ASKED_ALREADY = "it was asked for again already"
NO_SECRET = "the new key is derived from the app's secret, which this process does not have"
OTHER_SECRET = "the new key is derived from the app's secret, and this process has another one"
UNCOMPARED = "this process's role in the database may not compare its secret with the app's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The new entry's id. is_new: whether this call made it; False if it was asked for before."""

    id: UUID
    is_new: bool


class Asked(NamedTuple):
    """What `ask_again` did, by the first entry's id. is_new: whether its new one had not been there.

    unopened: why a payload could not be decrypted for the new one, or not encrypted.
    """

    is_new: Mapping[UUID, bool]
    unopened: Mapping[UUID, EncryptionError]


def again(connection: Connection, configuration: Configuration, entry_id: UUID, *, actor: str, reason: str) -> Again:
    """Enqueue a failed or cancelled entry once more, due at once, under a new child key. Its effect is a new one for the service.

    configuration: the app's, whose current secret derives the key. An entry with an ordering key goes to the end of its group.
    Asked twice for the same entry, it makes one new entry.
    Raises `EntryNotFound`, `InvalidValue`, `ConfigurationError` for another secret than the database's, `EncryptionError` if its
    payload cannot be decrypted here, and `DecisionRefused` unless the entry is failed or cancelled.
    """
    check_decision(actor, reason)
    tables = configuration.tables
    require_current_secret(connection, tables, configuration.keyring)
    row = connection.execute(ended(tables).where(tables.entry.c.id == entry_id)).one_or_none()
    if row is None:
        raise no_entry(entry_id)
    if (why := _why_not(row, configuration.env)) is not None:
        raise refused(row, why)
    asked = ask_again(connection, configuration, [row], actor, reason)
    if entry_id in asked.unopened:
        raise asked.unopened[entry_id]
    is_new = asked.is_new.get(entry_id)
    if is_new is None:
        raise no_entry(entry_id)
    if is_new:
        write_audit(connection, tables, actor=actor, action="again", kind="entry", target=str(entry_id), reason=reason)
    return Again(id=again_id(row), is_new=is_new)


def ended(tables: Tables) -> Any:
    """What the rules and `ask_again` need of entries: without payloads. One that has not ended has the state of its queue row."""
    entry, queue, settlement = tables.entry, tables.queue, tables.settlement
    names = ("env", "scope", "source", "parent", "operation", "discriminator", "schema_version")
    state = func.coalesce(settlement.c.state, queue.c.state).label("state")
    rows = entry.outerjoin(settlement, settlement.c.id == entry.c.id).outerjoin(queue, queue.c.id == entry.c.id)
    return select(entry.c.id, *(entry.c[name] for name in names), state).select_from(rows)


def offer_again(
    connection: Connection, tables: Tables, configuration: Configuration | None, entry_id: UUID
) -> Offer | None:
    """Whether a failed or cancelled entry may be asked for again; None for any other. configuration: None without the secret."""
    row = connection.execute(ended(tables).where(tables.entry.c.id == entry_id)).one_or_none()
    if row is None or row.state not in ("failed", "cancelled"):
        return None
    (why,) = why_not_all(connection, tables, row.env if configuration is None else configuration.env, [row])
    return Offer(decision="again", why_not=why or why_no_keys(connection, tables, configuration))


def why_no_keys(connection: Connection, tables: Tables, configuration: Configuration | None) -> str | None:
    """Why this process cannot derive the new entries' keys; None if it can."""
    if configuration is None:
        return NO_SECRET
    if unreadable(connection, [tables.kid.c.secret_check]):
        return UNCOMPARED
    try:
        require_current_secret(connection, tables, configuration.keyring)
    except ConfigurationError:
        return OTHER_SECRET
    return None


def _why_not(row: Row[Any], env: str) -> str | None:
    """None if a new entry may be made for it, or was. env: the deployment's own."""
    if row.state == "delivered":
        return "it was delivered, and asking for it again would repeat its effect"
    if row.state not in ("failed", "cancelled"):
        return "only a failed or cancelled entry can be asked for again"
    if row.env != env:
        return f"it belongs to env {row.env!r}, and this process to {env!r}"
    if row.schema_version > ENCRYPTED_VERSION:
        return f"it has schema version {row.schema_version}, and this release writes {ENCRYPTED_VERSION} at most"
    return None


def why_not_all(connection: Connection, tables: Tables, env: str, rows: Sequence[Any]) -> list[str | None]:
    """For each of the rows why no new entry may be made for it, or that there is one. env: the deployment's own."""
    ids = {row.id: again_id(row) for row in rows if row.state in ("failed", "cancelled")}
    id = tables.entry.c.id
    there = set(connection.execute(select(id).where(id.in_(ids.values()))).scalars())
    whys = [_why_not(row, env) for row in rows]
    return [ASKED_ALREADY if why is None and ids[row.id] in there else why for row, why in zip(rows, whys, strict=True)]


def again_id(row: Any) -> UUID:
    """The id that the entry has, or would have, that is asked for again after this one."""
    return entry_id(_fields(row))


def first_of(discriminator: str) -> UUID | None:
    """The id of the entry that was asked for again with this discriminator; None if it is not such a one."""
    try:
        return UUID(discriminator.removeprefix(AGAIN)) if discriminator.startswith(AGAIN) else None
    except ValueError:
        return None


def _fields(row: Any) -> KeyFields:
    parent = ParentKey(row.parent, scope=row.scope, source=row.source)
    return key_fields(row.env, parent, row.operation, f"{AGAIN}{row.id}")


def ask_again(
    connection: Connection, configuration: Configuration, rows: Sequence[Any], actor: str, text: str
) -> Asked:
    """Write the new entries, and a line in the history of the first ones. Maintenance may have deleted a first one meanwhile,
    which is missing in the answer.
    """
    tables = configuration.tables
    entry = tables.entry
    names = ("destination", "payload", "options", "headers", "record_id", "ordering_key")
    columns = [entry.c.id, *(entry.c[name] for name in names)]
    copied = {row.id: row for row in connection.execute(select(*columns).where(entry.c.id.in_([r.id for r in rows])))}
    made, unopened = dict[UUID, NewEntry](), dict[UUID, EncryptionError]()
    for row in rows:
        try:
            if row.id in copied:
                made[row.id] = _new(configuration, row, copied[row.id])
        except EncryptionError as error:
            unopened[row.id] = error
    if not made:
        return Asked({}, unopened)
    present = insert_entries(connection, _with_fair(connection, configuration, made.values()), list(made.values()))
    is_new = {first: second.id not in present for first, second in made.items()}
    texts = {first: f"{text} (again as {second.id})" for first, second in made.items() if is_new[first]}
    record_events(connection, tables, actor, texts)
    return Asked(is_new, unopened)


def _with_fair(connection: Connection, configuration: Configuration, entries: Iterable[NewEntry]) -> Configuration:
    """The configuration with the destinations that are fair for the apps, as waiting entries show: an operator's process has no
    such setting. An entry without its scope is sent in the order of its due time.
    """
    queue = configuration.tables.queue
    fair = set()
    for name in {entry.destination for entry in entries}:
        if connection.execute(select(queue.c.id).where(queue.c.fair == name).limit(1)).one_or_none() is not None:
            fair.add(name)
    return Configuration(
        configuration.keyring,
        env=configuration.env,
        schema=configuration.schema,
        prefix=configuration.prefix,
        fair=fair | configuration.fair,
        encryption=configuration.encryption,
    )


def _payload(configuration: Configuration, row: Any, stored: bytes, id: UUID) -> bytes:
    """The payload for the new entry with this id: an envelope is bound to its entry."""
    old = StoredField(row.env, row.id, row.operation, "payload")
    opened = open_json(configuration.encryption, stored, old)
    return seal_json(configuration.encrypting, opened, old._replace(env=configuration.env, id=id))


def _new(configuration: Configuration, row: Any, copied: Any) -> NewEntry:
    fields, keyring = _fields(row), configuration.keyring
    return NewEntry(
        id=entry_id(fields),
        env=fields.env,
        scope=fields.scope,
        source=fields.source,
        parent=fields.parent,
        operation=fields.operation,
        discriminator=fields.discriminator,
        kid=keyring.current,
        tag=derive_tag(keyring, keyring.current, fields),
        parent_id=fields.parent_id,
        record_id=copied.record_id,
        destination=copied.destination,
        payload=_payload(configuration, row, bytes(copied.payload), entry_id(fields)),
        options=copied.options,
        headers=copied.headers,
        ordering_key=copied.ordering_key,
        due_at=None,
        delay=None,
        keep_first=True,
    )
