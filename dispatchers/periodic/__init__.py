"""Periodic effects: what an app declares of a schedule, and which of its instants are due."""
