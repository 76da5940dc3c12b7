"""What the tables may be called: a name that is accepted works in every statement."""

import asyncio
import string

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.migrations import Database as Blank

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters import MemoryAdapter
from outbox import migrations
from outbox.sql.schema.identifiers import FORBIDDEN, check_table_names

pytest_plugins = ["support.blank_databases"]

TAKEN = "".join(sign for sign in string.punctuation if sign not in FORBIDDEN) + "_x"


def test_every_sign_that_a_name_may_hold_works_everywhere(blank_postgresql: Blank) -> None:
    names = {"schema": TAKEN, "prefix": TAKEN}
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", **names)
    engine = sa.create_engine(blank_postgresql.url, poolclass=sa.NullPool)

    migrations.upgrade(engine, **names)
    migrations.partition(engine, **names)
    migrations.check(engine, **names)
    with Session(engine) as session, session.begin():
        with ob.idempotent(session, "retry-1", scope="acct_1", content={}) as claim:
            ob.enqueue(session, "crm.upsert", {}, ordering_key="ada")
            claim.respond(200)
        cancelled = ob.enqueue(session, "crm.upsert", {}, parent="order:2")
        assert ob.cancel(session, cancelled.id)
        states = [entry.state for entry in ob.status(session, "order:2")]
    settled = asyncio.run(Dispatcher(engine, outbox=ob, adapters={"crm": MemoryAdapter()}).run_once())
    migrations.unpartition(engine, **names)
    migrations.downgrade(engine, **names)

    assert (states, settled) == (["cancelled"], 1)


@pytest.mark.parametrize("name", ["%s_", "%(x)s", ":x_", "a\\b", "$one$", "shop.outbox"])
def test_a_name_that_a_statement_would_read_otherwise_is_refused(name: str) -> None:
    for schema, prefix in ((name, "outbox_"), (None, name)):
        with pytest.raises(outbox.InvalidValue, match="must not contain any of"):
            check_table_names(schema, prefix)
