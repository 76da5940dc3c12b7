"""Adds the refusals of claimed requests to an API's OpenAPI document. Pure. Source: spec.openapis.org/oas/v3.1.1."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from outbox.errors import RequestError
from outbox.http.header import HEADER
from outbox.http.problems import KINDS, MEDIA_TYPE, Kind

PROBLEM = "IdempotencyProblem"
RETRY_AFTER = "IdempotencyRetryAfter"

COMPONENTS: Mapping[str, Mapping[str, Any]] = {
    "headers": {
        RETRY_AFTER: {
            "description": "After how many seconds to send the request again.",
            "schema": {"type": "integer", "minimum": 1},
        }
    },
    "schemas": {
        PROBLEM: {
            "type": "object",
            "description": "A problem document of RFC 9457.",
            "required": ["type", "title", "status", "detail"],
            "properties": {
                "type": {"type": "string", "format": "uri-reference"},
                "title": {"type": "string"},
                "status": {"type": "integer", "minimum": 400, "maximum": 599},
                "detail": {"type": "string"},
            },
        }
    },
}


def with_refusals(document: dict[str, Any], types: str) -> dict[str, Any]:
    """An API's own document, in which every operation that takes the header has the answers to refused requests.

    types: as for `problem_of`. The document's own answer of the same status stays; the problem is added to it.
    """
    components = document.setdefault("components", {})
    for kind, ours in COMPONENTS.items():
        components[kind] = {**ours, **components.get(kind, {})}
    refusals = {str(status): _response(status, kinds, types) for status, kinds in kinds_by_status().items()}
    for operation in _operations(document):
        if any(_is_header(parameter) for parameter in operation.get("parameters", ())):
            responses = operation.setdefault("responses", {})
            for status, response in refusals.items():
                responses[status] = _joined(responses.get(status, {}), response)
    return document


def kinds_by_status() -> dict[int, list[Kind]]:
    """Every refusal with which this library answers."""

    def status_of(refused: tuple[type[RequestError], Kind]) -> int:
        return refused[0].status

    groups = groupby(sorted(KINDS.items(), key=status_of), key=status_of)
    return {status: [kind for _, kind in group] for status, group in groups}


def _operations(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for path in document.get("paths", {}).values():
        yield from (operation for operation in path.values() if isinstance(operation, dict))


def _is_header(parameter: Mapping[str, Any]) -> bool:
    return parameter.get("in") == "header" and str(parameter.get("name", "")).lower() == HEADER.lower()


def _joined(own: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    both = {kind: ours[kind] | own.get(kind, {}) for kind in ("headers", "content") if kind in ours}
    return {**ours, **own, **both}


def _response(status: int, kinds: list[Kind], types: str) -> dict[str, Any]:
    uris = {"properties": {"type": {"enum": [types + kind.name for kind in kinds]}}}
    headers = {"Retry-After": {"$ref": f"#/components/headers/{RETRY_AFTER}"}}
    return {
        "description": " ".join(f"{kind.title}. {kind.remedy}" for kind in kinds),
        **({"headers": headers} if any(kind.has_retry_after for kind in kinds) else {}),
        "content": {
            MEDIA_TYPE: {
                "schema": {"allOf": [{"$ref": f"#/components/schemas/{PROBLEM}"}, uris]},
                "examples": {kind.name: {"value": _example(status, kind, types)} for kind in kinds},
            }
        },
    }


def _example(status: int, kind: Kind, types: str) -> dict[str, Any]:
    return {"type": types + kind.name, "title": kind.title, "status": status, "detail": kind.remedy}
