"""An effect becomes an entry of the app's transaction: its payload, its key, and its status."""
