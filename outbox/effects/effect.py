"""`Effect`: an operation together with the types of its payload and of its result."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, overload

from typing_extensions import TypeVar

from outbox.configuration import EFFECT_VERSION
from outbox.default_outbox import default
from outbox.effects.codec import codec_of, require_readable
from outbox.effects.misfit import Misfit
from outbox.entries.enqueue import PerPayload, Written, enqueue, enqueue_many
from outbox.entries.payload import encode_json
from outbox.errors import ConfigurationError, InvalidPayload
from outbox.instance import Outbox
from outbox.keys import ParentKey, check_operation
from outbox.sessions.entry_rows import Entry
from outbox.sessions.session import AnySession

Payload = TypeVar("Payload", default=Any)
Result = TypeVar("Result", default=Any)

Upcaster = Callable[[Any], Any]

MAX_VERSION = 10_000
UNLIMITED_BYTES = 2**31  # the limit of a payload is the outbox's, which is checked with it


class Effect(Generic[Payload, Result]):
    """An operation and the type of its payload, for both sides: the app enqueues it, and a dispatcher handles it.

        receipt = outbox.Effect("receipts.send", Receipt)

        receipt.enqueue(session, Receipt(to="ada@example.com"), parent="order:A-1")

        @effects.handles(receipt)
        async def send(delivery: Delivery[Receipt]) -> Delivered: ...

    name: the operation.
    payload: a pydantic model, a dataclass, a TypedDict, a `msgspec.Struct`, or a type of them such as `list[Receipt]` or
        `Card | Transfer`. Write the type of a union: `charge: Effect[Card | Transfer] = Effect("bank.charge", Card | Transfer)`.
    result: the type of the result that its handler returns in `Delivered`. Without it the result is any JSON.
    version: of the payload's form. Raise it when an older form can no longer be read by `payload` as it is.
    upcasters: for each older version the function that turns its JSON data into that of the next version. They are pure: each
        attempt calls them.

    The version is stored with the entry if it is not 1. The key does not depend on the payload or on its version.
    Raises `InvalidValue` for a malformed name. Raises `ConfigurationError` if the upcasters do not lead to `version`, if neither
    pydantic nor msgspec is installed, or if the type cannot be written as JSON.
    """

    @overload
    def __init__(
        self: "Effect[Payload, Any]",
        name: str,
        payload: type[Payload],
        *,
        version: int = 1,
        upcasters: Mapping[int, Upcaster] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        payload: type[Payload],
        *,
        result: type[Result],
        version: int = 1,
        upcasters: Mapping[int, Upcaster] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        payload: Any,
        *,
        result: Any = None,
        version: int = 1,
        upcasters: Mapping[int, Upcaster] | None = None,
    ) -> None: ...
    def __init__(
        self,
        name: str,
        payload: Any,
        *,
        result: Any = None,
        version: int = 1,
        upcasters: Mapping[int, Upcaster] | None = None,
    ) -> None:
        check_operation(name)
        self.name = name
        self.version = version
        self._upcasters = _checked_upcasters(name, version, upcasters or {})
        self._payload = codec_of(name, payload)
        self._result = None if result is None else codec_of(name, result)
        self._payload_type = payload

    def __repr__(self) -> str:
        version = "" if self.version == 1 else f", version={self.version}"
        return f"Effect({self.name!r}, {_type_name(self._payload_type)}{version})"

    # --- the app's side

    def enqueue(
        self,
        session: AnySession,
        payload: Payload,
        *,
        parent: str | ParentKey | None = None,
        discriminator: str = "",
        destination: str | None = None,
        options: Mapping[str, Any] | None = None,
        due: datetime | timedelta | None = None,
        ordering_key: str | None = None,
        if_exists: Literal["raise", "ignore"] = "raise",
        outbox: Outbox | None = None,
    ) -> Entry:
        """Enqueue this effect in the caller's transaction, as `outbox.enqueue` does. Never awaited.

        payload: exactly of the effect's type. It is written as JSON, read back and compared.
        outbox: the outbox; by default the one of `outbox.configure`.
        Raises what `outbox.enqueue` raises, and `InvalidPayload` if the payload would not be read as it is.
        """
        return enqueue(
            (outbox or default).configuration,
            session,
            self.name,
            self.write(payload),
            parent=parent,
            discriminator=discriminator,
            destination=destination,
            options=options,
            due=due,
            ordering_key=ordering_key,
            if_exists=if_exists,
        )

    def enqueue_many(
        self,
        session: AnySession,
        payloads: Iterable[Payload],
        *,
        parent: PerPayload[str | ParentKey | None, Payload] = None,
        discriminator: PerPayload[str, Payload] = "",
        destination: PerPayload[str | None, Payload] = None,
        options: PerPayload[Mapping[str, Any] | None, Payload] = None,
        due: PerPayload[datetime | timedelta | None, Payload] = None,
        ordering_key: PerPayload[str | None, Payload] = None,
        if_exists: Literal["raise", "ignore"] = "raise",
        outbox: Outbox | None = None,
    ) -> list[Entry]:
        """Enqueue this effect once for each payload, all or none. See `outbox.enqueue_many`."""
        return enqueue_many(
            (outbox or default).configuration,
            session,
            self.name,
            payloads,
            self.write,
            parent=parent,
            discriminator=discriminator,
            destination=destination,
            options=options,
            due=due,
            ordering_key=ordering_key,
            if_exists=if_exists,
        )

    def write(self, payload: Payload) -> Written:
        """The payload as JSON, for `enqueue`. Raises `InvalidPayload` if it would not be read as it is, and `NotSerializable`."""
        try:
            data = self._payload.dump(payload)
            text = encode_json(f"payload of {self.name}", data, UNLIMITED_BYTES)
            require_readable(self._payload, payload, text)
        except Misfit as misfit:
            way_out = f"give a {_type_name(self._payload_type)} that its own JSON carries without loss"
            raise self._invalid("payload", misfit, f"{misfit.problem}; {way_out}") from None
        return Written(data, text, self.version)

    # --- the dispatcher's side

    @property
    def has_result_type(self) -> bool:
        return self._result is not None

    def read(self, text: bytes, options: Mapping[str, Any]) -> Payload:
        """The payload of a stored entry, from its JSON and its options, after the upcasters of older versions.

        Raises `InvalidPayload` if this process cannot read it: its version is newer, or it does not fit the type.
        """
        version = options.get(EFFECT_VERSION, 1)
        current = text if version == self.version else self._upcast(text, version)
        try:
            payload: Payload = self._payload.load(current)
        except Misfit as misfit:
            problem = f"{misfit.problem}; it does not fit the {_type_name(self._payload_type)} of this process"
            raise self._invalid("payload", misfit, problem) from None
        return payload

    def write_result(self, result: Result | None) -> Any:
        """The result as JSON data. Raises `InvalidPayload` if it would not be read as it is, and `NotSerializable`."""
        if self._result is None or result is None:
            return result
        try:
            data = self._result.dump(result)
            require_readable(self._result, result, encode_json("result", data, UNLIMITED_BYTES))
        except Misfit as misfit:
            raise self._invalid("result", misfit, misfit.problem) from None
        return data

    def read_result(self, data: Any) -> Result | None:
        """The result from its JSON data. Raises `InvalidPayload` if it does not fit the type."""
        if self._result is None or data is None:
            return data  # type: ignore[no-any-return]
        try:
            result: Result = self._result.load(encode_json("result", data, UNLIMITED_BYTES))
        except Misfit as misfit:
            problem = f"{misfit.problem}; it does not fit the type of this process"
            raise self._invalid("result", misfit, problem) from None
        return result

    def _upcast(self, text: bytes, version: Any) -> bytes:
        """The JSON in this effect's version. version: the stored one."""
        if type(version) is not int or version > self.version:
            problem = f"version {version} is stored, and this process reads versions up to {self.version}"
            raise InvalidPayload(self.name, "payload", problem)
        step = version
        try:
            data = json.loads(text)
            for step in range(version, self.version):
                if step not in self._upcasters:
                    problem = f"version {version} is stored, and this process has no upcaster from version {step}"
                    raise InvalidPayload(self.name, "payload", problem)
                data = self._upcasters[step](data)
            return encode_json("payload", data, UNLIMITED_BYTES)
        except InvalidPayload:
            raise
        except Exception as error:  # the app's function; what it raises may show the value
            problem = f"the upcaster from version {step} raised {type(error).__name__}"
        raise InvalidPayload(self.name, "payload", problem)

    def _invalid(self, whole: str, misfit: Misfit, problem: str) -> InvalidPayload:
        return InvalidPayload(self.name, f"{whole}.{misfit.field}" if misfit.field else whole, problem)


