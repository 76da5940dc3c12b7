"""How many examples Hypothesis tries in a test that is repeated: on each database, or with each driver."""

import hypothesis


def divided(*, over: int) -> int:
    """The usual number, divided over so many cases of the test: together they try as many as a test that is not repeated."""
    return max(1, hypothesis.settings.default.max_examples // over)
