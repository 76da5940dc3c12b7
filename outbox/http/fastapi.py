"""Requests to FastAPI: the claim as a dependency, after the app's own one that identifies the caller.

idempotency = Idempotency(async_sessionmaker(engine), scope=customer_of)

@app.post("/orders", status_code=201)
async def place_order(
    cart: Cart, request: Annotated[ClaimedRequest[AsyncSession], Depends(idempotency.claim)]
) -> Order: ...

app.add_middleware(IdempotencyMiddleware)
document_refusals(app)
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Generic

from outbox.extras import missing

try:
    from fastapi import Depends, FastAPI, Header, Request
except ModuleNotFoundError as error:
    raise missing("outbox.http.fastapi", "fastapi", error) from error

from outbox.http.header import EXAMPLE, HEADER
from outbox.http.openapi import with_refusals
from outbox.http.policy import Policy, require_scope, require_sessions
from outbox.http.starlette import IdempotencyMiddleware, SessionClaims, as_response, reject
from outbox.http.transaction import ClaimedRequest, SessionT

__all__ = ["Idempotency", "IdempotencyMiddleware", "as_response", "document_refusals", "reject"]


class Idempotency(Generic[SessionT]):
    """Claims the keys of requests, each in its own session.

    sessions, content, policy: as for `outbox.http.starlette.Idempotency`.
    scope: your own dependency that returns the authenticated caller, as text. It runs before the claim, and for each retry
        too. Let it raise if the caller has no access, because a replay is sent to every caller that it returns. There is no
        default.
    claim: a dependency that claims the request's key and returns a `ClaimedRequest` with a session: `Depends(idempotency.claim)`.
    Raises `ConfigurationError` without a scope function, and if `sessions` cannot make sessions.
    """

    claim: Callable[..., AsyncIterator[ClaimedRequest[SessionT]]]

    def __init__(
        self,
        sessions: Callable[[], SessionT],
        *,
        scope: Callable[..., str | Awaitable[str]],
        content: Callable[[Request], Any] | None = None,
        policy: Policy | None = None,
    ) -> None:
        require_scope(scope, "scope=current_customer, a dependency that authenticates")
        require_sessions(sessions)
        self.claim = _dependency(SessionClaims(sessions, content, policy or Policy()), scope)


def _dependency(
    claims: SessionClaims[SessionT], scope: Callable[..., str | Awaitable[str]]
) -> Callable[..., AsyncIterator[ClaimedRequest[SessionT]]]:
    """A function whose parameters are dependencies: FastAPI reads them."""

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


def document_refusals(app: FastAPI, policy: Policy | None = None) -> None:
    """Add the problems with which claimed routes answer (400, 409, 413, 422 and 503) to the app's OpenAPI document.

    policy: as for the claims. FastAPI's own 422 stays in the document. A mounted app has its own document and needs its own
        call.
    """
    document = app.openapi

    def openapi() -> dict[str, Any]:
        return with_refusals(document(), (policy or Policy()).problem_types)

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's "Extending OpenAPI" has it
