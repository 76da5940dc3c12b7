"""Transactions of the store, their limits, and what notices that a server is silent."""
