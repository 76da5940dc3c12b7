"""What an operator reads: entries, groups, requests, destinations, dispatchers and counts."""
