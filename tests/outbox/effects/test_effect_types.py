"""Typed effects: which values are written and read back, and which are refused, by pydantic and by msgspec."""

import collections
import datetime as dt
import ipaddress
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from itertools import count
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

import outbox
from outbox import Effect, InvalidPayload
from outbox.errors import ConfigurationError, NotSerializable

SECRET = "ada@example.com"


class Colour(Enum):
    RED = "red"
    ONE = 1


class Receipt(pydantic.BaseModel):
    to: str
    amount: Decimal = Decimal("1.10")
    at: dt.datetime | None = None
    colour: Colour = Colour.RED
    lines: list["Line"] = []


class Line(pydantic.BaseModel):
    number: int
    price: Decimal


class LongReceipt(Receipt):
    copies: int = 1


class Entity(pydantic.BaseModel):
    """Two are equal if their ids are."""

    id: int
    note: str = pydantic.Field(default="", exclude=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entity) and self.id == other.id

    __hash__ = None  # type: ignore[assignment]


class LongEntity(Entity):
    copies: int = 1


@dataclass
class Uncompared:
    line: Line = field(compare=False)


class LongLine(Line):
    text: str = ""


@dataclass
class Plain:
    to: str
    id: UUID | None = None
    tags: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Identity:
    to: str


class Typed(TypedDict):
    to: str
    at: dt.datetime


class Struct(msgspec.Struct):
    to: str
    amount: Decimal = Decimal(1)
    at: dt.datetime | None = None
    id: UUID | None = None


class LongStruct(Struct):
    copies: int = 1


class Card(pydantic.BaseModel):
    kind: Literal["card"] = "card"
    number: str


class Transfer(pydantic.BaseModel):
    kind: Literal["transfer"] = "transfer"
    iban: str


Item = TypeVar("Item")


class Envelope(pydantic.BaseModel, Generic[Item]):
    content: Item


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    to: str


class Computed(pydantic.BaseModel):
    to: str

    @pydantic.computed_field
    def copy_to(self) -> str:
        return self.to


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, populate_by_name=True)
    amount_due: int = pydantic.Field(alias="amountDue")


class Renamed(pydantic.BaseModel):
    email: str = pydantic.Field(validation_alias=pydantic.AliasChoices("email", "to"))


class Private(pydantic.BaseModel):
    to: str
    _cache: int = pydantic.PrivateAttr(default=0)


class Secret(pydantic.BaseModel):
    token: pydantic.SecretStr


class Hidden(pydantic.BaseModel):
    to: str
    note: str = pydantic.Field(default="", exclude=True)


class Place(NamedTuple):
    x: int
    y: int = 0


class Strange(pydantic.BaseModel):
    to: str

    @pydantic.field_validator("to")
    @classmethod
    def check(cls, to: str) -> str:
        if to == SECRET:
            raise ValueError(f"{to} is refused")
        return to.strip()


NOW = dt.datetime(2026, 11, 27, 12, tzinfo=dt.UTC)
ID = UUID("00000000-0000-8000-8000-000000000001")
PRIVATE = Private(to="a")
PRIVATE._cache = 5

CARRIED: list[tuple[Any, Any]] = [
    (Receipt, Receipt(to="a", at=NOW, lines=[Line(number=1, price=Decimal("9.90"))])),
    (Plain, Plain("a", ID, {"x", "y"})),
    (Identity, Identity("a")),
    (Typed, {"to": "a", "at": NOW}),
    (Struct, Struct("a", Decimal("1.00"), NOW, ID)),
    (list[Struct], [Struct("a")]),
    (Card | Transfer, Transfer(iban="x")),
    (Annotated[Card | Transfer, pydantic.Field(discriminator="kind")], Card(number="1")),
    (Envelope[Receipt], Envelope[Receipt](content=Receipt(to="a"))),
    (Envelope[int], Envelope(content=5)),
    (list[Receipt | LongReceipt], [Receipt(to="a"), LongReceipt(to="b", copies=2)]),
    (Open, Open.model_validate({"to": "a", "more": {"x": 1}})),
    (Computed, Computed(to="a")),
    (Aliased, Aliased(amountDue=5)),
    (Renamed, Renamed(to="a")),  # type: ignore[call-arg]
    (Private, PRIVATE),
    (Hidden, Hidden(to="a")),
    (Entity, Entity(id=1)),
    (Uncompared, Uncompared(Line(number=1, price=Decimal(1)))),
    (Place, Place(1, 2)),
    (dict[str, int], {"a": 1}),
    (dict[UUID, Decimal], {ID: Decimal("0.1")}),
    (dict[int, str], {1: "a"}),
    (tuple[int, ...], (1, 2)),
    (Sequence[int], (1, 2)),
    (frozenset[str], frozenset("ab")),
    (collections.deque[int], collections.deque([1])),
    (int, 10**400),
    (float, 1),
    (dt.datetime, dt.datetime(2020, 1, 1)),  # naive stays naive
    (dt.datetime, dt.datetime.max),
    (dt.datetime, dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30)))),
    (
        list[dt.datetime],
        [dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))],
    ),  # its second 2:30
    (dt.timedelta, dt.timedelta(days=-1, microseconds=3)),
    (dt.date, dt.date(1, 1, 1)),
    (pathlib.PurePosixPath, pathlib.PurePosixPath("/a")),
    (ipaddress.IPv4Address, ipaddress.IPv4Address("10.0.0.1")),
    (int | None, None),
    (int | str, "1"),
    (Decimal | float, Decimal("1.5")),
    (bytes, b"text"),
    (Any, {"a": [1, None, "x"]}),
]

