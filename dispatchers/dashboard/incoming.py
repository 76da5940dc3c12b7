"""The parameters of a request, each with its values: from the path, the address, a form or a JSON object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request

from dispatchers.dashboard.failures import Failure

MAX_BODY_BYTES = 256 * 1024  # a decision's result has 64 KiB at most
FORM = "application/x-www-form-urlencoded"


def path_of(request: Request) -> dict[str, list[Any]]:
    return {name: [value] for name, value in request.path_params.items()}


def query_of(request: Request) -> dict[str, list[Any]]:
    """The parameters of the address and of the path; `done`, the action that led to the page, is not a view's."""
    given: dict[str, list[Any]] = _parsed(request.scope["query_string"], "the address")
    given.pop("done", None)
    return given | path_of(request)


def _parsed(text: bytes, what: str) -> dict[str, list[Any]]:
    """Each name's values. Raises `Failure` for bytes that are not UTF-8: a replaced character would be recorded as given."""
    try:
        return dict(parse_qs(text.decode(), keep_blank_values=True, errors="strict"))
    except ValueError:
        raise Failure(400, "malformed", f"{what} is not valid UTF-8") from None


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Failure(413, "too_large", f"the request has more than {MAX_BODY_BYTES} bytes")
    return body


async def form_of(request: Request) -> dict[str, list[Any]]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise Failure(415, "media_type", f"send the form as {FORM}")
    return _parsed(await _body(request), "the form")


async def json_of(request: Request) -> Mapping[str, Sequence[Any]]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Failure(415, "media_type", "send the parameters as application/json")
    try:
        given = parse_json(await _body(request) or b"{}")
    except ValueError as error:
        raise Failure(400, "malformed", f"the request is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Failure(400, "malformed", "the request must be a JSON object")
    return {name: [value] for name, value in given.items()}


def parse_json(text: str | bytes) -> Any:
    """The document. Raises `ValueError` for what is no JSON, or is nested too deeply, or has one member twice."""
    try:
        return json.loads(text, object_pairs_hook=_members)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has two members of one name")
    return members
