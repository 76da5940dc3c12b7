"""Names in a dispatcher's settings that fit nothing it serves: a slip in one of them would be found in production only."""

from collections.abc import Iterable, Iterator

from dispatchers.callbacks import Kind
from dispatchers.flow_control.state import service_of
from dispatchers.names import did_you_mean
from dispatchers.pipeline.routing import Routes


def unmatched(routes: Routes, callbacks: Iterable[tuple[Kind, str]], limits: Iterable[str]) -> Iterator[str]:
    """A warning for each callback of an operation that is not served here, and each limit of a destination that is not."""
    for kind, name in callbacks:
        if kind != "on_completed" and not routes.covers(name):
            yield (
                f"{kind}({name!r}) fits no operation that is served here, so it is never called by this dispatcher"
                f"{routes.suggestion(name) or '.'} It stays on record until `outbox callbacks forget '{kind} {name}'`"
            )
    for name in limits:
        if name not in routes.destinations and service_of(name) not in routes.destinations:
            yield (
                f"limits={{{name!r}: ...}} fits no destination of the operations served here: it holds only for entries that"
                f" are enqueued with destination={name!r}{did_you_mean(name, routes.destinations)}"
            )
