"""The dashboard in a real browser. A package, so that one Chromium serves all its modules and is gone after the last."""
