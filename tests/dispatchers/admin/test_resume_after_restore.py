"""After a lossy failover, a restore or a copy, on real servers: noticed before anything is sent, and nothing twice after."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import document
from support.copied_data import copied
from support.database import CHARGE, TABLES, Database
from support.entries import age, dispatcher, put, put_one, queue_row, reasons, run_once, state, states, until_true
from support.restore import Address, Cluster, cluster, eventually, following, make_template, recovering

import outbox
from dispatchers import database_identity
from dispatchers.adapters import MemoryAdapter, StripeAdapter
from dispatchers.admin.decide.resume import FOREIGN
from dispatchers.errors import Suspended
from dispatchers.testing.stripe_service import RunningStripe, running_stripe
from outbox.errors import ConfigurationError

CARD = {"amount": 2000, "currency": "eur", "payment_method": "pm_card_visa", "confirm": True}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template") / "data")


@pytest.fixture
def primary(template: Path, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(copied(template, tmp_path / "primary")) as running:
        yield running


@pytest.fixture
def renewed_at_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were always a minute between two checks."""
    monkeypatch.setattr(database_identity, "IDENTITY_EVERY", timedelta(0))


@pytest.fixture
def stripe() -> Iterator[RunningStripe]:
    with running_stripe() as running:
        yield running


def adapters(stripe: RunningStripe) -> dict[str, Any]:
    """The services: one that remembers its keys for a day, and one that keeps none."""
    return {"stripe": StripeAdapter(api_key="sk_test_fake", base_url=stripe.url), "mail": MemoryAdapter(window=None)}


def put_charge(database: Database, ob: outbox.Outbox) -> UUID:
    return put_one(database, ob, CHARGE, payload=CARD)


def replays(stripe: RunningStripe) -> list[bool]:
    """Of each request that reached the service, whether it was a repeat."""
    return [answer.replayed for answer in stripe.ledger.answers]


def resume(database: Database, *options: str, env: str = "test") -> Any:
    given = ("--after-restore", "--reason", "the disk was lost", "--actor", "ada")
    return document("resume", *given, *options, database=database, OUTBOX_ENV=env)


def require_suspended(database: Database, ob: outbox.Outbox, stripe: RunningStripe, saying: str) -> None:
    """Nothing is sent and nothing is cancelled, and it is said why."""
    answers = len(stripe.ledger.answers)
    with pytest.raises(Suspended, match=saying):
        run_once(database, ob, adapters=adapters(stripe))
    with database.begin() as session:
        assert not any(ob.cancel(session, row.id) for row in database.queue)
    assert len(stripe.ledger.answers) == answers
    assert saying in document("status", database=database)["suspended_reason"]


def test_a_charge_that_a_lossy_failover_forgot_is_not_made_twice(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path
) -> None:
    run_once(primary, ob, adapters=adapters(stripe))
    with cluster(following(primary.backup(tmp_path / "standby"), primary)) as standby:
        charge, mail = put_charge(primary, ob), put_one(primary, ob, "mail.send")
        eventually(lambda: standby.replayed(primary))
        standby.cut_off()
        assert run_once(primary, ob, adapters=adapters(stripe)) == 2
        primary.kill()
        standby.promote()

        with standby.begin() as session:
            assert not ob.cancel(session, charge)  # no dispatcher has noticed yet
        require_suspended(standby, ob, stripe, "the server is on timeline 00000002 instead of 00000001")
        resumed = resume(standby)
        run_once(standby, ob, adapters=adapters(stripe))

        assert resumed["doubted"] == 2
        assert (state(standby, charge), state(standby, mail)) == ("delivered", "uncertain")
        assert replays(stripe) == [False, True]
        assert len(stripe.ledger.charges) == 1
        assert reasons(standby, mail)[0].endswith("UTC: the disk was lost")


