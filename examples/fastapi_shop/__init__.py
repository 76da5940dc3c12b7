"""A small FastAPI shop: an order, its charge at Stripe, its receipt by e-mail. README.md explains how to run it.

`app.py` and `effects.py` are what an app would have; `orders.py` is its table, `__main__.py` a stage to try it on.
"""
