"""The bounds of the histogram of lock waits."""

LOCK_WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""A request in one transaction takes milliseconds; a wait lasts 5 s at most, unless the app gives it another budget."""
