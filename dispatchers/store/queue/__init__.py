"""The statements of the queue: claim, settle, ordering, fair share and throttling."""
