"""Requests to FastAPI: the claim as a dependency, after the app's own one that identifies the caller.

Claimed = Annotated[ClaimedRequest[AsyncSession], Depends(claimed(async_sessionmaker(engine), scope=customer_of))]

@app.post("/orders", status_code=201)
async def place_order(cart: Cart, request: Claimed) -> Order: ...

app.add_middleware(IdempotencyMiddleware)
document_refusals(app)
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from outbox.extras import missing

try:
    from fastapi import Depends, FastAPI, Header, Request
except ModuleNotFoundError as error:
    raise missing("outbox.http.fastapi", "fastapi", error) from error

from outbox.http.header import EXAMPLE, HEADER
from outbox.http.policy import BODY_BYTES_MAX, Policy, require_scope, require_sessions
from outbox.http.specification import specify
from outbox.http.specification_openapi import with_refusals
from outbox.http.starlette import ClaimedRequest, DatabaseStore, IdempotencyMiddleware, as_response

__all__ = ["ClaimedRequest", "IdempotencyMiddleware", "as_response", "claimed", "document_refusals"]

SessionT = TypeVar("SessionT")


def claimed(
    sessions: Callable[[], SessionT],
    *,
    scope: Callable[..., str | Awaitable[str]],
    content: Callable[[Request], Any] | None = None,
    policy: Policy | None = None,
) -> Callable[..., AsyncIterator[ClaimedRequest[SessionT]]]:
    """A dependency that claims the request's key, and hands out the session to work in.

    scope: a dependency: who is calling, as text. It runs first, and what it raises comes before any claim; let it
        refuse those who may not ask, since a replay goes to every caller that it lets pass. There is no default.
    sessions, content, policy: as of `outbox.http.starlette.Idempotency`.
    Raises `ConfigurationError` without a scope function, and for what makes no sessions.
    """
    require_scope(scope, "scope=current_customer, a dependency that authenticates")
    require_sessions(sessions)
    claims = DatabaseStore(sessions, content, policy or Policy())

    async def keyed(request: Request, caller: Annotated[str, Depends(scope)]) -> str:
        # It refuses a missing key, as a problem document, before FastAPI comes to the claim's own parameters: a 422.
        claims.key_of(request)
        return caller

    async def claim(
        request: Request,
        caller: Annotated[str, Depends(keyed)],
        # Read from the request itself, where two headers are two; named here, as required, for the app's OpenAPI document.
        idempotency_key: Annotated[str, Header(alias=HEADER, description=f"For example {EXAMPLE}")],
    ) -> AsyncIterator[ClaimedRequest[SessionT]]:
        async with claims.claim(request, caller) as claimed_request:
            yield claimed_request

    return claim


def document_refusals(app: FastAPI, policy: Policy | None = None, body_bytes_max: int = BODY_BYTES_MAX) -> None:
    """Name in the app's OpenAPI document the problems that its claimed routes answer with: 400, 409, 413, 422 and 503.

    policy, body_bytes_max: as of the claims and the middleware. FastAPI's own 422 stays beside ours. A mounted app has a
    document, and needs a call, of its own.
    """
    document = app.openapi

    def openapi() -> dict[str, Any]:
        return with_refusals(document(), specify(policy or Policy(), body_bytes_max=body_bytes_max))

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's "Extending OpenAPI" has it
