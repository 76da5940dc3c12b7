"""The statements of the queue: claim, settle, ordering, fair share, throttling, and rows that cannot be read."""
