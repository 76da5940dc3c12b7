"""Which entries a session must still write, and which it must write again when a savepoint is rolled back.

An entry lives and dies with the savepoint in which it was enqueued. It is written in that one or, after a rollback, in one
below it. The rollback of the savepoint in which it was written undoes the INSERT, so the entry must be written again.

depth: how many savepoints are open, 0 in the transaction itself.
"""

from dataclasses import dataclass
from uuid import UUID

from outbox.configuration import Configuration
from outbox.sessions.entry_rows import Entry, NewEntry, take_tag


class PendingEntry:
    """An entry that was enqueued. handle: what `enqueue` returned. depth: where it was enqueued."""

    __slots__ = ("depth", "entry", "handle")

    def __init__(self, entry: NewEntry, depth: int) -> None:
        self.entry = entry
        self.handle = Entry(entry.id, entry.tag)
        self.depth = depth


@dataclass(slots=True)
class _WrittenEntry:
    """An entry that was written deeper than it was enqueued. depth: where it was written."""

    configuration: Configuration
    pending: PendingEntry
    depth: int


Batch = tuple[Configuration, list[PendingEntry]]


class PendingEntries:
    """True while an entry must be written. Entries are written in the order in which they were enqueued."""

    def __init__(self) -> None:
        self._pending: dict[Configuration, dict[UUID, PendingEntry]] = {}
        self._written: list[_WrittenEntry] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, configuration: Configuration, entry: NewEntry, depth: int) -> PendingEntry:
        """Add `entry`, unless one of its id must still be written. Returns the one that will be written."""
        pending = self._pending.setdefault(configuration, {})
        found = pending.get(entry.id)
        if found is None:
            found = pending[entry.id] = PendingEntry(entry, depth)
        return found

    def has(self, configuration: Configuration, id: UUID) -> bool:
        """Whether an entry of this id must still be written."""
        return id in self._pending.get(configuration, ())

    def take(self) -> list[Batch]:
        """Take all entries that must be written. What was not written must be put back."""
        taken = [(configuration, list(pending.values())) for configuration, pending in self._pending.items()]
        self._pending = {}
        return taken

    def put_back(self, batches: list[Batch]) -> None:
        """Put entries before those that were enqueued since."""
        if not batches:
            return
        enqueued_since, self._pending = self._pending, {}
        for configuration, entries in batches:
            self._pending.setdefault(configuration, {}).update((each.entry.id, each) for each in entries)
        for configuration, pending in enqueued_since.items():
            self._pending.setdefault(configuration, {}).update(pending)

    def written(self, batch: Batch, depth: int) -> None:
        """Note that these entries were written at `depth`."""
        configuration, entries = batch
        self._written += [_WrittenEntry(configuration, each, depth) for each in entries if each.depth < depth]

    def released(self, depth: int) -> None:
        """The savepoint at `depth` was released: what was done in it counts as done in the one around it."""
        around = depth - 1
        for pending in self._pending.values():
            for each in pending.values():
                each.depth = min(each.depth, around)
        for written in self._written:
            written.depth = min(written.depth, around)
        self._written = [written for written in self._written if written.pending.depth < written.depth]

    def rolled_back(self, depth: int) -> None:
        """The savepoint at `depth`, or with 0 the transaction, was rolled back, and all savepoints in it."""
        undone = [written for written in self._written if written.depth >= depth]
        self._written = [written for written in self._written if written.depth < depth]
        for configuration, pending in list(self._pending.items()):
            kept = {id: each for id, each in pending.items() if each.depth < depth}
            if kept:
                self._pending[configuration] = kept
            else:
                del self._pending[configuration]
        for written in undone:
            take_tag(written.pending.handle, written.pending.entry.tag)
        self.put_back([(each.configuration, [each.pending]) for each in undone if each.pending.depth < depth])

    def clear(self) -> None:
        self._pending.clear()
        self._written.clear()
