"""A shop on Starlette: orders that may be sent twice, and are placed once. See app.py."""
