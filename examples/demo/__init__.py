"""Three hundred card charges through crashes and lost responses, and an audit that counts them.

    python -m examples.demo [--orders 300] [--sqlite | --database URL] [--seed N]

Five processes: impatient clients (`clients.py`), a small shop (`shop.py`, the part that an app would write), the
dispatcher (`outbox run examples.demo.effects:make_dispatcher`), a payment service that speaks Stripe's API and misbehaves
(`dispatchers.testing.stripe_service`), and this one: it starts the others (`stage.py`, `children.py`), kills the
dispatcher at work (`killer.py`), shows what goes on (`view.py`) and has the payment service's own ledger audited
(`audit.py`, `report.py`).

Read `shop.py` and `effects.py` for how to use the library; the rest is theatre.
"""