def _checked_upcasters(name: str, version: object, upcasters: object) -> Mapping[int, Upcaster]:
    if type(version) is not int or not 1 <= version <= MAX_VERSION:
        raise ConfigurationError(f"Effect({name!r}): version={version!r} must be a number from 1 to {MAX_VERSION}")
    if not isinstance(upcasters, Mapping) or not all(map(callable, upcasters.values())):
        raise ConfigurationError(
            f"Effect({name!r}): upcasters must be a mapping from older versions to functions, such as {{1: from_1_to_2}}"
        )
    if any(map(inspect.iscoroutinefunction, upcasters.values())):
        raise ConfigurationError(f"Effect({name!r}): an upcaster is an `async def`, but must be a plain function")
    oldest = version - len(upcasters)
    if sorted(upcasters, key=repr) != sorted(range(oldest, version), key=repr) or oldest < 1:
        raise ConfigurationError(
            f"Effect({name!r}): upcasters from the versions {list(upcasters)} do not lead to version {version}: give one for each"
            f" version from the oldest that may still be stored up to {version - 1}"
        )
    return dict(upcasters)


def _type_name(type_: Any) -> str:
    return type_.__name__ if isinstance(type_, type) and not _arguments(type_) else str(type_).replace("typing.", "")


def _arguments(type_: Any) -> Sequence[Any]:
    arguments: Sequence[Any] = getattr(type_, "__args__", ())
    return arguments
