"""What contradicts a stored database identity, and what does not."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.database import Database

import outbox
from dispatchers import Dispatcher
from dispatchers.database_identity import (
    IDENTITY_EVERY,
    DatabaseIdentity,
    bounds,
    is_due,
    is_promotion,
    position,
    suspicion,
)
from outbox.errors import ConfigurationError

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
IDENTITY = DatabaseIdentity(
    environment="prod",
    system_identifier="71",
    timeline="00000001",
    place="5/16400",
    lsn="0/16EF4C8",
    checked_at=NOON,
    number=7,
)
NOW = replace(IDENTITY, lsn="0/16EF500", checked_at=NOON + timedelta(seconds=5))


def test_the_same_server_a_little_later_is_not_suspicious() -> None:
    assert suspicion(NOW, IDENTITY, IDENTITY) is None
    assert suspicion(NOW, IDENTITY, None) is None
    assert suspicion(NOW, None, None) is None


@pytest.mark.parametrize(
    ("changed", "saying"),
    [
        (
            {"system_identifier": "72"},
            "the server has changed, system identifier 72 instead of 71: the database was restored from a dump, copied or"
            " upgraded",
        ),
        (
            {"timeline": "00000002"},
            "the server is on timeline 00000002 instead of 00000001: a standby was promoted, or a backup was restored",
        ),
        ({"place": "5/17000"}, "the tables have changed, 5/17000 instead of 5/16400: they were restored or copied"),
        (
            {"lsn": "0/16EF4C7"},
            "the write-ahead log went back to 0/16EF4C7 from 0/16EF4C8: an older state was restored",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("by", ["the database's", "a remembered"])
def test_each_fact_that_changed_is_suspicious_by_either_identity(changed: dict[str, Any], saying: str, by: str) -> None:
    now = replace(NOW, **changed)

    reason = suspicion(now, IDENTITY, None) if by == "the database's" else suspicion(now, replace(now), IDENTITY)

    assert reason == saying


PROMOTED = replace(NOW, timeline="00000002")


def test_another_timeline_alone_is_a_promotion() -> None:
    assert is_promotion(PROMOTED, IDENTITY, IDENTITY)
    assert is_promotion(PROMOTED, IDENTITY, None)
    assert not is_promotion(NOW, IDENTITY, IDENTITY)


@pytest.mark.parametrize(
    "changed",
    [
        {"system_identifier": "72"},
        {"place": "5/17000"},
        {"lsn": "0/16EF4C7"},
        {"timeline": None},
    ],
    ids=str,
)
def test_a_promotion_that_contradicts_the_identity_is_none(changed: dict[str, Any]) -> None:
    assert not is_promotion(replace(PROMOTED, **changed), IDENTITY, IDENTITY)


def test_a_promotion_that_lost_the_last_identity_is_none() -> None:
    known = replace(IDENTITY, number=IDENTITY.number + 1, checked_at=IDENTITY.checked_at + timedelta(minutes=1))

    assert not is_promotion(PROMOTED, IDENTITY, known)


def test_a_server_without_a_remembered_promotion_is_none() -> None:
    assert not is_promotion(NOW, IDENTITY, replace(IDENTITY, timeline="00000002"))


def test_a_timeline_that_is_unknown_for_a_while_contradicts_nothing() -> None:
    """As that of a MariaDB is, while it follows another server."""
    following = replace(NOW, timeline=None)

    assert suspicion(following, IDENTITY, IDENTITY) is None
    assert suspicion(NOW, replace(IDENTITY, timeline=None), None) is None
    assert is_due(following, IDENTITY)
    assert is_due(NOW, replace(IDENTITY, timeline=None))


@pytest.mark.parametrize("changed", [{"system_identifier": None}, {"place": None}])
def test_a_stored_fact_that_the_server_no_longer_reports_is_suspicious(changed: dict[str, Any]) -> None:
    assert suspicion(replace(NOW, **changed), IDENTITY, None) is not None
    assert suspicion(NOW, replace(IDENTITY, **changed), None) is None


def test_a_database_without_the_last_committed_identity_is_suspicious() -> None:
    later = replace(IDENTITY, checked_at=NOON + timedelta(minutes=1), number=8)

    assert suspicion(NOW, IDENTITY, later) == (
        "the database has identity 7 of 2026-01-31 12:00:00 UTC, although identity 8 of 2026-01-31 12:01:00 UTC had been"
        " committed: an older state was restored"
    )
    assert suspicion(NOW, None, IDENTITY) == (
        "the database has no identity, although identity 7 of 2026-01-31 12:00:00 UTC had been committed: an older state was"
        " restored"
    )


def test_an_identity_written_since_in_place_of_the_lost_one_hides_nothing() -> None:
    rewritten = replace(IDENTITY, checked_at=NOON + timedelta(hours=1))

    assert "an older state was restored" in str(suspicion(NOW, rewritten, IDENTITY))
    assert suspicion(NOW, replace(rewritten, number=8), IDENTITY) is None


def test_the_loss_came_after_the_identity_unless_that_was_written_later() -> None:
    lost = replace(IDENTITY, checked_at=NOON + timedelta(minutes=1), number=8)
    promoted = replace(NOW, timeline="00000002")

    assert bounds(NOW, IDENTITY, lost)
    assert bounds(promoted, IDENTITY, None)
    assert not bounds(NOW, replace(IDENTITY, checked_at=NOON + timedelta(hours=1)), lost)
    assert bounds(promoted, replace(IDENTITY, checked_at=NOON + timedelta(hours=1)), lost)


def test_what_a_process_remembers_is_outdated_once_an_operator_has_resumed() -> None:
    resumed = replace(IDENTITY, timeline="00000002", resumed_at=NOON)
    now = replace(NOW, timeline="00000002")

    assert suspicion(now, resumed, IDENTITY) is None
    assert suspicion(now, resumed, replace(IDENTITY, resumed_at=NOON - timedelta(days=1))) is None
    assert suspicion(now, resumed, replace(IDENTITY, resumed_at=NOON)) is not None
    assert suspicion(now, replace(resumed, resumed_at=None), replace(resumed, number=8)) is not None


def test_a_position_grows_with_the_log_whatever_its_digits() -> None:
    assert position("0/FF000000") < position("1/0") < position("1/A") < position("A/0")


def test_an_identity_is_due_after_its_time_and_not_while_the_clock_is_slow() -> None:
    assert is_due(replace(IDENTITY, checked_at=NOON + IDENTITY_EVERY), IDENTITY)
    assert not is_due(replace(IDENTITY, checked_at=NOON + IDENTITY_EVERY / 2), IDENTITY)
    assert not is_due(replace(IDENTITY, checked_at=NOON - timedelta(days=1)), IDENTITY)


@pytest.mark.parametrize("slip", ["false", "0", 1, None])
def test_only_a_bool_declares_that_promotions_lose_nothing(sqlite: Database, ob: outbox.Outbox, slip: Any) -> None:
    """The text "false", as an environment variable brings it, is true."""
    with pytest.raises(ConfigurationError, match=r"promotions_lose_nothing=.*: must be True or False"):
        Dispatcher(sqlite.engine, outbox=ob, promotions_lose_nothing=slip)
