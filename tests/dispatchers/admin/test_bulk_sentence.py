"""What a decision in bulk says: of each filter another sentence, whose command selects the same and whose count is exact."""

import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import click
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.entries import put
from support.examples import divided

import outbox
from dispatchers.admin.decide.bulk import BulkDecision, decide, preview
from dispatchers.admin.decide.bulk_sentence import command_line, conditions, sentence
from dispatchers.admin.read.entry_filter import ENDED_STATES, WAITING_STATES, Filter, ParentWanted
from dispatchers.admin.read.payload_filter import Member
from dispatchers.cli import filters
from outbox.times import NEVER

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))


def some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


MEMBERS = st.builds(Member, path=st.sampled_from(["campaign", "order.country", "ünï"]), value=NAMES)
STATES = st.sampled_from([WAITING_STATES, ENDED_STATES]).flatmap(
    lambda kind: st.lists(st.sampled_from(kind), min_size=1, unique=True).map(tuple)
)
FILTERS = st.builds(
    Filter,
    states=STATES,
    operation=some(st.sampled_from(["crm", "crm.upsert", "stripe.refunds"])),
    destination=some(NAMES),
    parent=some(
        st.builds(ParentWanted, key=NAMES, env=some(NAMES), scope=some(NAMES), source=some(st.sampled_from(["app"])))
    ),
    parent_prefix=some(NAMES),
    payload=st.lists(MEMBERS, max_size=2).map(tuple),
    ordering_key=some(NAMES),
    reason=some(NAMES),
    suspended=st.booleans(),
    since=some(MOMENTS),
    enqueued_since=some(MOMENTS),
    enqueued_before=some(MOMENTS),
)


# --- pure


@given(FILTERS, FILTERS)
def test_two_filters_never_read_alike(one: Filter, other: Filter) -> None:
    assert (conditions(one) == conditions(other)) == (one == other)


@given(FILTERS)
def test_the_command_selects_what_the_filter_does(wanted: Filter) -> None:
    found: list[Filter] = []

    @click.command()
    @click.option("--reason")
    @filters.filter_options
    def read(given: Any, reason: str) -> None:
        found.append(filters.filter_of(given, ()))

    words = shlex.split(command_line("cancel", None, wanted))
    read.main(words[2:], standalone_mode=False)

    assert words[:2] == ["outbox", "cancel"]
    assert found == [wanted]


@pytest.mark.parametrize(
    ("count", "says"), [(1, "cancel 1 entry that is pending"), (1284, "cancel 1,284 entries that are pending")]
)
def test_a_count_is_written_as_people_read_it(count: int, says: str) -> None:
    assert sentence("cancel", None, Filter(states=("pending",)), count) == says


def test_every_condition_is_in_the_sentence() -> None:
    wanted = Filter(
        states=("pending", "retry", "uncertain"),
        operation="stripe.charges",
        destination="stripe",
        parent=ParentWanted("order:1", "prod", "acct_1", "http"),
        parent_prefix="order:",
        payload=(Member("order.country", "FR"),),
        ordering_key="ada",
        reason="card_declined",
        suspended=True,
        since=datetime(2026, 1, 31, 12, tzinfo=UTC),
        enqueued_before=timedelta(hours=2),
    )

    assert sentence("resolve", "happened", wanted, 2) == (
        "record for 2 entries that are pending, retry or uncertain, that are suspended, of operation 'stripe.charges' or below"
        " it, for destination 'stripe', under parent 'order:1', of env 'prod', of scope 'acct_1', of source 'http', under"
        " parents that begin with 'order:', with 'order.country' = 'FR' in the payload, of ordering key 'ada', with"
        " 'card_declined' in the reason, due at 2026-01-31T12:00:00Z or later, enqueued before 7200 s ago:"
        " that it happened"
    )


# --- against the database

OPERATIONS = ("crm.upsert", "crm.delete", "mail.send")
WORLDS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.sampled_from(["pending", "retry", "uncertain"]),
        st.booleans(),  # suspended
        st.sampled_from([None, "ada", "bob"]),  # the ordering key
        st.sampled_from([None, "busy", "card_declined"]),  # the reason
    ),
    min_size=1,
    max_size=6,
)
WANTED = st.builds(
    Filter,
    states=st.lists(st.sampled_from(["pending", "retry"]), min_size=1, unique=True).map(tuple),
    operation=some(st.sampled_from(["crm", "crm.upsert", "mail", "cr"])),
    destination=some(st.sampled_from(["crm", "mail"])),
    ordering_key=some(st.sampled_from(["ada", "bob"])),
    reason=some(st.sampled_from(["busy", "card"])),
    suspended=st.booleans(),
)


def meets(wanted: Filter, made: tuple[str, str, bool, str | None, str | None]) -> bool:
    """The filter again, in plain Python."""
    operation, state, suspended, key, reason = made
    return (
        state in wanted.states
        and (wanted.operation is None or f"{operation}.".startswith(f"{wanted.operation}."))
        and wanted.destination in (None, operation.partition(".")[0])
        and wanted.ordering_key in (None, key)
        and (wanted.reason is None or wanted.reason in (reason or "") or (suspended and wanted.reason in "a clone"))
        and (suspended or not wanted.suspended)
    )


@settings(max_examples=divided(over=2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=WORLDS, wanted=WANTED)
def test_the_count_of_the_sentence_is_what_changes(
    database: Database, ob: outbox.Outbox, world: list[tuple[str, str, bool, str | None, str | None]], wanted: Filter
) -> None:
    for table in (TABLES.queue, TABLES.entry, TABLES.event, TABLES.audit):
        database.execute(sa.delete(table))
    ids = [put(database, ob, made[0], parent=f"p:{n}", ordering_key=made[3])[0] for n, made in enumerate(world)]
    for id, (_, state, suspended, _, reason) in zip(ids, world, strict=True):
        values: dict[str, Any] = {"state": state, "maybe_sent": state == "uncertain"}
        values |= {"suspended_reason": "a clone", "due_at": NEVER} if suspended else {}
        values |= {"outcome": f'{{"reason": "{reason}"}}'} if reason else {}
        database.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id == id).values(values))
    decision = BulkDecision(action="cancel", actor="ada", reason="a drill")

    with database.engine.connect() as connection:
        found = preview(connection, TABLES, wanted, decision)
    for _ in decide(database.engine, TABLES, decision, found, pause=lambda seconds: None):
        pass

    matching = {id: made for id, made in zip(ids, world, strict=True) if meets(wanted, made)}
    expected: set[UUID] = {id for id, made in matching.items() if not made[2]}
    changed = [row.entry_id for row in database.rows(TABLES.event) if row.kind == "decision"]
    assert (set(found.ids), sum(found.left_alone.values())) == (expected, len(matching) - len(expected))
    assert sorted(changed) == sorted(expected)
    assert found.sentence == sentence("cancel", None, wanted, len(expected))
    assert sum(row.count for row in database.rows(TABLES.audit)) == len(expected)
    assert replace(wanted) == found.wanted
