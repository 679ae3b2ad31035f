"""Is this a place where training can run? What is wrong, and what to do."""