REFUSED: list[tuple[Any, Any, str]] = [
    (Receipt, LongReceipt(to="a"), "payload: a LongReceipt would be read as a Receipt: use exactly the declared type"),
    (
        Envelope[Receipt],
        Envelope(content=LongReceipt(to="a")),
        "payload.content: a LongReceipt would be read as a Receipt",
    ),
    (list[Receipt], [Receipt(to="a"), LongReceipt(to="b")], "payload.1: a LongReceipt would be read as a Receipt"),
    (Entity, LongEntity(id=1), "payload: a LongEntity would be read as a Entity: use exactly the declared type"),
    (list[Entity], [Entity(id=1, note=SECRET)], "payload.0.note: another str would be read"),
    (Uncompared, Uncompared(LongLine(number=1, price=Decimal(1))), "payload.line: a LongLine would be read as a Line"),
    (Struct, LongStruct("a"), "payload.copies: is not a field of this type, so it would be lost"),
    (Receipt, {"to": "a"}, "payload: a dict would be read as a Receipt"),
    (Receipt, None, "payload: must be a valid model"),
    (Receipt, Receipt.model_construct(to=5), "payload.to: must be a valid string"),  # type: ignore[arg-type]
    (Plain, Plain(5), "payload.to: must be a valid string"),  # type: ignore[arg-type]
    (Struct, Struct(5), "payload.to: Expected `str`, got `int`"),  # type: ignore[arg-type]
    (Secret, Secret(token=pydantic.SecretStr(SECRET)), "payload.token: another SecretStr would be read"),
    (Hidden, Hidden(to="a", note=SECRET), "payload.note: another str would be read"),
    (Strange, Strange.model_construct(to=SECRET), "payload.to: its validator refuses it"),
    (Strange, Strange.model_construct(to=" a"), "payload.to: another str would be read"),
    (Typed, {"to": "a"}, "payload.at: is required"),
    (Typed, {"to": "a", "at": NOW, "more": 1}, "payload.more: is not a field of this type"),
    (dict[str, int], {SECRET: "x"}, "payload.*: must be a valid int"),
    (int, "5", "payload: must be a valid int"),
    (int, 1.0, "payload: must be a valid int"),
    (float, "1.5", "payload: must be a valid float"),
    (Decimal, 5.5, "payload: a float would be read as a Decimal"),
    (dict[str, list[Decimal]], {"a": [Decimal(1), 5.5]}, "payload.*.1: a float would be read as a Decimal"),
    (Colour, "red", "payload: a str would be read as a Colour"),
    (Any, NOW, "payload: a datetime would be read as a str"),
    (dt.datetime | str, "2020-01-01T00:00:00Z", "payload: a str would be read as a datetime"),
    (dt.datetime, dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=7))), "payload: another datetime"),
    (dict[tuple[int, int], int], {(1, 2): 1}, "payload.*.*: must be a valid tuple"),
    (Decimal, Decimal("NaN"), "payload: is refused (finite number)"),
    (bytes, b"\xff", "payload: cannot be written as JSON (UnicodeDecodeError)"),
    (object, object(), "payload: cannot be written as JSON (PydanticSerializationError)"),
    (
        Annotated[Card | Transfer, pydantic.Field(discriminator="kind")],
        Card.model_construct(kind=SECRET),
        "payload: is refused",
    ),
]


def written(type_: Any, value: Any) -> bytes:
    return Effect("receipts.send", type_).write(value).text


def named(case: Sequence[Any], number: int) -> str:
    """The test's name for a case, which is the same in each process: the text of a value may not be."""
    return f"{getattr(case[0], '__name__', 'generic')}-{number}"


