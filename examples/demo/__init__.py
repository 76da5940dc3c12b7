"""Three hundred card charges and their receipts through crashes and lost responses, and an audit that counts them.

    python -m examples.demo [--orders 300] [--sqlite | --database URL] [--seed N] [--forgetful]

Six processes: impatient clients (`clients.py`), a small shop (`shop.py`, `orders.py`), the dispatcher (`outbox run
examples.demo.effects:make_dispatcher`), a payment service that speaks Stripe's API and a mail server, which both misbehave
(`dispatchers.testing.stripe_service`, `mail_server.py`), and this one. It starts the others (`stage.py`, `act.py`,
`children.py`), kills the running dispatcher (`killer.py`), shows what happens (`opening.py`, `view.py`), resolves one entry
that is uncertain by the command line (`person.py`), and has the remote services' own ledgers audited (`audit.py`, `report.py`).

Read `shop.py` and `effects.py` for how to use the library; the rest is theatre.
"""
