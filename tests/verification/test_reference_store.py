"""Each database does what the reference store says, step by step, whatever the steps."""

from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.database import Database
from support.store_agreement import Agreement
from support.store_transitions import KINDS, OPERATIONS

import outbox

SENT_AGAIN = {"sent again after rejected": 0, "sent again after stored 500": 1}
"""An operator's decision, and the epoch of the key that it leads to: a new one if the service has stored its answer."""

pytestmark = [pytest.mark.on_mariadb, pytest.mark.in_portable_mode]


@pytest.mark.parametrize(("kind", "examples"), [("postgresql", 15), ("sqlite", 25), ("mariadb", 8)])
def test_a_database_does_what_the_reference_store_does(
    request: pytest.FixtureRequest, ob: outbox.Outbox, kind: str, examples: int
) -> None:
    database: Database = request.getfixturevalue(kind)

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Agreement(database, ob),
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, derandomize=True),
    )


@pytest.mark.every_value
@pytest.mark.parametrize("since", ["nothing", "release", "deferred", "in progress", "stored 500", *SENT_AGAIN])
def test_a_database_treats_late_answers_as_the_reference_store_does(
    database: Database, ob: outbox.Outbox, since: str
) -> None:
    """since: what has become of the entry when the first sender answers late; the second one answers after that, twice."""
    agreement = Agreement(database, ob)
    for kind in KINDS:
        agreement.enqueue("crm.upsert", [kind, kind])
    agreement.claim("native")
    agreement.senders_crash("native")
    late, fresh = agreement.claims[: len(KINDS)], agreement.claims[len(KINDS) :]

    for pairs in fresh if since != "nothing" else ():
        agreement.settle_one(since.removeprefix("sent again after "), pairs)
    if since in SENT_AGAIN:
        for id in agreement.ids:
            agreement.decide_one(id, "send_again")
        agreement.claim("native")
        for pairs in agreement.claims[2 * len(KINDS) :]:
            agreement.settle_one("delivered", pairs)
        heads = [agreement.reference.queue[pairs[0].id] for pairs in fresh]
        assert {(row.state, row.key_epoch) for row in heads} == {("pending", SENT_AGAIN[since])}
    if since == "sent again after stored 500":  # of what is pending, no late answer is a proof
        agreement.time_passes(3)
        agreement.claim("native")
        assert {row.state for row in heads} == {"sending"}
    agreement.they_agree()
    for pairs in (*late, *fresh, *fresh):
        assert pairs[0].ordering_key is not None
        agreement.settle_one(pairs[0].ordering_key, pairs)
        agreement.they_agree()


@pytest.mark.every_value
@pytest.mark.parametrize("kind", KINDS)
def test_a_database_treats_lookups_as_the_reference_store_does(
    database: Database, ob: outbox.Outbox, kind: str
) -> None:
    agreement = Agreement(database, ob)
    for operation in OPERATIONS:  # of the first, which no dispatcher looks up by itself
        agreement.enqueue(operation, [None])
    agreement.claim("native")
    for claims in agreement.claims[:]:
        agreement.settle_one("stored 500", claims)
    agreement.they_agree()

    for form in ("hex", "native", "native"):  # the last one finds nothing that awaits no lookup
        agreement.request_lookups(form)
        agreement.they_agree()
    for hours in (4, 4, 40):  # after which no status lookup is due any more
        agreement.time_passes(hours)
        agreement.claims.clear()
        agreement.claim("native")
        agreement.they_agree()
        for claims in agreement.claims[:]:
            agreement.settle_one(kind, claims)
            agreement.they_agree()
    agreement.request_lookups("native")
    agreement.they_agree()


@pytest.mark.every_value
@pytest.mark.parametrize("verdict", ["happened", "did_not_happen", "send_again", "cancel", "retry"])
def test_a_database_treats_groups_as_the_reference_store_does(
    database: Database, ob: outbox.Outbox, verdict: str
) -> None:
    """One group for each way in which its head may end, of three entries; then an operator decides on that one."""
    agreement = Agreement(database, ob)
    for group in KINDS:
        agreement.enqueue("crm.upsert", [group, group, group])
    heads = agreement.ids[::3]

    def resume(kinds: Mapping[str | None, str]) -> None:
        agreement.claims.clear()
        agreement.claim("native")
        agreement.they_agree()
        for claims in agreement.claims[:]:
            agreement.settle_one(kinds.get(claims[1].ordering_key, "delivered"), claims)
            agreement.they_agree()

    resume({group: group for group in KINDS})
    resume({})
    for head in heads:
        agreement.decide_one(head, verdict)
        agreement.they_agree()
    for _ in range(2):
        resume({})
        agreement.time_passes(2)
    for group in KINDS:
        agreement.release(group)
        agreement.they_agree()
    for _ in range(3):
        resume({})


@pytest.mark.every_value
@pytest.mark.parametrize("kind", KINDS)
def test_a_database_resumes_after_a_restore_as_the_reference_store_does(
    database: Database, ob: outbox.Outbox, kind: str
) -> None:
    agreement = Agreement(database, ob)
    for operation in OPERATIONS:
        agreement.enqueue(operation, [None, "a"])
    agreement.claim("native")
    early, late, *others = agreement.claims
    agreement.settle_one(kind, early)
    agreement.they_agree()
    agreement.suspend()
    agreement.claim("native")
    agreement.settle_one(kind, late)
    agreement.they_agree()

    agreement.resume_after_restore(1)

    agreement.they_agree()
    for claims in (late, *others):
        agreement.settle_one(kind, claims)
        agreement.they_agree()
    agreement.senders_crash("hex")
    agreement.they_agree()
