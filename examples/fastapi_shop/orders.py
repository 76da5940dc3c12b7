"""The shop's own table, in the database that also has the outbox's."""

import os

from sqlalchemy import Engine, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outbox
from outbox import migrations


class Base(DeclarativeBase):
    pass


class Order(Base):
    """state: placed, then paid, unpaid or unclear. request_key: what its request came under, and so its effects."""

    __tablename__ = "shop_order"

    number: Mapped[str] = mapped_column(String(36), primary_key=True)
    customer: Mapped[str] = mapped_column(String(40))
    request_key: Mapped[str] = mapped_column(String(255))
    email: Mapped[str] = mapped_column(String(254))
    amount: Mapped[int]
    currency: Mapped[str] = mapped_column(String(3))
    state: Mapped[str] = mapped_column(String(10), default="placed")

    @property
    def parent(self) -> outbox.ParentKey:
        """Where its effects are found: with the scope and source of the request's claim."""
        return outbox.ParentKey(self.request_key, scope=self.customer, source="http")


def connect() -> Engine:
    engine = create_engine(os.environ["DATABASE_URL"])
    if engine.dialect.name == "sqlite":
        outbox.prepare_sqlite(engine)
    return engine


def create_tables() -> None:
    """Both sides' tables. A real shop lets Alembic do it: docs/migrations.md."""
    engine = connect()
    migrations.upgrade(engine)
    Base.metadata.create_all(engine)
    engine.dispose()
