"""`outbox resume --after-restore`: what counts as maybe sent then, since when, and who said so."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import command, document, error_of, put_uncertain, succeeded
from support.database import TABLES, Database
from support.entries import change, claim_one, put, put_one, queue_row, reasons, run_once, settle, state

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import resume as admin_resume
from dispatchers.database_identity import DatabaseIdentity
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle
from outbox.times import NEVER

META = TABLES.meta
GIVEN = ("resume", "--after-restore", "--reason", "the disk was lost", "--actor", "ada")


@pytest.fixture
def stored(database: Database, ob: outbox.Outbox) -> DatabaseIdentity:
    """The stored identity of a suspended database."""
    identity = asyncio.run(DatabaseStore(database.engine, ob.configuration).check_identity("test", None)).identity
    database.execute(sa.update(META).values(suspended_reason="restored"))
    assert identity is not None
    return identity


def resume(database: Database, *options: str) -> Any:
    return document(*GIVEN, *options, database=database, OUTBOX_ENV="test")


def test_everything_unsettled_counts_as_maybe_sent_since_the_identity(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    ids = put(database, ob, count=3)

    resumed = resume(database)

    rows = [queue_row(database, id) for id in ids]
    assert {(row.state, row.maybe_sent, row.in_doubt_since) for row in rows} == {("retry", True, stored.checked_at)}
    assert resumed == {"since": stored.checked_at.isoformat().replace("+00:00", "Z"), "doubted": 3, "suspended": 0}
    assert reasons(database, ids[0]) == [
        f"may have been sent after {stored.checked_at:%Y-%m-%d %H:%M:%S UTC}: the disk was lost"
    ]


def test_the_dispatchers_resume_and_the_operator_is_on_record(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    id = put_one(database, ob)

    resume(database)
    printed = succeeded("status", database=database)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    row = database.rows(META)[0]
    assert (row.suspended_reason, row.resumed_by, row.resumed_reason) == (None, "ada", "the disk was lost")
    assert row.checked_at == row.resumed_at > stored.checked_at
    assert re.search(r"resumed \d+s ago by ada: the disk was lost", printed)
    assert state(database, id) == "delivered"


def test_an_earlier_doubt_stays_and_a_later_one_begins_at_the_identity(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    earlier, later = put(database, ob, count=2)
    hour = timedelta(hours=1)
    change(database, earlier, state="retry", maybe_sent=True, in_doubt_since=stored.checked_at - hour)
    change(database, later, state="retry", maybe_sent=True, in_doubt_since=stored.checked_at + hour)

    assert resume(database)["doubted"] == 1

    assert queue_row(database, earlier).in_doubt_since == stored.checked_at - hour
    assert queue_row(database, later).in_doubt_since == stored.checked_at


def test_a_sender_that_is_still_at_work_cannot_say_any_more_that_it_failed(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    store = DatabaseStore(database.engine, ob.configuration)
    id = put_one(database, ob)
    database.execute(sa.update(META).values(suspended_reason=None))
    claimed = claim_one(store)
    database.execute(sa.update(META).values(suspended_reason="restored"))

    resume(database)

    row = queue_row(database, id)
    assert (row.state, row.lease_token, row.attempts) == ("retry", None, 1)
    assert row.due_at == claimed.leased_at + timedelta(minutes=1)  # when its lease would have ended
    assert settle(store, (claimed, Settle("failed", 1, reason="status 422"))) == set()
    assert settle(store, (claimed, Settle("delivered", 1))) == {id}


def test_what_was_under_a_lease_before_the_identity_is_in_doubt_since_then(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    id = put_one(database, ob)
    leased_at = stored.checked_at - timedelta(seconds=30)
    until = leased_at + timedelta(minutes=1)
    change(database, id, state="sending", lease_token=id, lease_until=until, leased_at=leased_at)

    resume(database)

    assert queue_row(database, id).in_doubt_since == leased_at


def test_uncertain_entries_and_those_to_be_sent_again_stay_what_they_are(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    uncertain, again, suspended = put_uncertain(database, ob), put_one(database, ob), put_one(database, ob)
    change(database, again, maybe_sent=True)
    change(database, suspended, suspended_reason="by an operator", due_at=NEVER)

    assert resume(database)["doubted"] == 3

    assert [state(database, id) for id in (uncertain, again, suspended)] == ["uncertain", "pending", "retry"]
    assert queue_row(database, suspended).suspended_reason == "by an operator"


def test_with_nothing_lost_every_entry_keeps_its_state(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    id = put_one(database, ob)
    before = queue_row(database, id)

    resumed = resume(database, "--nothing-lost")

    assert resumed == {"since": None, "doubted": 0, "suspended": 0}
    assert queue_row(database, id) == before
    assert database.rows(META)[0].suspended_reason is None


def test_since_is_the_time_of_the_backup_where_no_dispatcher_noticed(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    asyncio.run(DatabaseStore(database.engine, ob.configuration).check_identity("test", None))

    resume(database, "--since", "2026-01-31T12:00Z")

    assert queue_row(database, id).in_doubt_since == datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_a_resume_that_was_cut_short_is_gone_on_with(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_resume, "MAX_ROWS", 2)
    ids = put(database, ob, count=5)
    real, batches = admin_resume._doubt, iter((True, True, False))
    word = admin_resume.OperatorDecision(env="test", actor="ada", reason="the disk was lost")

    def failing(*given: Any) -> int:
        if not next(batches):
            raise ConnectionError("the server is unavailable")
        return real(*given)

    monkeypatch.setattr(admin_resume, "_doubt", failing)
    with pytest.raises(ConnectionError):
        admin_resume.resume(database.engine, TABLES, word)
    monkeypatch.setattr(admin_resume, "_doubt", real)
    cut_short = database.rows(META)[0].suspended_reason
    resumed = admin_resume.resume(database.engine, TABLES, word)

    assert cut_short is not None
    assert resumed.doubted == 1
    assert all(queue_row(database, id).in_doubt_since == stored.checked_at for id in ids)
    assert [len(reasons(database, id)) for id in ids] == [1] * 5


def test_a_resume_without_a_suspension_keeps_the_dispatchers_out_meanwhile(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(DatabaseStore(database.engine, ob.configuration).check_identity("test", None))
    put_one(database, ob)
    seen: list[str | None] = []
    real = admin_resume._doubt

    def looking(*given: Any) -> int:
        seen.append(database.rows(META)[0].suspended_reason)
        return real(*given)

    monkeypatch.setattr(admin_resume, "_doubt", looking)
    admin_resume.resume(
        database.engine, TABLES, admin_resume.OperatorDecision(env="test", actor="ada", reason="restored")
    )

    assert seen == ["`outbox resume --after-restore` is running: run it again if it was interrupted"]


def test_a_second_resume_is_later_than_the_first_whatever_the_clock_does(
    database: Database, ob: outbox.Outbox, stored: DatabaseIdentity
) -> None:
    ahead = stored.checked_at + timedelta(days=1)
    database.execute(sa.update(META).values(resumed_at=ahead))

    resume(database)

    assert database.rows(META)[0].resumed_at > ahead


# --- what it says


def test_for_people_it_prints_what_was_done(database: Database, ob: outbox.Outbox, stored: DatabaseIdentity) -> None:
    put(database, ob, count=2)
    put_one(database, outbox.Outbox(ob.configuration.keyring, env="prod"))

    printed = succeeded(*GIVEN, database=database, OUTBOX_ENV="test")

    assert printed == (
        "sending is resumed\n"
        f"3 more entries count as maybe sent, after {stored.checked_at:%Y-%m-%d %H:%M:%S UTC}\n"
        "1 entries of another deployment are suspended: `outbox list --suspended` shows them\n"
    )


def test_a_suspension_shows_in_the_exit_code_of_status(database: Database, stored: DatabaseIdentity) -> None:
    status, _ = status_of(database)

    assert status == 5
    resume(database)
    assert status_of(database)[0] == 0


def status_of(database: Database) -> tuple[int, str]:
    result = command("status", "--exit-code", database=database)
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["resume", "--reason", "x"], "give either a DESTINATION or --after-restore"),
        (["resume", "mail", "--after-restore", "--reason", "x"], "give either a DESTINATION or --after-restore"),
        (
            ["resume", "mail", "--nothing-lost", "--reason", "x"],
            "--nothing-lost, --since and --adopt-from need --after-restore",
        ),
        (
            ["resume", "mail", "--since", "1h", "--reason", "x"],
            "--nothing-lost, --since and --adopt-from need --after-restore",
        ),
        (["resume", "--after-restore", "--env", "test"], "Missing option '--reason'."),
        (
            [*GIVEN, "--nothing-lost", "--since", "2h"],
            "--since says that commits may be missing, and --nothing-lost that none are: give only one",
        ),
    ],
)
def test_contradictions_are_wrong_usage(database: Database, arguments: list[str], text: str) -> None:
    assert error_of(*arguments, database=database, OUTBOX_ENV="test") == (2, "usage", text)


def test_it_must_know_whose_database_it_is(database: Database) -> None:
    printed = (2, "usage", "the database's env is unknown: give --env or set OUTBOX_ENV")

    assert error_of(*GIVEN, database=database) == printed


def test_a_database_without_an_identity_needs_the_time_of_the_backup(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)

    printed = error_of(*GIVEN, database=database, OUTBOX_ENV="test")

    assert printed == (
        1,
        "refused",
        "since None: must say when the backup was taken: the database has no recorded identity to derive it from",
    )
    assert resume(database, "--since", "1d")["doubted"] == 1


def test_the_future_is_no_time_of_a_backup(database: Database, stored: DatabaseIdentity) -> None:
    status, code, text = error_of(*GIVEN, "--since", "9000-01-01T00:00Z", database=database, OUTBOX_ENV="test")

    assert (status, code) == (1, "refused")
    assert text.startswith("since '9000-01-01T00:00:00+00:00': is in the future: the database's clock shows ")


def test_an_empty_reason_is_refused(database: Database, stored: DatabaseIdentity) -> None:
    arguments = ("resume", "--after-restore", "--reason", " ", "--actor", "ada")

    assert error_of(*arguments, database=database, OUTBOX_ENV="test") == (
        1,
        "refused",
        "reason ' ': must say why, and how you know; it is recorded",
    )
