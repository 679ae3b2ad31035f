"""Stores of files by name, lazy values, and a cache on a local disk."""
