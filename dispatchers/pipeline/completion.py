"""Completes requests without a settling of this process: the app cancelled their last entry, or another release settled it."""

import asyncio
import logging
import random
from collections.abc import Callable
from uuid import UUID

from dispatchers.callbacks import CallbackFailed, Callbacks
from dispatchers.names import did_you_mean
from dispatchers.pipeline.wakeup import until_set
from dispatchers.store.protocol import Store
from dispatchers.store.records.queries import MAX_ACCEPTED, Accepted
from dispatchers.telemetry.errors import ErrorReports, described
from outbox.sql.errors.driver import is_passing

log = logging.getLogger("outbox.dispatcher")

POLL_SECONDS = 1.0
RETRY_SECONDS = (2.0, 300.0)


class CompletionWorker:
    """Reads the accepted requests page by page, and completes those whose entries have all ended.

    A request whose completion failed is skipped for a while. Only this process stores for how long.
    away: called with errors of the database, which are retried.
    """

    def __init__(
        self,
        store: Store,
        callbacks: Callbacks,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        away: Callable[[Exception], None],
        errors: ErrorReports,
    ) -> None:
        self._store = store
        self._callbacks = callbacks
        self._clock = clock
        self._rng = rng
        self._away = away
        self._errors = errors
        self._after: Accepted | None = None
        self._failed: dict[UUID, tuple[int, float]] = {}  # the number of failures, and until when to skip it
        self._unknown: set[str] = set()

    async def run_once(self) -> None:
        """Check every accepted request once. Raises what the database raises."""
        self._after = None
        await self._poll()
        while self._after is not None:
            await self._poll()

    async def pump(self, stopping: asyncio.Event) -> None:
        """Check a page at regular times until `stopping` is set. A completion that runs then is cancelled and rolled back."""
        if self._callbacks.complete_requests:
            await until_set(stopping, self._poll_repeatedly())

    async def _poll_repeatedly(self) -> None:
        while True:
            try:
                await self._poll()
            except Exception as error:
                self._away(error)
            await asyncio.sleep(POLL_SECONDS * (0.5 + self._rng.random()))

    async def _poll(self) -> None:
        if not self._callbacks.complete_requests:
            return
        page = await self._store.accepted(self._after)
        self._after = page[-1] if len(page) == MAX_ACCEPTED else None
        for request in page:
            if not request.waits:
                await self._complete(request)

    async def _complete(self, request: Accepted) -> None:
        function = self._callbacks.find_completion(request.completion)
        if function is None:
            self._report_unknown(request)
            return
        tries, until = self._failed.get(request.id, (0, 0.0))
        if self._clock() < until:
            return
        try:
            await self._store.complete(request.id, function)
        except CallbackFailed as failed:
            self._report_failed(request, tries, failed.__cause__ or failed)
        except Exception as error:
            if is_passing(error):
                raise
            self._report_failed(request, tries, error)
        else:
            self._failed.pop(request.id, None)

    def _report_failed(self, request: Accepted, tries: int, problem: BaseException) -> None:
        first, most = RETRY_SECONDS
        now = self._clock()
        self._failed = {
            id: failed for id, failed in self._failed.items() if now < failed[1] + most
        }  # forget old failures
        self._failed[request.id] = tries + 1, now + min(first * 2 ** min(tries, 10), most)
        log.error(
            "request %s: on_completed(%r) raised %s; it is called again later",
            request.id,
            request.completion,
            described(problem),
            extra={"request_id": str(request.id)},
        )
        self._errors.report("completion", problem, request_id=request.id)

    def _report_unknown(self, request: Accepted) -> None:
        if request.completion not in self._unknown:
            self._unknown.add(request.completion)
            completions = [name for kind, name in self._callbacks.names if kind == "on_completed"]
            log.warning(
                "request %s waits: this process has no on_completed(%r) registered%s",
                request.id,
                request.completion,
                did_you_mean(request.completion, completions),
                extra={"request_id": str(request.id)},
            )
