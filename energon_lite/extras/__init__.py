"""Guests of the core: each folder can be deleted, and the rest still works."""
