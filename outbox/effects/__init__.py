"""Typed effects: an operation together with the type of its payload and of its result."""
