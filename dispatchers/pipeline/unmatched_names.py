"""Finds names in a dispatcher's settings that match no operation or destination, so that a typing error shows at the start."""

from collections.abc import Iterable, Iterator

from dispatchers.callbacks import Kind
from dispatchers.flow_control.state import service_of
from dispatchers.names import did_you_mean
from dispatchers.pipeline.routing import Routes


def unmatched(routes: Routes, callbacks: Iterable[tuple[Kind, str]], limits: Iterable[str]) -> Iterator[str]:
    """A warning for each callback, and each limit, that matches no operation or destination of this dispatcher."""
    for kind, name in callbacks:
        if kind != "on_completed" and not routes.covers(name):
            yield (
                f"{kind}({name!r}) matches no operation that this dispatcher serves, so this dispatcher never calls it"
                f"{routes.suggestion(name) or '.'} It stays recorded until you run `outbox callbacks forget '{kind} {name}'`"
            )
    for name in limits:
        if name not in routes.destinations and service_of(name) not in routes.destinations:
            yield (
                f"limits={{{name!r}: ...}} matches no destination of the operations that this dispatcher serves: it applies only"
                f" to entries that are enqueued with destination={name!r}{did_you_mean(name, routes.destinations)}"
            )
