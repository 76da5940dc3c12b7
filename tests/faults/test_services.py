"""Far sides that misbehave, met by a whole dispatcher over real sockets: what the entry becomes, and what has arrived there.

What each answer means to an adapter: tests/adapters/test_http_adapter.py and test_stripe_answers.py.
The whole list: docs/verification.md.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import httpx
import pytest
from support.database import CHARGE, TABLES, Database
from support.entries import HOUR, age, put_one, queue_row, run_once, settlement_row, state
from support.loopback import closed_port

import outbox
from dispatchers.adapters import HttpAdapter, StripeAdapter
from dispatchers.testing import faulty_http as faulty
from dispatchers.testing.faulty_http import Behaviour, FaultyHttp
from dispatchers.testing.service_faults import Faults, ServiceFault
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import RunningStripe, running_stripe

SHORT = timedelta(seconds=3)  # for all of a send to a remote service that lets it wait; more than any other here takes
LONG = timedelta(seconds=20)
WEEK = timedelta(days=7)


@pytest.fixture(scope="module")
def listening() -> Iterator[FaultyHttp]:
    with faulty.faulty_http() as running:
        yield running


@pytest.fixture
def remote(listening: FaultyHttp) -> Iterator[FaultyHttp]:
    listening.behave(faulty.answer())
    listening.requests.clear()
    return listening


def send(database: Database, ob: outbox.Outbox, url: str, timeout: timedelta = LONG) -> None:
    """A dispatcher's `run_once`, with an adapter for the remote service of a service that keeps its keys for a week."""
    given: dict[str, Any] = {"window": WEEK, "statuses": {409: "in_progress", 422: "key_conflict"}}
    run_once(database, ob, adapters={"crm": HttpAdapter(base_url=url, timeout=timeout, **given)})


def put_contact(database: Database, ob: outbox.Outbox) -> UUID:
    return put_one(database, ob, payload={"url": "/contacts", "json": {"name": "Ada"}})


class EntryStatus(NamedTuple):
    """The status of an entry: its state, how many sends may have left, and whether it may have happened."""

    state: str
    attempts: int
    maybe_sent: bool


def entry_status(database: Database, id: UUID) -> EntryStatus:
    row = queue_row(database, id)
    return EntryStatus(row.state, row.attempts, row.maybe_sent)


def arrived(remote: FaultyHttp) -> int:
    """How many requests, all of which must be one and the same."""
    assert len({bytes(request) for request in remote.requests}) <= 1
    return len(remote.requests)


# --- nothing was sent


@pytest.mark.parametrize("how", ["refused", "no such name", "no TLS"])
def test_what_surely_never_left_counts_no_attempt_and_may_be_cancelled(
    sqlite: Database, ob: outbox.Outbox, remote: FaultyHttp, how: str
) -> None:
    urls = {
        "refused": closed_port(),
        "no such name": "http://crm.invalid",
        "no TLS": remote.url.replace("http", "https"),
    }
    id = put_contact(sqlite, ob)

    for _ in range(2):
        send(sqlite, ob, urls[how])
        age(sqlite, HOUR)

    assert entry_status(sqlite, id) == ("retry", 0, False)
    assert arrived(remote) == 0
    with sqlite.begin() as session:
        assert ob.cancel(session, id)


# --- it may have happened: the same key again, and then it is known


@pytest.mark.parametrize(
    ("behaviour", "timeout"),
    [
        pytest.param(faulty.hang, SHORT, id="hangs before the first byte"),
        pytest.param(faulty.drip_head, SHORT, id="a head that never ends, byte by byte"),
        pytest.param(faulty.close, LONG, id="the answer is lost"),
        pytest.param(faulty.reset, LONG, id="reset"),
        pytest.param(faulty.garble, LONG, id="no HTTP"),
        pytest.param(faulty.giant_head(), LONG, id="a giant head"),
        pytest.param(faulty.answer(409), LONG, id="the key is in flight"),
        *(pytest.param(faulty.redirect(status), LONG, id=str(status)) for status in (301, 302, 303, 307, 308)),
        *(pytest.param(faulty.answer(status), LONG, id=str(status)) for status in (500, 502, 503, 504)),
    ],
)
def test_what_proves_nothing_leaves_doubt_and_the_same_request_goes_again(
    sqlite: Database, ob: outbox.Outbox, remote: FaultyHttp, behaviour: Behaviour, timeout: timedelta
) -> None:
    id = put_contact(sqlite, ob)
    remote.behave(behaviour)

    send(sqlite, ob, remote.url, timeout)

    assert entry_status(sqlite, id) == ("retry", 1, True)
    assert arrived(remote) == 1
    remote.behave(faulty.answer(201))
    age(sqlite, HOUR)
    send(sqlite, ob, remote.url)
    assert (state(sqlite, id), settlement_row(sqlite, id).attempts) == ("delivered", 2)
    assert arrived(remote) == 2


# --- it happened, whatever became of the body


