"""The JSON API as an OpenAPI 3.1 document, from the registered views and actions. Pure."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from dispatchers.dashboard.actions import Action
from dispatchers.dashboard.failures import PROBLEM
from dispatchers.dashboard.json_schema import Schemas, required_of
from dispatchers.dashboard.protection import COOKIE, HEADER
from dispatchers.dashboard.views import View

PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["title", "status", "code", "detail"],
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "The kind of the problem, for programs."},
        "detail": {"type": "string", "description": "What happened and what to do."},
        "field": {"type": "string", "description": "The parameter that is wrong."},
    },
}
PROBLEMS = {
    "400": "An unknown parameter, or a malformed request.",
    "401": "The request is not authenticated.",
    "403": "The identity has not the role, or the request came from another origin.",
    "404": "The entry does not exist.",
    "409": "The state of the entry does not allow the decision.",
    "422": "A parameter is not valid.",
    "503": "The database did not answer in time.",
}
DESCRIPTION = (
    "Everything that the dashboard shows and decides, under the same rights. A request is authenticated as the host app does it."
    f" An action needs a CSRF token, unless `Authorization: Bearer` authenticates it: send the cookie `{COOKIE}` and the header"
    f" `{HEADER}` with one value of 43 characters."
)


def document(views: Sequence[View], actions: Sequence[Action], server: str) -> dict[str, Any]:
    """The document. server: the path of the API, with the dashboard's prefix."""
    schemas = Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for view in views:
        paths.setdefault(view.api_path, {})["get"] = _view(view, schemas)
    for action in actions:
        paths.setdefault(action.path, {})["post"] = _action(action, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sqlalchemy-outbox dashboard", "version": "1", "description": DESCRIPTION},
        "servers": [{"url": server}],
        "paths": paths,
        "components": {"schemas": {"Problem": PROBLEM_SCHEMA} | schemas.named},
    }


def _view(view: View, schemas: Schemas) -> dict[str, Any]:
    return {
        "operationId": view.name,
        "summary": view.summary,
        "x-role": str(view.role),
        "parameters": _parameters(view.query, view.path, schemas),
        "responses": _responses(view.result, schemas),
    }


def _action(action: Action, schemas: Schemas) -> dict[str, Any]:
    in_path = set(_path_names(action.path))
    body = schemas.object_of(action.form, without=in_path)
    return {
        "operationId": action.name,
        "summary": action.summary,
        "x-role": str(action.role),
        "parameters": [each for each in _parameters(action.form, action.path, schemas) if each["in"] == "path"],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _responses(action.result, schemas),
    }


def _path_names(path: str) -> list[str]:
    return re.findall(r"\{(\w+)", path)


def _parameters(kind: type, path: str, schemas: Schemas) -> list[dict[str, Any]]:
    hints, in_path = get_type_hints(kind), _path_names(path)
    return [
        {
            "name": each.name,
            "in": "path" if each.name in in_path else "query",
            "required": each.name in in_path or required_of(each),
            "description": each.metadata.get("description", ""),
            "schema": schemas.of_field(each, hints[each.name]),
        }
        for each in fields(kind)
    ]


def _responses(result: type, schemas: Schemas) -> dict[str, Any]:
    answer = {"description": "The answer.", "content": {"application/json": {"schema": schemas.of(result)}}}
    problem = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {"200": answer} | {status: {"description": text, "content": problem} for status, text in PROBLEMS.items()}