@pytest.mark.parametrize(("type_", "value"), CARRIED, ids=map(named, CARRIED, count(1)))
def test_what_is_written_is_read_back_equal(type_: Any, value: Any) -> None:
    effect: Effect[Any] = Effect("receipts.send", type_)

    read = effect.read(effect.write(value).text, {})

    assert type(read) is type(value) or isinstance(value, (int, tuple, Envelope))
    if isinstance(value, Identity | Private):
        assert read.to == value.to
    elif type_ == list[dt.datetime]:
        assert [each.astimezone(dt.UTC) for each in read] == [each.astimezone(dt.UTC) for each in value]
    else:
        assert read == value or list(read) == list(value)


@pytest.mark.parametrize(("type_", "value", "says"), REFUSED, ids=map(named, REFUSED, count(1)))
def test_what_json_does_not_carry_is_refused(type_: Any, value: Any, says: str) -> None:
    with pytest.raises(InvalidPayload) as refused:
        written(type_, value)

    assert str(refused.value).startswith(f"receipts.send: {says}")
    assert SECRET not in "".join([str(refused.value), repr(refused.value), repr(refused.value.__dict__)])
    assert (refused.value.effect, refused.value.value) == ("receipts.send", None)
    context = refused.value.__context__
    assert SECRET not in repr(context)


@pytest.mark.parametrize(("type_", "value"), [(float, float("nan")), (float, float("inf")), (Struct, Struct("\ud800"))])
def test_what_is_no_json_is_refused_as_any_payload(type_: Any, value: Any) -> None:
    with pytest.raises((NotSerializable, InvalidPayload)):
        written(type_, value)


def test_the_json_is_that_of_a_plain_payload() -> None:
    data = {"to": "ä", "id": None, "tags": ["x"]}
    assert written(Plain, Plain("ä", None, {"x"})) == '{"to":"ä","id":null,"tags":["x"]}'.encode()
    assert Effect("receipts.send", Plain).read(b'{"tags": ["x"], "to": "\\u00e4"}', {}) == Plain("ä", None, {"x"})
    assert Effect("a.b", Plain).write(Plain("ä", None, {"x"})).data == data


# --- reading what another release wrote


@pytest.mark.parametrize(
    ("type_", "stored", "says"),
    [
        (Receipt, b'{"to":"a","cc":"b"}', "payload.cc: is not a field of this type, so it would be lost"),
        (Plain, b'{"to":"a","cc":"b"}', "payload.cc: is not a field of this type, so it would be lost"),
        (Struct, b'{"to":"a","cc":"b"}', "payload.cc: is not a field of this type, so it would be lost"),
        (list[Struct], b'[{"to":"a","cc":"b"}]', "payload.cc: is not a field of this type, so it would be lost"),
        (Receipt, b'{"to":"a","lines":[{"number":1,"price":"1","more":2}]}', "payload.lines.0.more: is not a field"),
        (Receipt, b'{"too":"a"}', "payload.to: is required; too: is not a field"),
        (Computed, b'{"to":"a","copy_to":"a","more":1}', "payload.copy_to: is not a field"),
        (Strange, b'{"to":"ada@example.com"}', "payload.to: its validator refuses it"),
        (Receipt, b"[1", "payload: is not valid JSON"),
        (Struct, b"{", "payload: cannot be read (DecodeError)"),
    ],
    ids=str,
)
def test_a_stored_payload_that_does_not_fit_is_not_read(type_: Any, stored: bytes, says: str) -> None:
    with pytest.raises(InvalidPayload) as refused:
        Effect("receipts.send", type_).read(stored, {})

    assert str(refused.value).startswith(f"receipts.send: {says}")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("type_", "stored", "read"),
    [
        (Receipt, b'{"to":"a"}', Receipt(to="a")),
        (Struct, b'{"to":"a"}', Struct("a")),
        (Renamed, b'{"to":"a"}', Renamed(email="a")),
        (Open, b'{"to":"a","more":[{"x":1}]}', Open.model_validate({"to": "a", "more": [{"x": 1}]})),
    ],
    ids=str,
)
def test_a_field_with_a_default_may_be_missing(type_: Any, stored: bytes, read: Any) -> None:
    assert Effect("receipts.send", type_).read(stored, {}) == read


# --- versions


def from_1_to_2(data: Any) -> Any:
    return {"to": data["email"]}


def from_2_to_3(data: Any) -> Any:
    data["amount"] = "2"
    return data


async def upcast_later(data: Any) -> Any:
    return data


RECEIPT_3 = Effect("receipts.send", Receipt, version=3, upcasters={1: from_1_to_2, 2: from_2_to_3})


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        (b'{"email":"a"}', {}),
        (b'{"to":"a"}', {"effect_version": 2}),
        (b'{"to":"a","amount":"2"}', {"effect_version": 3, "account": "acct_1"}),
    ],
)
def test_older_versions_are_brought_forward_in_order(stored: bytes, options: dict[str, Any]) -> None:
    assert RECEIPT_3.read(stored, options) == Receipt(to="a", amount=Decimal(2))