def test_in_a_lossy_failover_a_dispatcher_sends_nothing_until_resumed(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path
) -> None:
    address = Address(primary)

    async def main(standby: Cluster) -> None:
        working = dispatcher(address.engine, ob, adapters=adapters(stripe))
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        put(primary, ob, CHARGE, payload=CARD, count=5)
        await until_true(lambda: standby.replayed(primary) and states(primary)["delivered"] == 5, 60)
        standby.cut_off()
        put(primary, ob, CHARGE, payload=CARD, count=5)
        await until_true(lambda: states(primary)["delivered"] == 10, 60)
        address.now = standby
        primary.kill()
        sent = len(stripe.ledger.answers)
        standby.promote()
        put(standby, ob, CHARGE, payload=CARD, count=5)  # the clients ask again, for the five that were lost
        await until_true(lambda: standby.rows(TABLES.meta)[0].suspended_reason is not None, 60)
        await asyncio.to_thread(require_suspended, standby, ob, stripe, "timeline 00000002")
        assert len(stripe.ledger.answers) == sent

        await asyncio.to_thread(resume, standby)
        await until_true(lambda: not standby.queue, 60)
        stopping.set()
        await pump
        await working.close()

    with cluster(following(primary.backup(tmp_path / "standby"), primary)) as standby:
        asyncio.run(main(standby))

        assert set(states(standby)) == {"delivered"}
        keys = [effect.key for effect in stripe.ledger.charges]
        assert len(keys) == len(set(keys))


def test_a_switch_to_a_standby_that_lost_nothing_resumes_without_doubt(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path
) -> None:
    run_once(primary, ob, adapters=adapters(stripe))
    with cluster(following(primary.backup(tmp_path / "standby"), primary)) as standby:
        mail = put_one(primary, ob, "mail.send")
        eventually(lambda: standby.replayed(primary))
        primary.stop()
        standby.promote()

        require_suspended(standby, ob, stripe, "timeline 00000002")
        resumed = resume(standby, "--nothing-lost")
        run_once(standby, ob, adapters=adapters(stripe))

        assert resumed == {"since": None, "doubted": 0, "suspended": 0}
        assert state(standby, mail) == "delivered"


