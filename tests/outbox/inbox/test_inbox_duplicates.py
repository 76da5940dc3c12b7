"""A duplicate whose handler writes all the same: nothing of it is committed, and it costs the batch nothing."""

from contextlib import suppress
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import Database, Order, statements_of
from support.inbox_batches import Action

import outbox

pytestmark = pytest.mark.on_mariadb

INSERT = "INSERT INTO shop_order (customer, amount) VALUES ('twice', 1)"


def add(session: Session) -> None:
    session.add(Order(customer="twice", amount=1))


def add_and_flush(session: Session) -> None:
    session.add(Order(customer="twice", amount=1))
    session.flush()


def change(session: Session) -> None:
    session.scalars(sa.select(Order)).first().amount += 1  # type: ignore[union-attr]


def change_in_bulk(session: Session) -> None:
    session.execute(sa.update(Order).values(amount=7))


def delete(session: Session) -> None:
    session.delete(session.scalars(sa.select(Order)).first())


def insert_in_bulk(session: Session) -> None:
    session.bulk_save_objects([Order(customer="twice", amount=1)])


def insert_into_the_table(session: Session) -> None:
    session.connection().execute(sa.insert(Order).values(customer="twice", amount=1))


def insert_as_text(session: Session) -> None:
    session.execute(sa.text(INSERT))


def insert_as_text_after_a_comment(session: Session) -> None:
    session.execute(sa.text(f"/* app */ -- of the shop\n {INSERT}"))


def insert_through_the_driver(session: Session) -> None:
    session.connection().exec_driver_sql(INSERT)


def insert_and_continue(session: Session) -> None:
    with suppress(outbox.AlreadyAnswered):
        session.execute(sa.text(INSERT))
    session.scalars(sa.select(Order)).all()


def add_and_continue(session: Session) -> None:
    session.add(Order(customer="twice", amount=1))
    with suppress(outbox.AlreadyAnswered):
        session.flush()


def insert_on_the_drivers_connection(session: Session) -> None:
    session.connection().connection.cursor().execute(INSERT)


FORGOTTEN: list[Action] = [
    add,
    add_and_flush,
    change,
    change_in_bulk,
    delete,
    insert_in_bulk,
    insert_into_the_table,
    insert_as_text,
    insert_as_text_after_a_comment,
    insert_through_the_driver,
    add_and_continue,
]


def consume_with_a_duplicate(database: Database, ob: outbox.Outbox, forgotten: Action) -> dict[str, Exception]:
    """Three messages in one transaction, of which the second was handled before; its handler writes all the same."""
    errors: dict[str, Exception] = {}
    prefix = uuid4().hex

    def consume(session: Session, number: int) -> None:
        name = f"{prefix}-{number}"
        try:
            with ob.inbox(session, consumer="billing", message_id=name, scope="shop") as message:
                if message.duplicate:
                    forgotten(session)
                else:
                    session.add(Order(customer=name, amount=1))
        except Exception as error:
            errors[name] = error

    with database.begin() as session:
        consume(session, 1)
    with database.begin() as session:
        for number in range(3):
            consume(session, number)

    orders = [(order.customer, order.amount) for order in database.orders if not order.customer.startswith("old")]
    assert sorted(orders) == [(f"{prefix}-{number}", 1) for number in range(3)], forgotten
    database.execute(sa.update(Order).values(customer="old"))
    return errors


def test_a_duplicate_whose_handler_writes_costs_the_batch_nothing(database: Database, ob: outbox.Outbox) -> None:
    for forgotten in FORGOTTEN:
        (error,) = consume_with_a_duplicate(database, ob, forgotten).values()

        assert isinstance(error, outbox.AlreadyAnswered), forgotten


def test_what_a_duplicates_handler_writes_unrecognised_is_undone(postgresql: Database, ob: outbox.Outbox) -> None:
    postgresql.execute(sa.text(f"CREATE FUNCTION place() RETURNS int LANGUAGE sql AS $$ {INSERT} RETURNING id $$"))
    selects: list[Action] = [
        insert_on_the_drivers_connection,
        insert_and_continue,
        lambda session: session.execute(sa.text("SELECT place()")),
        lambda session: session.execute(sa.select(sa.func.place())),
        lambda session: session.execute(sa.text(f"WITH o AS ({INSERT} RETURNING id) SELECT * FROM o")),
    ]
    for forgotten in selects:
        assert consume_with_a_duplicate(postgresql, ob, forgotten) == {}


def test_a_duplicates_handler_cannot_write_on_an_older_connection(postgresql: Database, ob: outbox.Outbox) -> None:
    postgresql.execute(sa.text(f"CREATE FUNCTION place() RETURNS int LANGUAGE sql AS $$ {INSERT} RETURNING id $$"))
    for _ in range(2):
        with postgresql.begin() as session:
            connection = session.connection()
            with ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop") as message:
                if message.duplicate:
                    connection.execute(sa.text("SELECT place()"))

    assert postgresql.orders == []


def test_a_duplicate_that_is_looked_at_takes_one_statement(postgresql: Database, ob: outbox.Outbox) -> None:
    for _ in range(2):
        with postgresql.begin() as session:
            session.connection()
            block = ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop")
            with statements_of(postgresql.engine) as sent, block as message:
                pass

    assert message.duplicate
    assert len(sent) == 1
