"""The app's functions of a typed effect, as the dispatcher calls them: results become JSON data, settlements become typed."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from dispatchers.callbacks import Settlement
from dispatchers.delivery import Delivered, Delivery, Found
from dispatchers.sanitize import is_unstorable, unstorable
from dispatchers.threads import SEND_THREAD, as_async, is_async
from outbox.effects.effect import Effect
from outbox.errors import InvalidPayload, NotSerializable

log = logging.getLogger("outbox.dispatcher")


def typed_function(effect: Effect[Any, Any], function: Callable[[Delivery[Any]], Any]) -> Callable[..., Any]:
    """`function`, a send or a status lookup, with its result as JSON data. A sync one runs on a thread."""
    if not effect.has_result_type or not callable(function):
        return function
    called = as_async(function, SEND_THREAD)

    @wraps(function)
    async def send(delivery: Delivery[Any]) -> Any:
        answer = await called(delivery)
        if isinstance(answer, Delivered | Found):
            return replace(answer, result=_written(effect, answer.result, delivery))
        return answer

    return send


def _written(effect: Effect[Any, Any], result: Any, delivery: Delivery[Any]) -> Any:
    """The result as JSON data, or what says why it is not stored: the effect happened nevertheless."""
    try:
        return effect.write_result(result)
    except (InvalidPayload, NotSerializable) as error:
        log.error("entry %s is delivered, but its result is not stored: %s", delivery.id, error)
        return unstorable(type(result).__name__)


def typed_callback(effect: Effect[Any, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a callback, with a settlement whose payload and result are those of the effect."""

    def typed(settlement: Settlement) -> Settlement:
        result = settlement.result
        if effect.has_result_type:
            is_stored = settlement.state == "delivered" and not is_unstorable(result)
            result = effect.read_result(result) if is_stored else None
        return replace(settlement, entry=replace(settlement.entry, effect=effect), result=result)

    if is_async(function):

        @wraps(function)
        async def call_async(session: Any, settlement: Settlement) -> Any:
            return await function(session, typed(settlement))

        return call_async

    @wraps(function)
    def call(session: Any, settlement: Settlement) -> Any:
        return function(session, typed(settlement))

    return call
