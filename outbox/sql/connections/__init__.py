"""Connections, engines and servers, and what a transaction must be."""
