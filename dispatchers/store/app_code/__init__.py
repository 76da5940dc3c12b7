"""Code of the app in the store's transactions: callbacks and completions."""
