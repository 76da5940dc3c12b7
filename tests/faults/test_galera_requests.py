"""Requests on the nodes of a Galera cluster whose commits are refused."""

from contextlib import nullcontext, suppress
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support.database import TABLES
from support.entries import HOUR
from support.galera_cluster import missing_part, running_cluster
from support.galera_nodes import on_a_node, wait_for_all

import outbox
from outbox import migrations
from outbox.sql.connections.engines import engine_of
from outbox.sql.errors.driver import DEADLOCK, sqlstate


def test_the_holder_of_a_lease_answers_although_a_commit_is_refused(ob: outbox.Outbox) -> None:
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    with running_cluster() as cluster:
        engines = [engine_of(url) for url in cluster.urls("shop")]
        migrations.upgrade(engines[0])
        the_holder_of_a_lease_answers(engines, ob)
        for engine in engines:
            engine.dispose()


def the_holder_of_a_lease_answers(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    """Meanwhile another node changes the table, or another attempt takes the request over."""

    def change_table(connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"ALTER TABLE {TABLES.record.name} COMMENT 'changed'")

    def take_over(connection: sa.Connection) -> None:
        taken = sa.update(TABLES.record).where(TABLES.record.c.lease_token.is_not(None))
        connection.execute(taken.values(lease_token=uuid4()))

    for work, expected in ((change_table, nullcontext()), (take_over, pytest.raises(outbox.LeaseLost))):
        engine, refused = engine_of(engines[0].url), list[Any]()
        sa.event.listen(engine, "handle_error", refused.append)
        leased = ob.leased(engine, work.__name__, scope="ada", content={"amount": 1}, lease=HOUR)
        with suppress(outbox.NotAnswered), leased as claim:
            wait_for_all(engines)
            sa.event.listen(engine, "commit", lambda _, work=work: on_a_node(engines[1], work), once=True)
            with expected:
                claim.respond(201, {"order": 42})
        engine.dispose()
        assert [sqlstate(context.original_exception) for context in refused] == [DEADLOCK]
