"""The idempotency specification as a fragment of an OpenAPI document, to be merged into an API's own. Pure.

Source: spec.openapis.org/oas/v3.1.1. The fragment is a valid document by itself; what refers to it takes
`#/components/parameters/IdempotencyKey` and the responses `Idempotency400` and so on.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from outbox.http.specification import Refusal, Route, Specification

OPENAPI = "3.1.1"
PARAMETER = "IdempotencyKey"
PROBLEM = "IdempotencyProblem"

RETRY_AFTER = {
    "description": "After how many seconds to send the request again.",
    "schema": {"type": "integer", "minimum": 1},
}


def openapi_of(it: Specification) -> dict[str, Any]:
    """The fragment, as JSON has it: the header, the answers to refused requests, and the routes that were named."""
    by_status = groupby(it.refusals, key=lambda refusal: refusal.status)
    responses = {_name(status): _response(it, list(refusals)) for status, refusals in by_status}
    document: dict[str, Any] = {
        "openapi": OPENAPI,
        # Required, and of no meaning in a fragment: what it is merged into has its own.
        "info": {"title": "Idempotency", "version": "0"},
        "components": {
            "parameters": {PARAMETER: _parameter(it)},
            "headers": {"IdempotentReplayed": _replayed(it), "RetryAfter": RETRY_AFTER},
            "responses": responses | _accepted(it),
            "schemas": {PROBLEM: _problem()},
        },
    }
    return document | ({"paths": _paths(it, responses)} if it.routes else {})


def with_refusals(document: dict[str, Any], it: Specification) -> dict[str, Any]:
    """An API's own document, in which every operation that takes the header is given the answers to refused requests.

    What the operation has of such an answer stays: a problem document comes beside another content of the same status.
    """
    ours = openapi_of(it)["components"]
    components = document.setdefault("components", {})
    for kind in ("headers", "schemas"):
        components[kind] = ours[kind] | components.get(kind, {})
    refused = {name.removeprefix(_name("")): answer for name, answer in ours["responses"].items() if name != _name(202)}
    for operation in _operations(document):
        if any(_is_header(parameter, it) for parameter in operation.get("parameters", ())):
            responses = operation.setdefault("responses", {})
            for status, answer in refused.items():
                responses[status] = _joined(responses.get(status, {}), answer)
    return document


def _operations(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    paths = document.get("paths", {}).values()
    return [operation for path in paths for operation in path.values() if isinstance(operation, dict)]


def _is_header(parameter: Mapping[str, Any], it: Specification) -> bool:
    return parameter.get("in") == "header" and str(parameter.get("name", "")).lower() == it.key.header.lower()


def _joined(own: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    both = {kind: ours[kind] | own.get(kind, {}) for kind in ("headers", "content") if kind in ours}
    return {**ours, **own, **both}


def _parameter(it: Specification) -> dict[str, Any]:
    forms = "in double quotes" if it.key.strict else "in double quotes or without them"
    return {
        "name": it.key.header,
        "in": "header",
        "required": True,
        "description": (
            f"The key of this request, {it.key.bytes_min} to {it.key.bytes_max} bytes, {forms}."
            " Create a new key for each new request, and send the same key with each retry."
        ),
        "schema": {"type": "string", "pattern": it.key.pattern},
        "example": it.key.example,
    }


def _replayed(it: Specification) -> dict[str, Any]:
    return {
        "description": f"`{it.replayed_header}`: the request was answered before, and this is the stored answer.",
        "schema": {"type": "string", "const": "true"},
    }


def _problem() -> dict[str, Any]:
    return {
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


def _response(it: Specification, refusals: list[Refusal]) -> dict[str, Any]:
    types = {"properties": {"type": {"enum": [refusal.type for refusal in refusals]}}}
    headers = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}
    return {
        "description": " ".join(f"{refusal.title}. {refusal.remedy}" for refusal in refusals),
        **({"headers": headers} if any(refusal.has_retry_after for refusal in refusals) else {}),
        "content": {
            it.problem_media_type: {
                "schema": {"allOf": [{"$ref": f"#/components/schemas/{PROBLEM}"}, types]},
                "examples": {refusal.name: {"value": _example(refusal)} for refusal in refusals},
            }
        },
    }


def _example(refusal: Refusal) -> dict[str, Any]:
    return {"type": refusal.type, "title": refusal.title, "status": refusal.status, "detail": refusal.remedy}


def _accepted(it: Specification) -> dict[str, Any]:
    if it.status_url is None:
        return {}
    location = {
        "description": f"The URL of the request's status: {it.status_url}",
        "schema": {"type": "string", "format": "uri-reference"},
    }
    headers = {"Location": location, "Retry-After": {"$ref": "#/components/headers/RetryAfter"}}
    return {_name(202): {"description": "The request is accepted and still being processed.", "headers": headers}}


def _paths(it: Specification, responses: Mapping[str, Any]) -> dict[str, Any]:
    refused = {name.removeprefix(_name("")): {"$ref": f"#/components/responses/{name}"} for name in responses}
    paths: dict[str, Any] = {}
    for route in it.routes:
        parameters = [*_path_parameters(route), {"$ref": f"#/components/parameters/{PARAMETER}"}]
        paths.setdefault(route.path, {})[route.method.lower()] = {"parameters": parameters, "responses": refused}
    return paths


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    names = re.findall(r"\{([^{}]+)\}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _name(status: int | str) -> str:
    return f"Idempotency{status}"