@pytest.mark.parametrize(
    ("behaviour", "timeout"),
    [
        pytest.param(faulty.answer(204), LONG, id="empty"),
        pytest.param(faulty.answer(200, body=b'{"id": '), LONG, id="broken JSON"),
        pytest.param(faulty.cut_short(), LONG, id="half a body"),
        pytest.param(faulty.reset_in_body(), LONG, id="reset in the body"),
        pytest.param(faulty.drip_body(), SHORT, id="a body that never ends, byte by byte"),
        pytest.param(faulty.giant(), LONG, id="a giant body"),
        pytest.param(faulty.gzip_bomb(), LONG, id="a gzip bomb"),
    ],
)
def test_what_says_success_is_delivered_and_never_sent_again(
    sqlite: Database, ob: outbox.Outbox, remote: FaultyHttp, behaviour: Behaviour, timeout: timedelta
) -> None:
    id = put_contact(sqlite, ob)
    remote.behave(behaviour)

    for _ in range(2):
        send(sqlite, ob, remote.url, timeout)
        age(sqlite, HOUR)

    assert (state(sqlite, id), settlement_row(sqlite, id).attempts) == ("delivered", 1)
    assert arrived(remote) == 1


# --- it was refused


@pytest.mark.parametrize(("status", "first", "later"), [(400, "failed", "uncertain"), (422, "uncertain", "uncertain")])
@pytest.mark.parametrize("is_first", [True, False], ids=["at first", "later"])
def test_a_refusal_is_proof_against_it_only_if_nothing_went_before(
    sqlite: Database, ob: outbox.Outbox, remote: FaultyHttp, status: int, first: str, later: str, is_first: bool
) -> None:
    """400: it is refused as it is. 422, at this service: the key belongs to another request."""
    id = put_contact(sqlite, ob)
    if not is_first:
        remote.behave(faulty.close)
        send(sqlite, ob, remote.url)
        age(sqlite, HOUR)
    remote.behave(faulty.answer(status))

    for _ in range(2):
        send(sqlite, ob, remote.url)
        age(sqlite, HOUR)

    assert state(sqlite, id) == (first if is_first else later)
    assert arrived(remote) == (1 if is_first else 2)


@pytest.mark.parametrize("status", [401, 403])
def test_an_authentication_error_delays_the_destination_without_an_attempt(
    sqlite: Database, ob: outbox.Outbox, remote: FaultyHttp, status: int
) -> None:
    first = put_contact(sqlite, ob)
    remote.behave(faulty.answer(status))
    send(sqlite, ob, remote.url)
    second = put_contact(sqlite, ob)

    send(sqlite, ob, remote.url)

    assert (entry_status(sqlite, first), entry_status(sqlite, second)) == (("retry", 0, False), ("pending", 0, False))
    assert arrived(remote) == 1
    remote.behave(faulty.answer())
    age(sqlite, HOUR)
    send(sqlite, ob, remote.url)
    assert [state(sqlite, id) for id in (first, second)] == ["delivered", "delivered"]


DATED = format_datetime(datetime.now(UTC) + 2 * HOUR, usegmt=True)


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        (None, 0, 60),
        ("1800", 1800, 1860),
        pytest.param(DATED, 3600, 7260, id="dated"),  # the workers must agree on the names of tests
        ("999999999", 24 * 3600, 72 * 3600 + 60),
        ("99999999999999999999", 0, 60),
        ("-5", 0, 60),
        ("NaN", 0, 60),
        ("soon", 0, 60),
    ],
)
def test_a_429_delays_the_destination_as_long_as_it_asks_within_limits(
    sqlite: Database, ob: outbox.Outbox, remote: FaultyHttp, asked: str | None, least: int, most: int
) -> None:
    id = put_contact(sqlite, ob)
    remote.behave(faulty.answer(429, headers={} if asked is None else {"Retry-After": asked}))
    before = datetime.now(UTC)

    send(sqlite, ob, remote.url)

    assert entry_status(sqlite, id) == ("retry", 0, False)
    (destination,) = sqlite.rows(TABLES.destination)
    waits = max(queue_row(sqlite, id).due_at, destination.cooldown_until) - before
    assert least <= waits.total_seconds() <= most
    put_contact(sqlite, ob)
    send(sqlite, ob, remote.url)
    assert arrived(remote) == 1


# --- a service that remembers its keys: the strict imitation of Stripe, and its books

CARD = {"amount": 2000, "currency": "eur", "payment_method": "pm_card_visa", "confirm": True}
QUIET = timedelta(minutes=2)  # longer than lease and margin: no earlier sender can be at work any more


@pytest.fixture
def stripe() -> Iterator[RunningStripe]:
    with running_stripe(random=Random(1), faults=Faults(slow_for=timedelta(seconds=4))) as running:
        yield running


def charge(
    database: Database, ob: outbox.Outbox, stripe: RunningStripe, *, lookup: bool = False, **settings: Any
) -> None:
    """A dispatcher's `run_once`, some time after whatever went before."""
    adapter = StripeAdapter(api_key=API_KEY, base_url=stripe.url, **settings)
    if not lookup:
        adapter.find = None
    age(database, QUIET)
    run_once(database, ob, adapters={"stripe": adapter})


