"""The dispatcher's side of the database: all of its SQL, and the protocol that the pipeline knows."""