@pytest.mark.parametrize(
    ("effect", "stored", "options", "says"),
    [
        (RECEIPT_3, b"{}", {"effect_version": 4}, "version 4 is stored, and this process reads versions up to 3"),
        (RECEIPT_3, b"{}", {"effect_version": "3"}, "version 3 is stored, and this process reads versions up to 3"),
        (RECEIPT_3, b"{}", {}, "the upcaster from version 1 raised KeyError"),
        (RECEIPT_3, b"[]", {"effect_version": 2}, "the upcaster from version 2 raised TypeError"),
        (
            Effect("receipts.send", Receipt, version=2),
            b"{}",
            {},
            "version 1 is stored, and this process has no upcaster from version 1",
        ),
        (
            Effect("receipts.send", Receipt, version=2, upcasters={1: lambda data: NOW}),
            b"{}",
            {},
            "the upcaster from version 1 raised NotSerializable",
        ),
    ],
)
def test_a_version_that_cannot_be_read_says_why(
    effect: Effect[Any], stored: bytes, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidPayload) as refused:
        effect.read(stored, options)

    assert str(refused.value) == f"receipts.send: payload: {says}"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"version": 0}, "version=0 must be a number from 1 to 10000"),
        ({"version": True}, "version=True must be a number from 1 to 10000"),
        ({"version": 2, "upcasters": {2: from_1_to_2}}, r"upcasters from the versions \[2\] do not lead to version 2"),
        ({"version": 3, "upcasters": {1: from_1_to_2}}, r"upcasters from the versions \[1\] do not lead to version 3"),
        ({"version": 2, "upcasters": {0: from_1_to_2, 1: from_1_to_2}}, "do not lead to version 2"),
        ({"upcasters": {1: from_1_to_2}}, "do not lead to version 1"),
        ({"version": 2, "upcasters": {1: upcast_later}}, "an upcaster is an `async def`"),
        ({"version": 2, "upcasters": {1: "from_1_to_2"}}, "must be a mapping from older versions to functions"),
    ],
)
def test_upcasters_that_do_not_lead_to_the_version_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Effect("receipts.send", Receipt, **settings)


@pytest.mark.parametrize("type_", [type("Opaque", (), {}), list["Nowhere"], "Receipt"])  # type: ignore[name-defined] # noqa: F821
def test_a_type_that_cannot_be_written_is_refused_at_the_start(type_: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^Effect\('receipts.send'\): "):
        Effect("receipts.send", type_)


def test_a_malformed_name_is_refused_at_the_start() -> None:
    with pytest.raises(outbox.InvalidValue, match="operation 'Receipts': must be lower-case words"):
        Effect("Receipts", Receipt)


# --- any type at all

LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers()),
    (str, st.text(st.characters(exclude_categories=["Cs"]))),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False, places=4)),
    (UUID, st.uuids()),
    (dt.date, st.dates()),
    (dt.datetime, st.datetimes(timezones=st.just(dt.UTC))),
    (Colour, st.sampled_from(Colour)),
    (int | None, st.none() | st.integers()),
]


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """A type, and what generates its values."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(LEAVES))
    type_, values = draw(typed_values(depth - 1))
    shapes: Iterator[tuple[Any, Any]] = iter(
        [
            (list[type_], st.lists(values, max_size=3)),
            (dict[str, type_], st.dictionaries(LEAVES[1][1], values, max_size=3)),
            (tuple[type_, int], st.tuples(values, st.integers())),
            (Envelope[type_], st.builds(Envelope[type_], content=values)),
        ]
    )
    return draw(st.sampled_from(list(shapes)))


@given(st.data())
def test_a_value_of_any_type_is_read_back_equal(data: st.DataObject) -> None:
    type_, values = data.draw(typed_values())
    value = data.draw(values)
    effect: Effect[Any] = Effect("receipts.send", type_)

    assert effect.read(effect.write(value).text, {}) == value


STRUCT_LEAVES = [leaf for leaf in LEAVES if leaf[0] is not Colour]


@given(st.data())
def test_a_struct_of_any_field_is_read_back_equal(data: st.DataObject) -> None:
    type_, values = data.draw(st.sampled_from(STRUCT_LEAVES))
    if type_ is int:
        values = st.integers(-(2**63), 2**63 - 1)
    if type_ == int | None:
        values = st.none() | st.integers(-(2**63), 2**63 - 1)
    struct = msgspec.defstruct("Any", [("value", type_), ("many", list[type_])])
    value = struct(data.draw(values), data.draw(st.lists(values, max_size=3)))
    effect: Effect[Any] = Effect("receipts.send", struct)

    assert effect.read(effect.write(value).text, {}) == value
