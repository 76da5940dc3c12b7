"""The HTTP/1.1 client of the adapters. It can tell "nothing was sent" from doubt, and an answer from one that is foreign."""
