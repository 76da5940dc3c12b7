"""What the tests share: databases, entries, servers, clients."""
