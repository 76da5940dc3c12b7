"""Wakes dispatchers when entries that are due have been committed: those of this process directly, the others by NOTIFY.

A hint is sent after the commit, never in the business transaction, where it would take a lock of the whole server. One that is
lost costs time and nothing else: dispatchers ask the database by themselves, too.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from threading import Lock
from threading import enumerate as enumerate_threads
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool, event

from outbox.configuration import Configuration
from outbox.sessions.entry_rows import NewEntry
from outbox.sessions.hint_sender import THREAD_NAME, Committing, HintSender
from outbox.sql.connections.separate_connections import backend_pid
from outbox.sql.dialect import dialect_of
from outbox.sql.postgresql.hint_messages import NOTIFY, Due, Hint, channel_of, encode, merged, notify_sql, process_token

log = logging.getLogger("outbox.hints")

Hear = Callable[[Due], None]

MAX_SENDERS = 16  # of a process: each has a thread and a connection
MAX_THREADS = 32  # with those of senders that end: one that waits for a server without an answer ends late
SENDER_RESTS_SECONDS = 1.0  # until another engine may take the place of one that has nothing to send
UNSENT = "a hint to the dispatchers was not sent"
EXIT_SECONDS = 0.3  # how long a process that ends waits for its last hints


class _Note(NamedTuple):
    """Entries that are due, written on `connection` at this depth of savepoints. pid: the connection's server process."""

    depth: int
    connection: Connection
    engine: Engine
    pid: int | None
    channel: str
    due: Due


AFTER_OUTER_COMMIT = "outbox_after_outer_commit"
"""The execution option of a connection whose transaction another framework commits: a function that gets the statement that
sends the hint, and executes it after that commit."""


class UnsentHints:
    """The hints that a session sends after its commit, each with the savepoint in which its entries were written."""

    def __init__(self) -> None:
        self._notes: list[_Note] = []

    def written(
        self, connection: Connection, configuration: Configuration, entries: Sequence[NewEntry], depth: int
    ) -> None:
        due = frozenset([(entry.destination, entry.operation) for entry in entries if _is_due(entry)])
        if not (due and configuration.hints):
            return
        channel = configuration.hint_channel
        for number, note in enumerate(self._notes):
            if (note.depth, note.connection, note.channel) == (depth, connection, channel):
                self._notes[number] = note._replace(due=merged(note.due, due))
                return
        pid = backend_pid(connection.connection.driver_connection)
        self._notes.append(_Note(depth, connection, connection.engine, pid, channel, merged(due, due)))

    def released(self, depth: int) -> None:
        """The savepoint at `depth` was released: what was written in it counts as written in the one around it."""
        self._notes = [note._replace(depth=min(note.depth, depth - 1)) for note in self._notes]

    def rolled_back(self, depth: int) -> None:
        self._notes = [note for note in self._notes if note.depth < depth]

    def clear(self) -> None:
        self._notes.clear()

    def committed(self) -> None:
        """The session has committed: send them, or wait for the commit of a transaction around the session's."""
        notes, self._notes = self._notes, []
        with harmless(UNSENT):
            for note in notes:
                after_commit = note.connection.get_execution_options().get(AFTER_OUTER_COMMIT)
                if after_commit is not None:
                    after_commit(notify_sql(note.channel, encode(Hint(note.due))))
                elif not note.connection.closed and note.connection.in_transaction():
                    _hint_after(note)
                else:
                    _hint(note)


@contextmanager
def harmless(failure: str) -> Iterator[None]:
    """Log what fails in the block, for example that no thread can be started. The commit must not fail, or seem to fail."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", failure, type(error).__name__)


def _is_due(entry: NewEntry) -> bool:
    """Whether the entry is due by this process's clock, which is good enough here: it only decides whether a hint is sent."""
    return not entry.delay and (entry.due_at is None or entry.due_at <= datetime.now(UTC))


def hint_at_once(engine: Engine, schema: str | None, prefix: str) -> None:
    """Wake the dispatchers before this returns: for a command that ends next. Raises nothing."""
    if not dialect_of(engine).has_notify:
        return
    parameters = {"channel": channel_of(schema, prefix), "payload": encode(Hint())}
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(NOTIFY, parameters)
    except Exception as error:
        log.debug("%s: %s", UNSENT, type(error).__name__)


def _hint(note: _Note) -> None:
    is_heard = _wake(note)
    if dialect_of(note.engine).has_notify:
        woken = woken_token(note.engine) if is_heard else None
        sender = sender_of(note.engine)
        if sender is not None:
            sender.send(note.channel, Hint(note.due, woken), taken=note.pid)


