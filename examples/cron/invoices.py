"""The table, in the database that also has the outbox's."""

import os
from datetime import date

from sqlalchemy import Engine, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outbox
from outbox import migrations


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    """state: open, then paid or refused. amount: in cents."""

    __tablename__ = "cron_invoice"

    number: Mapped[int] = mapped_column(primary_key=True)
    due_on: Mapped[date]
    amount: Mapped[int]
    card: Mapped[str] = mapped_column(String(40), default="pm_card_visa")
    state: Mapped[str] = mapped_column(String(10), default="open")


def connect() -> Engine:
    engine = create_engine(os.environ["DATABASE_URL"])
    if engine.dialect.name == "sqlite":
        outbox.prepare_sqlite(engine)
    return engine


def create_tables() -> None:
    """Both sides' tables. A real app lets Alembic do it: docs/migrations.md."""
    engine = connect()
    migrations.upgrade(engine)
    Base.metadata.create_all(engine)
    engine.dispose()
