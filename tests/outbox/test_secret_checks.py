"""Another secret under the same key id is found at the start, by the app and by the dispatcher, and nothing is sent under it."""

import asyncio
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from support.cli_runner import document, error_of, succeeded
from support.database import TABLES, Database
from support.entries import dispatcher, put_one, run_once, settlement_row, state

import outbox
from dispatchers.adapters import MemoryAdapter
from outbox.errors import ConfigurationError
from outbox.keys import Keyring, derive_tag, encode_hex, key_fields, secret_check
from outbox.sql.connections.places import place_of

OTHER = bytes(range(1, 33))
OURS = bytes(range(32))
DIFFERS = "the secret of kid 'k1' differs from the one that the other processes of this database use: keys would differ"


def with_ring(secrets: dict[str, bytes], current: str | None = None) -> outbox.Outbox:
    return outbox.Outbox(Keyring(secrets, current=current), env="test")


def serve(database: Database, ob: outbox.Outbox) -> int:
    return run_once(database, ob, adapters={"crm": MemoryAdapter()})


def recorded(database: Database) -> dict[str, str]:
    return {row.kid: row.secret_check for row in database.rows(TABLES.kid)}


def test_a_dispatcher_with_another_secret_under_a_kid_sends_nothing(database: Database, ob: outbox.Outbox) -> None:
    serve(database, ob)
    id = put_one(database, ob)
    wrong = with_ring({"k1": OTHER})

    with pytest.raises(ConfigurationError, match=DIFFERS) as caught:
        asyncio.run(dispatcher(database, wrong, adapters={"crm": MemoryAdapter()}).check())
    with pytest.raises(ConfigurationError, match=DIFFERS):
        serve(database, wrong)

    assert str(caught.value).endswith("`outbox keys forget k1` lets the next dispatcher record it")
    assert recorded(database) == {"k1": secret_check(ob.configuration.keyring, "k1")}
    assert state(database, id) == "pending"
    assert serve(database, ob) == 1


def test_the_first_dispatcher_compares_its_secret_with_the_apps_entries(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    with pytest.raises(ConfigurationError, match=f"differs from the one under which the app enqueued entry {id}"):
        serve(database, with_ring({"k1": OTHER}))

    assert recorded(database) == {}
    assert serve(database, ob) == 1


@pytest.mark.parametrize("change", [{"source": ""}, {"tag": b"\0" * 32}], ids=["no source", "another tag"])
def test_a_malformed_entry_stops_no_dispatcher_at_its_start(
    database: Database, ob: outbox.Outbox, change: dict[str, object]
) -> None:
    malformed = min(put_one(database, ob), put_one(database, ob))
    database.execute(sa.update(TABLES.entry).where(TABLES.entry.c.id == malformed).values(change))

    serve(database, ob)

    assert recorded(database) == {"k1": secret_check(ob.configuration.keyring, "k1")}
    with pytest.raises(ConfigurationError, match=DIFFERS):
        serve(database, with_ring({"k1": OTHER}))


def test_a_rotation_records_the_new_secret_and_an_old_one_may_go(database: Database, ob: outbox.Outbox) -> None:
    serve(database, ob)
    rotated, alone = with_ring({"k2": OTHER, "k1": OURS}, current="k2"), with_ring({"k2": OTHER})

    ids = [put_one(database, ob), put_one(database, rotated)]
    assert serve(database, rotated) == 2
    ids.append(put_one(database, alone))
    assert serve(database, alone) == 1

    assert list(recorded(database)) == ["k1", "k2"]
    assert all(settlement_row(database, id).state == "delivered" for id in ids)
    with pytest.raises(ConfigurationError, match="the secret of kid 'k2' differs from"):
        serve(database, with_ring({"k2": OURS, "k1": OURS}, current="k2"))


def test_an_operator_can_have_a_wrongly_recorded_secret_recorded_again(database: Database, ob: outbox.Outbox) -> None:
    serve(database, with_ring({"k1": OTHER}))  # the first one here, before the app had enqueued anything
    with pytest.raises(ConfigurationError, match=DIFFERS):
        serve(database, ob)

    assert document("keys", "forget", "k1", database=database) == {"kid": "k1"}

    serve(database, ob)
    assert recorded(database) == {"k1": secret_check(ob.configuration.keyring, "k1")}
    assert error_of("keys", "forget", "k9", database=database) == (
        3,
        "not_found",
        "no secret is recorded for kid 'k9'",
    )
    assert succeeded("keys", "forget", "k1", database=database).startswith("kid k1: the next dispatcher that starts")


def _other(kid: str) -> str:
    return kid[:-1] + ("b" if kid.endswith("a") else "a")


@given(secret=st.binary(min_size=32, max_size=96), kid=st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True))
def test_a_check_value_is_of_one_secret_and_kid_and_is_no_part_of_any_key(secret: bytes, kid: str) -> None:
    ring = Keyring({kid: secret})
    check = secret_check(ring, kid)

    assert check == secret_check(Keyring({kid: secret, "other.kid": OURS}, current=kid), kid)
    assert check != secret_check(Keyring({kid: secret + b"\1"}), kid)
    assert check != secret_check(Keyring({_other(kid): secret}), _other(kid))
    assert len(check) == 16
    assert check not in encode_hex(derive_tag(ring, kid, key_fields("test", "order:1", "crm.upsert", "")))
    assert secret.hex().find(check) == -1


