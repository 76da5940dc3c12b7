"""The shop's own table, next to the outbox's: its rows are committed together with an entry, or with its settling."""

from datetime import datetime

from sqlalchemy import Engine, String, create_engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outbox

MAX_CONNECTIONS = 16  # a checkout takes milliseconds, and a burst of clients may wait for its turn


class Base(DeclarativeBase):
    pass


class Order(Base):
    """paid_at: when the outbox had settled its charge as delivered; None until then. Both instants are UTC."""

    __tablename__ = "demo_order"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    customer: Mapped[str] = mapped_column(String(40))
    email: Mapped[str] = mapped_column(String(254))
    amount: Mapped[int]
    currency: Mapped[str] = mapped_column(String(3))
    created_at: Mapped[datetime]
    paid_at: Mapped[datetime | None]


def connect(url: str) -> Engine:
    if make_url(url).get_backend_name() == "sqlite":
        engine = create_engine(url)
        outbox.prepare_sqlite(engine)
        return engine
    return create_engine(url, pool_size=MAX_CONNECTIONS, max_overflow=0)
