"""Where a service takes the key: a header, a member of the body, the query, or an argument of GraphQL; or nowhere."""

import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeAlias

from dispatchers.adapters.providers.json_paths import PATH
from dispatchers.delivery import NATIVE, KeyFormat
from outbox.errors import ConfigurationError

KEY: Final = "{key}"
"""What a mark's value, a search or a lookup's path contains in the place of the key."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header of the request: `Header("Idempotency-Key", KeyFormat(max_chars=256))`."""

    name: str
    form: KeyFormat = NATIVE


@dataclass(frozen=True, slots=True)
class BodyField:
    """A member of the request's body, by its dotted path: `BodyField("idempotency_key", KeyFormat(max_chars=45))`."""

    path: str
    form: KeyFormat = NATIVE

    def __post_init__(self) -> None:
        check_path("BodyField", self.path)


@dataclass(frozen=True, slots=True)
class QueryField:
    """A parameter of the request's URL."""

    name: str
    form: KeyFormat = NATIVE


@dataclass(frozen=True, slots=True)
class GraphQLArgument:
    """A variable of a GraphQL request, by its dotted path below `variables`: `input.apiRequestKey`.

    used_as: what the request's `query` must contain, apart from spaces, texts and comments, so that the service reads the
        variable: `@idempotent(key: $key)`. A request without it would have no key.
    """

    path: str
    form: KeyFormat = NATIVE
    _: KW_ONLY
    used_as: str

    def __post_init__(self) -> None:
        check_path("GraphQLArgument", self.path)

    def is_read_by(self, query: object) -> bool:
        return isinstance(query, str) and _dense(self.used_as) in _dense(_UNREAD.sub(" ", query))


@dataclass(frozen=True, slots=True)
class Mark:
    """A member of the body that the service stores and can search: `Mark("custom_args.outbox_key")`.

    path: of the member; `EmailTags[]` appends to a list. value: JSON with `{key}` in one of its texts.
    """

    path: str
    value: Any = field(default=KEY, hash=False)

    def __post_init__(self) -> None:
        check_path("Mark", self.path.removesuffix("[]"))
        if KEY not in str(self.value):
            raise ConfigurationError(f"Mark({self.path!r}): value={self.value!r} must contain {KEY!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoKey:
    """The service has no keys: a request that is sent twice is executed twice.

    mark: where the child key is put, so that an operator or a lookup finds the effect. search: where at the service an operator
    looks, with `{key}` in it: "Activity > Search, custom argument outbox_key = {key}".
    """

    mark: Mark | None = None
    search: str | None = None


@dataclass(frozen=True, slots=True)
class NaturalKey:
    """The request names what it writes, such as an upsert by an external id: sent twice, it has one effect.

    what: the service's word for the name.
    """

    what: str


KeyPlace: TypeAlias = Header | BodyField | QueryField | GraphQLArgument | NoKey | NaturalKey
Keyed: TypeAlias = Header | BodyField | QueryField | GraphQLArgument


def check_path(owner: str, path: object) -> None:
    if not isinstance(path, str) or not PATH.fullmatch(path) or "[]" in path:
        raise ConfigurationError(f"{owner}({path!r}): the path must be names joined by dots, such as 'input.key'")


def where(place: KeyPlace) -> str:
    """Where the service reads the key, which it does not find elsewhere; empty without a key."""
    match place:
        case Header(name=name):
            return f"key in {name}"
        case BodyField(path=path) | GraphQLArgument(path=path) | QueryField(name=path):
            return f"key at {path}"
        case _:
            return ""


def with_key(template: Any, key: str) -> Any:
    """The JSON with the key in its place."""
    match template:
        case str():
            return template.replace(KEY, key)
        case dict():
            return {name: with_key(each, key) for name, each in template.items()}
        case list() | tuple():
            return [with_key(each, key) for each in template]
        case _:
            return template


_UNREAD: Final = re.compile(r'"""(?:\\"""|[^"]|"(?!""))*"""|"(?:\\.|[^"\\\n\r])*"|#[^\n\r]*')
"""Texts and comments of GraphQL. Source: its specification, 2.1.4 and 2.9.4."""


def _dense(text: str) -> str:
    return "".join(text.split())