def _wake(note: _Note) -> bool:
    """Wake the dispatchers of this process; returns whether there is one."""
    hearing = _hearing.get((dialect_of(note.engine).place(note.engine), note.channel)) if _hearing else None
    for hear in list(hearing or ()):
        hear(note.due)
    return bool(hearing)


# --- the commit of a transaction around the session's

_waiting: "WeakKeyDictionary[Connection, list[_Note]]" = WeakKeyDictionary()


def _hint_after(note: _Note) -> None:
    """A session was joined into a transaction of `note.connection` that others commit, or roll back."""
    if note.connection not in _waiting:
        event.listen(note.connection, "commit", _commits)
        event.listen(note.connection, "rollback", _rolls_back)
    _waiting.setdefault(note.connection, []).append(note)


def _rolls_back(connection: Connection) -> None:
    _waiting[connection] = []


def _commits(connection: Connection) -> None:
    notes, _waiting[connection] = _waiting.get(connection, []), []
    transaction = connection.get_transaction()
    if transaction is None:  # for the type checker: what commits is one
        return
    with harmless(UNSENT):
        for note in notes:
            committing = Committing(transaction, partial(_wake, note))
            sender = sender_of(note.engine)
            if sender is not None:
                sender.send(note.channel, Hint(note.due), taken=note.pid, committing=committing)


# --- the senders of this process, one for each pool: of hints, and of the counts of mismatched requests

_lock = Lock()
_senders: "WeakKeyDictionary[Pool, HintSender]" = WeakKeyDictionary()
_left_behind: list[object] = []
"""Objects that a fork has inherited: never used, and never closed, because the connections are the parent's."""


def sender_of(engine: Engine) -> HintSender | None:
    """Made at the first hint or count. It ends with the pool: at `engine.dispose()`, or when the engine is gone.

    Where an app makes an engine for each task, many wait to be collected: the one that has rested longest ends for a new one.
    Returns: None if all of them were used just now, or do not end. Dispatchers that get no hint poll.
    """
    sender = _senders.get(engine.pool)
    if sender is None:
        with _lock:
            sender = _senders.get(engine.pool)
            if sender is None and _may_start_another():
                sender = _senders[engine.pool] = HintSender(engine)
    return sender


def _may_start_another() -> bool:
    threads = sum(thread.name == THREAD_NAME for thread in enumerate_threads())
    return threads < MAX_THREADS and (len(_senders) < MAX_SENDERS or _end_longest_resting())


def _end_longest_resting() -> bool:
    """End one sender, after what it still has to send. Returns: whether one had rested long enough."""
    pool, sender = min(_senders.items(), key=lambda item: item[1].used_at)
    if time.monotonic() - sender.used_at < SENDER_RESTS_SECONDS:
        return False
    del _senders[pool]
    sender.end_before_its_pool()
    return True


def _stop_all() -> None:
    until = time.monotonic() + EXIT_SECONDS
    senders = list(_senders.values())
    for sender in senders:
        sender.stop()
    for sender in senders:
        sender.join(max(0.0, until - time.monotonic()))


def _leave_behind() -> None:
    global _lock, _senders, _waiting
    _left_behind.append((_senders, dict(_senders), _waiting, dict(_hearing)))
    _lock, _senders, _waiting = Lock(), WeakKeyDictionary(), WeakKeyDictionary()
    _hearing.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_leave_behind)


# --- the dispatchers of this process

_hearing: dict[tuple[str, str], list[Hear]] = {}


@contextmanager
def hearing(engine: Engine, configuration: Configuration, hear: Hear) -> Iterator[str]:
    """Call `hear`, on any thread, when this process has committed entries to the same tables.

    Gives the token that the hints of such commits carry: these were heard already.
    """
    key = (dialect_of(engine).place(engine), configuration.hint_channel)
    with _lock:  # two dispatchers may start in two threads
        _hearing[key] = [*_hearing.get(key, ()), hear]
    try:
        yield woken_token(engine)
    finally:
        with _lock:
            left = [each for each in _hearing.get(key, ()) if each is not hear]
            if left:
                _hearing[key] = left
            else:
                _hearing.pop(key, None)


def woken_token(engine: Engine) -> str:
    """Token of the dispatchers of this process that a commit on such an engine wakes directly."""
    return f"{process_token()} {sha256(dialect_of(engine).place(engine).encode()).hexdigest()[:12]}"
