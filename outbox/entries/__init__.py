"""Entries on the app's side: enqueue them, check their payloads, read their status, cancel them."""
