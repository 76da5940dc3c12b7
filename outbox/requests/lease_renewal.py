"""Renews a lease in the background: in a thread for a sync handler, in a task for an async one.

It stops at the end of the block, when the request is answered, when the lease is lost, and after a maximal time: a handler that
hangs must not keep its key permanently.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

from outbox.errors import AlreadyAnswered, LeaseLost

log = logging.getLogger("outbox.leases")

RENEWALS_PER_LEASE = 3  # two may fail before the lease expires


class ThreadRenewal:
    """Calls `renew` three times in a lease, from a daemon thread: it ends with the process, and the lease then expires."""

    def __init__(self, renew: Callable[[], None], record_id: UUID, lease: timedelta, renew_for: timedelta) -> None:
        self._renew = renew
        self._record_id = record_id
        self._seconds = lease.total_seconds() / RENEWALS_PER_LEASE
        self._until = time.monotonic() + renew_for.total_seconds()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds) and time.monotonic() < self._until:
            try:
                self._renew()
            except Exception as error:
                if not retries_after(error, self._record_id):
                    return


class TaskRenewal:
    """Renews a lease in a task of the running event loop."""

    def __init__(
        self, renew: Callable[[], Awaitable[None]], record_id: UUID, lease: timedelta, renew_for: timedelta
    ) -> None:
        self._renew = renew
        self._record_id = record_id
        self._seconds = lease.total_seconds() / RENEWALS_PER_LEASE
        self._until = time.monotonic() + renew_for.total_seconds()
        self._stopped = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="outbox-lease")

    async def stop(self) -> None:
        # Do not cancel the task, because that would close a connection in the middle of a statement.
        self._stopped.set()
        await self._task

    async def _run(self) -> None:
        while not await self._stops_within(self._seconds) and time.monotonic() < self._until:
            try:
                await self._renew()
            except Exception as error:
                if not retries_after(error, self._record_id):
                    return

    async def _stops_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)
        return self._stopped.is_set()


def retries_after(error: Exception, record_id: UUID) -> bool:
    """Whether to try again: an unavailable database may return, but an answered request or a lost lease is final."""
    if isinstance(error, AlreadyAnswered):
        return False
    if isinstance(error, LeaseLost):
        log.warning("lease of request %s lost: another attempt took it over; this attempt stores nothing", record_id)
        return False
    log.warning("cannot renew the lease of request %s: %s; retried before it expires", record_id, type(error).__name__)
    return True
