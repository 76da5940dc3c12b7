"""The dispatcher's store: the protocol that the pipeline uses, its implementation, and the pipeline's SQL."""
