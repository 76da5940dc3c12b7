"""The files of a small app whose tests use the plugin for pytest: `pytester.makepyfile(**SHOP)`."""

SHOP = {
    "shop": """
        import outbox
        from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
        from dispatchers import Operations

        outbox.configure(outbox.Keyring.public(), env="test")
        CHARGE = {"amount": 2000, "currency": "eur", "payment_method": "pm_card_visa", "confirm": True}

        class Base(DeclarativeBase):
            pass

        class Order(Base):
            __tablename__ = "shop_order"
            id: Mapped[int] = mapped_column(primary_key=True)
            state: Mapped[str] = mapped_column(default="placed")

        effects = Operations()

        @effects.on_settled("stripe.payment_intents.create")
        def charged(session, settlement):
            session.get_one(Order, int(settlement.entry.payload["metadata"]["order"])).state = "paid"
            outbox.enqueue(session, "mail.send", {"to": "ada"})

        def place(session, number, **options):
            session.add(Order(id=number))
            charge = {**CHARGE, "metadata": {"order": str(number)}}
            outbox.enqueue(session, "stripe.payment_intents.create", charge, parent=f"order:{number}", **options)
    """,
    "conftest": """
        import pytest
        from dispatchers.adapters import MemoryAdapter
        from shop import Base, effects

        @pytest.fixture(scope="session")
        def outbox_metadata():
            return Base.metadata

        @pytest.fixture
        def outbox_operations():
            return effects

        @pytest.fixture
        def outbox_adapters(fake_stripe):
            return {"stripe": fake_stripe.adapter(), "mail": MemoryAdapter()}
    """,
}
