"""The HTTP/1.1 client of the adapters. It distinguishes "nothing was sent" from doubt, and an answer from a foreign one."""
