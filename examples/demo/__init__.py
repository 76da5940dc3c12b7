"""A demo: 300 card charges and their receipts, with crashes and lost responses, and an audit that counts them.

    python -m examples.demo [--orders 300] [--sqlite | --database URL] [--seed N] [--forgetful]

There are six processes: impatient clients (`clients.py`), a small shop (`shop.py`, `orders.py`), the dispatcher (`outbox run
examples.demo.effects:make_dispatcher`), a payment service that imitates Stripe and a mail service that imitates Postmark, which
both inject faults (`stripe_service` and `provider_service` in `dispatchers.testing`), and this process.

This process starts the others (`demo_run.py`, `scenario.py`, `children.py`), kills the running dispatcher (`killer.py`) and
shows what happens (`introduction.py`, `view.py`). It resolves one uncertain entry by the command line
(`operator_decision.py`), and audits the remote services' own ledgers (`audit.py`, `report.py`).

Read `shop.py` and `effects.py` to learn how to use the library. The other files only run the demo.
"""
