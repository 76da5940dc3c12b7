"""The dispatcher's side of the database: the protocol that the pipeline knows, and its SQL."""
