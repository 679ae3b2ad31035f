"""Bytes of samples, from local files and from slow storage."""
