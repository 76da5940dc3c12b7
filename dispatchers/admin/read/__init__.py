"""Reads for operators: entries, groups, requests, destinations, dispatchers and counts."""