def test_a_fleet_whose_promotions_lose_nothing_continues_by_itself(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    declared = {"adapters": adapters(stripe), "promotions_lose_nothing": True}
    run_once(primary, ob, **declared)
    with cluster(following(primary.backup(tmp_path / "standby"), primary)) as standby:
        mail = put_one(primary, ob, "mail.send")
        eventually(lambda: standby.replayed(primary))
        primary.stop()
        standby.promote()

        run_once(standby, ob, **declared)
        require_trusted_by_all = run_once(standby, ob, adapters=adapters(stripe))

        assert (state(standby, mail), require_trusted_by_all) == ("delivered", 0)
        (meta,) = standby.rows(TABLES.meta)
        assert (meta.suspended_reason, meta.resumed_by, meta.timeline) == (None, "promotions_lose_nothing", "00000002")
        assert "timeline 00000002 instead of 00000001" in meta.resumed_reason
        assert "sending continues because promotions_lose_nothing is set" in caplog.text


@pytest.mark.parametrize("since", ["", "2d"], ids=["young", "older than the service's memory"])
def test_a_charge_after_the_backup_is_repeated_only_while_its_key_is_known(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path, since: str
) -> None:
    run_once(primary, ob, adapters=adapters(stripe))
    charge = put_charge(primary, ob)
    backup = primary.backup(tmp_path / "backup")
    run_once(primary, ob, adapters=adapters(stripe))
    with cluster(recovering(backup)) as restored:
        eventually(lambda: not restored.say("SELECT pg_is_in_recovery()"))
        require_suspended(restored, ob, stripe, "timeline 00000002")
        resume(restored, *(["--since", since] if since else []))
        run_once(restored, ob, adapters=adapters(stripe))

        if since:  # not sent, but looked up, once no earlier sender can be at work
            assert state(restored, charge) == "retry"
            age(restored, timedelta(minutes=2))
            run_once(restored, ob, adapters=adapters(stripe))

        assert state(restored, charge) == "delivered"
        assert replays(stripe) == [False, not since]  # the status lookup itself repeats nothing
        assert len(stripe.ledger.charges) == 1


@pytest.mark.usefixtures("renewed_at_every_check")
def test_the_identity_file_shows_an_older_state_of_a_timeline(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path
) -> None:
    identity = tmp_path / "mark"
    run_once(primary, ob, adapters=adapters(stripe), identity_file=identity)
    charge = put_charge(primary, ob)
    backup = primary.backup(tmp_path / "backup")
    run_once(primary, ob, adapters=adapters(stripe), identity_file=identity)
    with cluster(backup) as restored:  # as a disk's snapshot: no recovery to another timeline
        with pytest.raises(Suspended, match="an older state was restored"):
            run_once(restored, ob, adapters=adapters(stripe), identity_file=identity)
        require_suspended(restored, ob, stripe, "an older state was restored")
        resume(restored)
        run_once(restored, ob, adapters=adapters(stripe), identity_file=identity)

        assert state(restored, charge) == "delivered"
        assert replays(stripe) == [False, True]


def test_rows_restored_into_another_server_are_noticed(
    primary: Cluster, postgresql: Database, ob: outbox.Outbox, stripe: RunningStripe
) -> None:
    """As pg_dump and pg_restore do it."""
    charge = put_charge(primary, ob)
    run_once(primary, ob, adapters={"mail": MemoryAdapter(window=None)})
    dumped = {name: primary.rows(table) for name, table in tables()}
    run_once(primary, ob, adapters=adapters(stripe))
    with postgresql.begin() as session:
        for name, table in tables():
            if dumped[name]:
                session.execute(sa.insert(table), [dict(row._mapping) for row in dumped[name]])

    require_suspended(postgresql, ob, stripe, "the server has changed, system identifier")
    resume(postgresql)
    run_once(postgresql, ob, adapters=adapters(stripe))

    assert state(postgresql, charge) == "delivered"
    assert replays(stripe) == [False, True]


def tables() -> list[tuple[str, sa.Table]]:
    return [(name, getattr(TABLES, name)) for name in ("entry", "queue", "settlement", "event", "meta")]


def test_a_copy_within_the_same_server_is_noticed(primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe) -> None:
    put_charge(primary, ob)
    run_once(primary, ob, adapters={"mail": MemoryAdapter(window=None)})
    primary.dispose()
    primary.say("CREATE DATABASE copy TEMPLATE postgres")
    copy = Database(primary.url.set(database="copy"))

    require_suspended(copy, ob, stripe, "the tables have changed")

    copy.dispose()


def test_a_copy_for_another_deployment_never_sends_what_it_was_copied_with(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path
) -> None:
    theirs = put_charge(primary, ob)
    run_once(primary, ob, adapters={"mail": MemoryAdapter(window=None)})
    staging = outbox.Outbox(ob.configuration.keyring, env="staging")
    with cluster(primary.backup(tmp_path / "backup")) as copy:
        ours = put_charge(copy, staging)

        with pytest.raises(
            ConfigurationError, match=r"the database .* belongs to env 'test', but this process has env"
        ):
            run_once(copy, staging, adapters=adapters(stripe))
        resumed = resume(copy, "--adopt-from", "test", env="staging")
        asyncio.run(dispatcher(copy, staging, adapters=adapters(stripe)).check())
        run_once(copy, staging, adapters=adapters(stripe))

        assert resumed["suspended"] == 1
        assert state(copy, ours) == "delivered"
        assert queue_row(copy, theirs).suspended_reason == FOREIGN
        assert len(stripe.ledger.charges) == 1


@pytest.mark.usefixtures("renewed_at_every_check")
@pytest.mark.parametrize("end", [Cluster.stop, Cluster.kill], ids=["stopped", "killed"])
def test_a_server_that_was_restarted_is_the_same(
    primary: Cluster, ob: outbox.Outbox, stripe: RunningStripe, tmp_path: Path, end: Any
) -> None:
    address = Address(primary)
    working = dispatcher(address.engine, ob, adapters=adapters(stripe), identity_file=tmp_path / "mark")
    put_charge(primary, ob)
    asyncio.run(working.run_once())
    asyncio.run(working.run_once())
    charge = put_charge(primary, ob)
    end(primary)
    with cluster(primary.data) as restarted:
        address.now = restarted
        address.engine.dispose()

        asyncio.run(working.run_once())

        address.engine.dispose()
        assert state(restarted, charge) == "delivered"
        assert replays(stripe) == [False, False]
