"""Linting: an examination of all samples of a data set that reports damaged samples and shards."""
