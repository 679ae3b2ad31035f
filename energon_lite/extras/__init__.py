"""Extras of the core: each folder can be deleted, and the rest of the package still works."""
