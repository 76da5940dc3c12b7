"""One exchange with the database: it settles entries, then claims others. If the database refuses it as a whole, in parts.

One row must never stop the others. If the database refuses a batch of outcomes, the batch is halved until the refused outcome
is found. That outcome is stored without its text, or its entry becomes uncertain, or its entry is suspended. A row that cannot
be claimed is found in the same way, and suspended. If another transaction has locked the next entry of an ordering group, the
entry before it is settled a moment later. If the database ended the whole because of another transaction, such as a claim of the
same entries on another node of a Galera cluster, the outcomes are stored first, without a claim.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.flow_control.fair_share import FairCursor
from dispatchers.steady_clock import steady_clock
from dispatchers.store.app_code import callback_registry
from dispatchers.store.connections.guards import Guards, guard
from dispatchers.store.protocol import CallbacksChanged, Exchange, Run
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.ordering import MOMENT, NextIsLocked, advance_groups, sort_out
from dispatchers.store.queue.queue_update import queue_update
from dispatchers.store.queue.row_errors import code_of, is_conflict, is_of_one_row, is_of_the_moment, substitutes
from dispatchers.store.queue.throttling import claim_throttled
from dispatchers.store.queue.unreadable_rows import candidates, remove_ended, set_aside, set_aside_claimed
from dispatchers.transitions import ClaimedEntry, Ending, Lease, Release, Settle, Transition
from outbox.sql.mariadb.settings import Unseen, apply_all, require_applied
from outbox.sql.schema.tables import Tables
from outbox.times import NEVER

Result = TypeVar("Result")

log = logging.getLogger("outbox.dispatcher")

PROBED_ROWS = 500  # rows of one try, in the search for a row that cannot be claimed


class LateClaim(Exception):
    """The leases of a claim have ended before its transaction: it must not be committed."""


class NotCommitted(Exception):
    """Rolls back a transaction that was only a try."""


class QueueSql(Protocol):
    """guards: the limits to set with the first statement, where the database has limits of a transaction."""

    def claim(
        self,
        connection: Connection,
        tables: Tables,
        request: ClaimRequest,
        rounds: FairCursor = ...,
        guards: Guards | None = None,
    ) -> list[ClaimedEntry]: ...

    def settle(
        self,
        connection: Connection,
        tables: Tables,
        settlements: Sequence[Ending],
        guards: Guards = ...,
        callbacks: str | None = None,
    ) -> set[UUID]: ...


class Exchanges:
    """Settles and claims. run: runs work in a transaction. sql: the module that claims and settles on this database.

    run_one: runs work that is one statement; None if no work is, as on databases that settle with several statements.
    """

    def __init__(
        self,
        run: Run,
        tables: Tables,
        sql: QueueSql,
        rounds: FairCursor,
        guards: Guards,
        *,
        run_one: Run | None = None,
    ) -> None:
        self._run = partial(run_seeing_all, run)
        self._run_one = run_one
        self._tables = tables
        self._sql = sql
        self._rounds = rounds
        self._guards = guards

    async def exchange(
        self, settlements: Sequence[Ending], request: ClaimRequest | None, callbacks_read: str | None
    ) -> Exchange:
        """callbacks_read: the recorded callbacks when the settlements were decided.

        A claim that has outlasted its own leases, as in an event loop that was blocked meanwhile, is rolled back: else its
        entries would count as maybe sent when others claim them. Raises `CallbacksChanged`, and those errors of the database that
        do not come from single rows.
        """
        left = sorted(settlements, key=lambda settlement: settlement[0].id.int)
        postponed: set[Lease] = set()
        while True:
            try:
                exchange = await self._at_once(left, request, callbacks_read)
            except NextIsLocked as locked:
                postponed |= locked.leases
                left = [ending for ending in left if ending[0].lease not in locked.leases]
            except LateClaim:
                request = None
            except Exception as error:
                is_divided = is_conflict(error) and left and request is not None
                if not (is_of_one_row(error) or is_of_the_moment(error) or is_divided):
                    raise
                exchange = await self._part_by_part(left, request, callbacks_read, error)
                break
            else:
                break
        report_ended(exchange.ended)
        return replace(exchange, postponed=exchange.postponed | postponed) if postponed else exchange

    async def _at_once(
        self, settlements: Sequence[Ending], request: ClaimRequest | None, callbacks_read: str | None
    ) -> Exchange:
        alone = await self._settle_one(settlements, request, callbacks_read)
        if alone is not None:
            return alone
        whole: Exchange = await self._run(partial(self._work, settlements, request, callbacks_read))
        return whole

    async def _settle_one(
        self, settlements: Sequence[Ending], request: ClaimRequest | None, callbacks_read: str | None
    ) -> Exchange | None:
        """Settle a single entry, if one statement is all there is to do. None if there is more, or if the statement changed
        nothing: a transaction must find out why.
        """
        claims = request is not None and (request.quotas or request.flow_update is not None)
        if self._run_one is None or claims or len(settlements) != 1:
            return None
        entry = settlements[0][0]
        if entry.position is not None:  # its group is advanced in the same transaction
            return None

        def work(connection: Connection) -> set[UUID]:
            return self._sql.settle(connection, self._tables, settlements, self._guards, callbacks_read)

        settled: set[UUID] = await self._run_one(work)
        return Exchange({entry.lease}) if settled else None

    def _work(
        self,
        settlements: Sequence[Ending],
        request: ClaimRequest | None,
        callbacks_read: str | None,
        connection: Connection,
    ) -> Exchange:
        began = steady_clock()  # the database's now() is the transaction's start
        flow_update = request.flow_update if request else None
        if flow_update is not None or (request is None and not settlements):
            guard(connection, self._guards)
        cutoff = request.cutoff if request else NEVER
        settled: set[Lease] = set()
        if settlements:
            settled = self.settle(connection, settlements, self._guards, callbacks_read, cutoff)
        if request is None:
            return Exchange(settled)
        ended: dict[UUID, str] = {}
        must_wait: list[Ending] = []

        def claim(wanted: ClaimRequest, guards: Guards | None = None) -> list[ClaimedEntry]:
            return self._claim(connection, wanted, must_wait, ended, guards)

        flow_states = None
        if flow_update is not None:
            claimed, flow_states = claim_throttled(connection, self._tables, request, flow_update, claim)
        elif request.quotas:
            claimed = claim(request, None if settlements else self._guards)  # the settling statement has set the guards
        else:
            claimed = []
        if claimed and steady_clock() - began >= request.lease.total_seconds():
            raise LateClaim
        return Exchange(settled, claimed, len(must_wait) + len(ended), flow_states, ended=ended)

    def settle(
        self,
        connection: Connection,
        settlements: Sequence[Ending],
        guards: Guards,
        callbacks_read: str | None,
        cutoff: datetime = NEVER,
    ) -> set[Lease]:
        """Settle in the transaction of `connection`. After `NextIsLocked`, `CallbacksChanged` or `Unseen` it must not be
        committed.
        """
        settled: set[Lease] = set()
        for part in _one_of_each(settlements):
            ids = self._sql.settle(connection, self._tables, part, guards, callbacks_read)
            ended = part if len(ids) == len(part) else [ending for ending in part if ending[0].id in ids]
            settled.update([entry.lease for entry, _ in ended])
        if len(settled) < len(settlements):
            now = callback_registry.summary(callback_registry.read(connection, self._tables))
            if callbacks_read not in (None, now):
                raise CallbacksChanged
            require_applied(connection)
        ordered = [ending for ending in settlements if ending[0].position is not None and ending[0].lease in settled]
        if ordered:
            advance_groups(connection, self._tables, ordered, cutoff=cutoff)
        return settled

    def _claim(
        self,
        connection: Connection,
        request: ClaimRequest,
        passed: list[Ending],
        ended: dict[UUID, str],
        guards: Guards | None,
    ) -> list[ClaimedEntry]:
        """The claimed entries that may be sent.

        passed, ended: the released entries, and those that had ended before, are added to them.
        guards: the limits to set, if this transaction has none yet.
        """
        found = self._sql.claim(connection, self._tables, request, self._rounds, guards)
        if guards is not None and any(entry.ended or entry.position is not None for entry in found):
            guard(connection, guards)  # what follows is planned for the tables as they are
        must_wait: list[Ending] = []
        if any(entry.ended for entry in found):
            removed = remove_ended(connection, self._tables, [entry for entry in found if entry.ended])
            ended |= removed.ended
            must_wait += [(entry, Release("the next one of its group is locked", MOMENT)) for entry in removed.locked]
            found = [entry for entry in found if not entry.ended]
        sorted_out = sort_out(connection, self._tables, found)
        must_wait += sorted_out.must_wait
        if must_wait:
            self._sql.settle(connection, self._tables, must_wait, self._guards)
        passed += must_wait
        return sorted_out.may_go

    # --- in parts

    async def _part_by_part(
        self, settlements: Sequence[Ending], request: ClaimRequest | None, callbacks_read: str | None, error: Exception
    ) -> Exchange:
        parts = await self._settle_in_halves(settlements, callbacks_read) if settlements else Exchange()
        if request is None or parts.error is not None:
            return parts
        try:
            claimed = await self._claim_alone(request, callbacks_read)
        except LateClaim:
            return parts
        except Exception as refused:
            if not settlements:
                raise
            return replace(parts, error=refused)  # an exchange that raises has its outcomes settled again
        return replace(claimed, settled=parts.settled, postponed=parts.postponed)

    async def _claim_alone(self, request: ClaimRequest, callbacks_read: str | None) -> Exchange:
        claiming = partial(self._work, (), request, callbacks_read)
        try:
            return await self._run(claiming)
        except Exception as refused:
            if not is_of_one_row(refused) or not await self._set_unclaimable_aside(request):
                raise
            return await self._run(claiming)

    async def _settle_in_halves(self, settlements: Sequence[Ending], callbacks_read: str | None) -> Exchange:
        try:
            return await self._run(partial(self._work, settlements, None, callbacks_read))
        except NextIsLocked as locked:
            others = [ending for ending in settlements if ending[0].lease not in locked.leases]
            parts = await self._settle_in_halves(others, callbacks_read) if others else Exchange()
            return replace(parts, postponed=parts.postponed | locked.leases)
        except Exception as error:
            if len(settlements) > 1 and (is_of_one_row(error) or is_of_the_moment(error)):
                middle = len(settlements) // 2
                first = await self._settle_in_halves(settlements[:middle], callbacks_read)
                return await self._settle_after(first, settlements[middle:], callbacks_read)
            if is_of_the_moment(error):
                return Exchange(postponed=frozenset({settlements[0][0].lease}))
            if not is_of_one_row(error):
                raise
            await self._end_refused(*settlements[0], callbacks_read, error)
            return Exchange({settlements[0][0].lease})

    async def _settle_after(self, first: Exchange, rest: Sequence[Ending], callbacks_read: str | None) -> Exchange:
        """Settle the second half. If it cannot be settled now, the result says so: the first half is stored, and to settle that
        once more would look like a lost lease.
        """
        if first.error is not None:
            return replace(first, unstored=first.unstored.union(entry.lease for entry, _ in rest))
        try:
            second = await self._settle_in_halves(rest, callbacks_read)
        except Exception as error:
            second = Exchange(error=error, unstored=frozenset(entry.lease for entry, _ in rest))
        return replace(second, settled=first.settled | second.settled, postponed=first.postponed | second.postponed)

    async def _end_refused(
        self, entry: ClaimedEntry, change: Transition, callbacks_read: str | None, error: Exception
    ) -> None:
        """End the lease of an entry whose outcome the database refuses, in another way, and log it."""
        named, code = f"entry {entry.id} ({entry.operation})", code_of(error)
        removed = await self._try(lambda connection: remove_ended(connection, self._tables, [entry]))
        if removed is not None and removed.ended:
            report_ended(removed.ended)
            return
        for substitute in substitutes(entry, change, code):
            if await self._try(partial(self._substitute, entry, substitute, callbacks_read)):
                state = substitute.state if isinstance(substitute, Settle) else queue_update(entry, substitute).state
                log.error(
                    "%s: the database refused its outcome (%s); stored state %s without the service's answer",
                    named,
                    code,
                    state,
                )
                return
        reason = f"the database refused its outcome ({code})"
        if await self._try(lambda connection: set_aside_claimed(connection, self._tables, entry, reason)):
            log.error("%s suspended: %s; repair its row, then run `outbox release`", named, reason)
        else:
            log.error(
                "%s: %s, and cannot be suspended either; it will be claimed again when its lease expires", named, reason
            )

    def _substitute(
        self, entry: ClaimedEntry, change: Transition, callbacks_read: str | None, connection: Connection
    ) -> set[Lease]:
        return self.settle(connection, [(entry, change)], self._guards, callbacks_read)

    async def _try(self, work: Callable[[Connection], Result]) -> Result | None:
        """The result of `work`; None if the database refuses this too."""
        try:
            return await self._run_guarded(work)
        except Exception as error:
            if isinstance(error, NextIsLocked) or is_of_one_row(error) or is_of_the_moment(error):
                return None
            raise

    async def _run_guarded(self, work: Callable[[Connection], Result]) -> Result:
        def guarded(connection: Connection) -> Result:
            guard(connection, self._guards)
            return work(connection)

        return await self._run(guarded)

    # --- rows that cannot be claimed

    async def _set_unclaimable_aside(self, request: ClaimRequest) -> int:
        """Search the queue page by page for rows that cannot be claimed, and suspend them; returns how many."""
        page = 0
        while True:
            find = partial(candidates, tables=self._tables, request=request, max_rows=PROBED_ROWS, page=page)
            ids = await self._run_guarded(find)
            done = await self._set_aside_among(ids, request) if ids else 0
            if done or len(ids) < PROBED_ROWS:
                return done
            page += 1

    async def _set_aside_among(self, ids: Sequence[UUID], request: ClaimRequest) -> int:
        error = await self._probe(ids, request)
        if error is None:
            return 0
        if len(ids) > 1:
            middle = len(ids) // 2
            return sum([await self._set_aside_among(half, request) for half in (ids[:middle], ids[middle:])])
        reason = f"its row cannot be claimed ({code_of(error)})"
        if await self._try(lambda connection: set_aside(connection, self._tables, ids[0], reason)):
            log.error(
                "entry %s suspended: %s; other entries are still sent; repair its row, then run `outbox release`",
                ids[0],
                reason,
            )
            return 1
        log.error(
            "entry %s: %s, and cannot be suspended; claims of its destination fail until its row is repaired",
            ids[0],
            reason,
        )
        return 0

    async def _probe(self, ids: Sequence[UUID], request: ClaimRequest) -> Exception | None:
        """Claim these entries and roll back. Returns the error if one of their rows caused it."""
        quotas = [quota._replace(permits=len(ids), admitted=True, called_back=None) for quota in request.quotas]
        probing = replace(
            request, quotas=quotas, max_entries=len(ids), flow_update=None, unserved=None, only=frozenset(ids)
        )

        def work(connection: Connection) -> None:
            self._sql.claim(connection, self._tables, probing)
            raise NotCommitted

        try:
            await self._run_guarded(work)
        except NotCommitted:
            pass
        except Exception as error:
            if not is_of_one_row(error):
                raise
            return error
        return None


def _one_of_each(settlements: Sequence[Ending]) -> list[Sequence[Ending]]:
    """The settlements in parts with at most one of each entry, in their order. A process that lost a lease and claimed the entry
    again may have two: each one must see what the other has changed.
    """
    if len({entry.id.int for entry, _ in settlements}) == len(settlements):  # an int's hash takes no Python code
        return [settlements]
    parts: list[dict[UUID, Ending]] = []
    for ending in settlements:
        id = ending[0].id
        part = next((part for part in parts if id not in part), None)
        if part is None:
            parts.append({id: ending})
        else:
            part[id] = ending
    return [list(part.values()) for part in parts]


async def run_seeing_all(run: Run, work: Callable[[Connection], Result]) -> Result:
    """Run `work`. If it misses a lease on a Galera node, run it again when the node has applied what the others have committed:
    the claim may come from another node, if a proxy leads the connections of one dispatcher to several.
    """
    try:
        return await run(work)
    except Unseen:
        return await run(partial(_work_when_applied, work))


def _work_when_applied(work: Callable[[Connection], Result], connection: Connection) -> Result:
    apply_all(connection)
    return work(connection)


def report_ended(ended: Mapping[UUID, str]) -> None:
    """Log the entries that were in the queue although they have a settlement. ended: the state of each."""
    for id, state in ended.items():
        log.warning(
            "entry %s was in the queue although it had ended as %s; it is not sent, and its queue row is removed (was only a"
            " part of the database restored?)",
            id,
            state,
        )
