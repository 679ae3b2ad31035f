"""Preparation of data sets: one scan of all shards, whose result is written as an index."""