# --- the app's start


Check = Callable[[Database, outbox.Outbox], None]


@pytest.fixture(params=["sync", "async"])
def check(request: pytest.FixtureRequest) -> Check:
    """`Outbox.check` on an Engine, and awaited on an AsyncEngine."""

    def on_engine(database: Database, ob: outbox.Outbox) -> None:
        ob.check(database.engine)

    def on_async_engine(database: Database, ob: outbox.Outbox) -> None:
        async def main() -> None:
            await ob.check(database.async_engine())

        asyncio.run(main())

    return on_engine if request.param == "sync" else on_async_engine


def test_the_app_finds_at_its_start_what_its_requests_would_fail_of(
    database: Database, ob: outbox.Outbox, check: Check
) -> None:
    check(database, ob)  # a database that no dispatcher has seen yet
    serve(database, ob)
    check(database, ob)

    with pytest.raises(ConfigurationError, match=DIFFERS):
        check(database, with_ring({"k1": OTHER}))
    with pytest.raises(
        ConfigurationError, match=r"the database .* belongs to env 'test', but this process has env 'tets'"
    ):
        check(database, outbox.Outbox(ob.configuration.keyring, env="tets"))
    database.execute(sa.text("ALTER TABLE outbox_kid RENAME TO elsewhere"))
    with pytest.raises(outbox.SchemaError, match="lacks table outbox_kid"):
        check(database, ob)
    database.execute(sa.text("ALTER TABLE elsewhere RENAME TO outbox_kid"))


@pytest.mark.differs("portable", "the start refuses its level instead")
def test_the_apps_start_refuses_an_engine_in_autocommit_mode(database: Database, ob: outbox.Outbox) -> None:
    engine = database.unprepared_engine(isolation_level="AUTOCOMMIT")
    async_engine = database.async_engine().execution_options(isolation_level="AUTOCOMMIT")

    async def main() -> None:
        await ob.check(async_engine)

    for check in (lambda: ob.check(engine), lambda: asyncio.run(main())):
        with pytest.raises(ConfigurationError, match="the engine is in autocommit mode, so every enqueue would raise"):
            check()


def test_without_a_secret_the_apps_start_says_what_to_set(monkeypatch: pytest.MonkeyPatch, sqlite: Database) -> None:
    from outbox.default_outbox import DefaultOutbox

    for name in ("OUTBOX_SECRET", "OUTBOX_ENV"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ConfigurationError, match="or set OUTBOX_SECRET and OUTBOX_ENV"):
        DefaultOutbox().check(sqlite.engine)


def test_only_an_engine_of_a_known_database_is_checked(ob: outbox.Outbox) -> None:
    with pytest.raises(ConfigurationError, match=r"outbox\.check needs an Engine or an AsyncEngine, not str"):
        ob.check("sqlite://")  # type: ignore[call-overload]


# --- the first request of an app that did not check


@pytest.mark.differs("mariadb", "a table is missing first, because there is no function")
@pytest.mark.differs("portable", "a table is missing first, because there is no function")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_request_without_the_tables_learns_how_they_are_made(
    database: Database, is_async: bool, ob: outbox.Outbox
) -> None:
    elsewhere = outbox.Outbox(ob.configuration.keyring, env="test", prefix="absent_")

    async def enqueue_async() -> None:
        async with database.async_session() as session, session.begin():
            elsewhere.enqueue(session, "crm.upsert", {}, parent="order:1")

    def enqueue() -> None:
        with database.begin() as session:
            elsewhere.enqueue(session, "crm.upsert", {}, parent="order:1")

    def claim() -> None:
        with database.begin() as session, elsewhere.idempotent(session, "retry-1", scope="ada", content=b""):
            pass

    with pytest.raises(outbox.SchemaError) as caught:
        asyncio.run(enqueue_async()) if is_async else enqueue()
    with pytest.raises(outbox.SchemaError) as claimed:
        claim()

    assert str(caught.value) == (
        "the outbox's table 'absent_entry' does not exist in the database"
        f" {place_of(database.engine)}, as this connection sees it: run `outbox db upgrade`; or the app's own"
        " Alembic, if that makes the outbox's tables; or set `schema` and `prefix` to where they are"
    )
    missing = "table 'absent_record'" if database.name == "sqlite" else "function 'absent_claim_key'"
    assert f"the outbox's {missing} does not exist" in str(claimed.value)


def test_a_table_of_the_apps_own_that_is_missing_is_the_databases_error(database: Database, ob: outbox.Outbox) -> None:
    assert ob.configuration.tables  # their names are known

    with pytest.raises(sa.exc.DBAPIError, match="outbox_of_mine"), database.engine.begin() as connection:
        connection.exec_driver_sql("SELECT * FROM outbox_of_mine")