def put_charge(database: Database, ob: outbox.Outbox) -> UUID:
    return put_one(database, ob, CHARGE, payload=CARD)


def answers(stripe: RunningStripe) -> list[tuple[int, bool]]:
    """The status of each answer to a write, and whether it repeated an earlier one."""
    return [(answer.status, answer.replayed) for answer in stripe.ledger.answers if answer.method == "POST"]


def test_a_charge_that_still_executes_is_repeated_until_its_answer(
    sqlite: Database, ob: outbox.Outbox, stripe: RunningStripe
) -> None:
    id = put_charge(sqlite, ob)
    stripe.force(ServiceFault.SLOW)

    charge(sqlite, ob, stripe, timeout=timedelta(seconds=1))
    assert entry_status(sqlite, id) == ("retry", 1, True)
    charge(sqlite, ob, stripe)
    assert entry_status(sqlite, id) == ("retry", 2, True)
    while state(sqlite, id) != "delivered":
        time.sleep(0.2)
        charge(sqlite, ob, stripe)

    in_flight, last = answers(stripe)[:-1], answers(stripe)[-1]
    assert (409, False) in in_flight
    assert last == (200, True)
    assert len(stripe.ledger.charges) == 1


@pytest.mark.parametrize(
    ("fault", "lookup", "becomes", "charges"),
    [
        (ServiceFault.FAIL_AFTER, True, "delivered", 1),
        (ServiceFault.FAIL_AFTER, False, "uncertain", 1),
        (ServiceFault.FAIL_BEFORE, True, "delivered", 1),
        (ServiceFault.FAIL_BEFORE, False, "uncertain", 0),
    ],
)
def test_a_repeated_500_is_looked_up_and_gets_a_new_key_only_if_absent(
    sqlite: Database,
    ob: outbox.Outbox,
    stripe: RunningStripe,
    fault: ServiceFault,
    lookup: bool,
    becomes: str,
    charges: int,
) -> None:
    """FAIL_AFTER: it was executed. FAIL_BEFORE: it was not, and never will be under this key. No answer shows which of them."""
    id = put_charge(sqlite, ob)
    stripe.force(fault)

    charge(sqlite, ob, stripe, lookup=lookup)
    assert answers(stripe) == [(500, False)]
    for _ in range(3):
        charge(sqlite, ob, stripe, lookup=lookup)

    again = [(200, False)] if fault is ServiceFault.FAIL_BEFORE and lookup else []
    assert state(sqlite, id) == becomes
    assert answers(stripe) == [(500, False), (500, True), *again]
    assert len(stripe.ledger.charges) == charges
    if again:
        assert stripe.ledger.answers[-1].key != ob.child_key("order:0", CHARGE)


@pytest.mark.parametrize("is_first", [True, False], ids=["at first", "later"])
def test_a_key_of_another_request_is_uncertain_and_never_sent_again(
    sqlite: Database, ob: outbox.Outbox, stripe: RunningStripe, is_first: bool
) -> None:
    id = put_charge(sqlite, ob)
    if not is_first:
        stripe.force(ServiceFault.LOSE_REQUEST)
        charge(sqlite, ob, stripe, lookup=True)
    key = ob.child_key("order:0", CHARGE)
    bearer = {"Authorization": f"Bearer {API_KEY}", "Idempotency-Key": key}
    other = httpx.post(
        f"{stripe.url}/v1/payment_intents", data={"amount": 1, "currency": "eur"}, headers=bearer, trust_env=False
    )
    assert other.status_code == 200

    for _ in range(3):
        charge(sqlite, ob, stripe, lookup=True)

    assert state(sqlite, id) == "uncertain"
    assert answers(stripe)[-1] == (400, False)
    assert len(answers(stripe)) == (2 if is_first else 3)
    assert [charge.amount for charge in stripe.ledger.charges] == [1]


@pytest.mark.parametrize(
    ("fault", "attempts", "statuses"),
    [
        (ServiceFault.LOSE_RESPONSE, 2, [(200, False), (200, True)]),
        (ServiceFault.LOSE_REQUEST, 2, None),
        (ServiceFault.UNAVAILABLE, 2, [(503, False), (200, False)]),
        (ServiceFault.RATE_LIMIT, 1, [(429, False), (200, False)]),
    ],
)
def test_one_attempt_is_one_request_to_stripe_and_one_charge_in_the_end(
    sqlite: Database, ob: outbox.Outbox, stripe: RunningStripe, fault: ServiceFault, attempts: int, statuses: Any
) -> None:
    id = put_charge(sqlite, ob)
    stripe.force(fault)

    charge(sqlite, ob, stripe)
    assert len(answers(stripe)) == 1
    charge(sqlite, ob, stripe)

    assert (state(sqlite, id), settlement_row(sqlite, id).attempts) == ("delivered", attempts)
    assert statuses in (None, answers(stripe))
    assert len(stripe.ledger.charges) == 1
